"""Which formats a server's answers are in, and how the answers to one request are to be read.

The formats are found once, from options or from the model; a request adds its tools and its prompt. What the engine has
to know goes into the sampling parameters: which special tokens are text (marks would be skipped otherwise), where
reasoning ends, and what a forced call must look like.
"""

import runpy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from octavo import plugins
from octavo.config.engine import ModelConfig
from octavo.config.server_args import ServerArgs
from octavo.errors import ClientError, ConfigError
from octavo.logger import get_logger
from octavo.server.engine_client import EngineClient
from octavo.server.parsers.answer import AnswerMachine, Plan
from octavo.server.parsers.harmony import HarmonyMachine
from octavo.server.parsers.json_calls import json_calls, named_call
from octavo.server.reasoning_formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    detect_reasoning_format,
    find_reasoning_format,
)
from octavo.server.text_machine import PlainText, TextMachine
from octavo.server.token_sections import TokenSections
from octavo.server.tool_formats import TOOL_FORMATS, ToolFormat, detect_tool_format, find_tool_format
from octavo.server.tools import ToolUse, answer_schema, read_tool_use, strict_tag
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.sampling_params import (
    ReasoningSection,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

logger = get_logger(__name__)

Row = TypeVar("Row", ToolFormat, ReasoningFormat)


class ChatBody(Protocol):
    """The fields of a chat request that say how its answer is to be read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    include_reasoning: bool | None
    thinking_token_budget: int | None


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are read."""

    machine: type[AnswerMachine] | None  # None: all text is content
    plan: Plan
    tokenizer: Tokenizer | None
    section: ReasoningSection | None = None
    shown_special_token_ids: list[int] = field(default_factory=list)
    constraint: StructuredOutputsParams | None = None  # what calls are held to
    is_thinking_off: bool = False  # there is nothing that a budget could limit

    def make_machine(self) -> TextMachine:
        """A machine for one choice."""
        if self.machine is None:
            return PlainText()
        machine = self.machine(self.plan)
        if self.plan.reasoning_starts and self.tokenizer is not None:
            counting = replace(self.plan, openings={}, bare={}, tools={}, max_calls=None)
            machine.sections = TokenSections(self.machine(counting), self.tokenizer, self.plan.hides_reasoning)
        return machine

    def adjust(self, params: SamplingParams) -> None:
        """Tell the engine what it has to know."""
        params.reasoning = self.section
        if self.shown_special_token_ids:
            params.shown_special_token_ids = self.shown_special_token_ids
        if self.is_thinking_off:
            params.thinking_token_budget = None
        if self.constraint is not None:
            if params.structured_outputs is not None:
                raise ClientError(
                    "tools that are strict or a call that is forced, and a response format, exclude each other.",
                    param="tool_choice",
                )
            params.structured_outputs = self.constraint
        if self.plan.max_calls is not None and params.output_kind is RequestOutputKind.FINAL_ONLY:
            params.output_kind = RequestOutputKind.DELTA  # so that generation can stop behind the last call


class OutputFormats:
    """The formats of one server's model."""

    def __init__(self, args: ServerArgs, model: ModelConfig, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        tool_rows, reasoning_rows = _known_rows(args.tool_parser_plugin)
        tools, reasoning = named_formats(args)
        templates = "" if tokenizer is None else "\n".join(tokenizer.info.chat_templates.values())
        model_type = model.hf_config.get("model_type")
        self.tools = _choose("tool calls", tools, detect_tool_format(templates, model_type, tool_rows))
        self.reasoning = _choose("reasoning", reasoning, detect_reasoning_format(templates, reasoning_rows))
        if args.enable_auto_tool_choice and self.tools is None:
            raise ConfigError(
                "enable_auto_tool_choice needs to know how the model writes tool calls, which neither its chat template "
                "nor its type says; name the format with tool_call_parser.",
                param="tool_call_parser",
            )
        self._is_harmony = any(row is not None and row.is_harmony for row in (self.tools, self.reasoning))
        if self._is_harmony:  # channels are one format
            self.tools, self.reasoning = find_tool_format("harmony"), find_reasoning_format("harmony")
        self._closed_section = self._make_section()
        self._shown_ids = {has_tools: self._find_shown_ids(has_tools) for has_tools in (False, True)}

    def read(self, body: ChatBody, prompt: str, variables: dict[str, Any]) -> Reading:
        """How to read the answers to `body`, whose prompt was rendered with these template variables."""
        use = read_tool_use(body.tools, body.tool_choice)
        self._check(use)
        if self._is_harmony and body.thinking_token_budget not in (None, -1):
            raise ClientError(
                "thinking_token_budget cannot be kept with this model's format; use reasoning_effort.",
                param="thinking_token_budget",
            )
        is_open = None if self.reasoning is None else self.reasoning.is_open(prompt, variables)
        max_calls = 1 if body.parallel_tool_calls is False and use.tools else None
        plan = Plan(
            hides_reasoning=body.include_reasoning is False,
            tools=use.tools,
            used_ids=_call_ids(body.messages),
            max_calls=None if use.is_forced else max_calls,  # a grammar that forces calls counts them itself
        )
        if self.reasoning is not None:
            plan = replace(
                plan,
                reasoning_starts=self.reasoning.starts,
                reasoning_ends=self.reasoning.ends,
                in_reasoning=is_open is True,
                may_reason=is_open is not True,  # a model may open a section that nobody asked for
                layout=self.reasoning.layout,
            )
        plan = self._with_tools(plan, use)
        section = None
        if self._closed_section is not None and (self._is_harmony or is_open is not False):
            section = msgspec.structs.replace(self._closed_section, is_open=self._is_harmony or is_open is True)
        is_plain = self.reasoning is None and not use.tools
        return Reading(
            None if is_plain else HarmonyMachine if self._is_harmony else AnswerMachine,
            plan,
            self._tokenizer,
            section,
            self._shown_ids[bool(use.tools)],
            self._constraint(use, max_calls),
            is_thinking_off=is_open is False,
        )

    def _check(self, use: ToolUse) -> None:
        """Refuse what this model's format cannot do."""
        if use.mode == "auto" and self.tools is None:
            raise ClientError(
                "tools cannot be used with this model: it is not known how it writes calls. Start the server with "
                '--tool-call-parser, or send tool_choice "required", one function, or "none".',
                param="tools",
            )
        if use.is_forced and self._is_harmony:
            raise ClientError(
                'a call cannot be forced with this model\'s format; send tool_choice "auto" or "none".',
                param="tool_choice",
            )
        if use.is_strict and (self.tools is None or self.tools.trigger is None):
            raise ClientError(
                'strict: true cannot be kept with tool_choice "auto" and this model\'s format of calls; leave strict out, or '
                'send tool_choice "required" or one function.',
                param="tools",
            )

    def _constraint(self, use: ToolUse, max_calls: int | None) -> StructuredOutputsParams | None:
        """What holds the calls of an answer to their schemas."""
        if use.is_forced:
            return StructuredOutputsParams(json=answer_schema(use, max_calls))
        if use.is_strict and self.tools is not None and self.tools.trigger is not None:
            return StructuredOutputsParams(structural_tag=strict_tag(use, self.tools.written, self.tools.trigger))
        return None

    def _with_tools(self, plan: Plan, use: ToolUse) -> Plan:
        """The plan, with how calls look."""
        if use.mode == "named":
            (name,) = use.tools
            return replace(plan, bare={"{": named_call(name)}, finish_reason="stop")
        if use.mode == "required":
            return replace(plan, bare=dict.fromkeys("[{", json_calls()))
        if use.mode == "none" or self.tools is None:
            return plan
        openings, bare = self.tools.openings, self.tools.bare
        if use.is_strict and self.tools.trigger is not None:  # only behind this mark does the grammar rule
            openings, bare = {self.tools.trigger: openings[self.tools.trigger]}, {}
        return replace(
            plan,
            openings=openings,
            bare=bare,
            make_id=self.tools.make_id,
            layout=(*plan.layout, *self.tools.layout),
            calls_end_reasoning=self.reasoning is not None and self.reasoning.calls_end_it,
        )

    def _make_section(self) -> ReasoningSection | None:
        """The section of an answer that does not begin inside of it; None without a format."""
        if self._tokenizer is None or self.reasoning is None:
            return None
        start, end = self.reasoning.starts[0], self.reasoning.ends[0]
        start_ids, end_ids = (self._tokenizer.encode(mark, add_special_tokens=False) for mark in (start, end))
        closing_ids = self._tokens_beginning_like(end_ids[-1]) if len(end_ids) > 1 else []
        return ReasoningSection(False, start, end, start_ids, end_ids, closing_ids)

    def _tokens_beginning_like(self, token_id: int) -> list[int]:
        """The token first, then every other one that begins with its text."""
        assert self._tokenizer is not None
        text = self._tokenizer.token_text(token_id)
        others = (other for other in range(len(self._tokenizer)) if self._tokenizer.token_text(other).startswith(text))
        return [token_id, *(other for other in others if other != token_id)]

    def _find_shown_ids(self, has_tools: bool) -> list[int]:
        """The special tokens that occur in the marks of the formats in use."""
        if self._tokenizer is None:
            return []
        rows: list[ToolFormat | ReasoningFormat] = []
        rows += [self.reasoning] if self.reasoning is not None else []
        rows += [self.tools] if self.tools is not None and has_tools else []
        marks = "\n".join(mark for row in rows for mark in row.all_marks())
        special = ((token_id, self._tokenizer.token_text(token_id)) for token_id in sorted(self._tokenizer.special_ids))
        return [token_id for token_id, text in special if text and text in marks]


def make_formats(engine: EngineClient, args: ServerArgs) -> OutputFormats:
    """The formats of an engine's model."""
    try:
        tokenizer = engine.tokenizer
    except ClientError:
        tokenizer = None  # without text nothing is read
    return OutputFormats(args, engine.config.model, tokenizer)


def named_formats(args: ServerArgs) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """The formats that options name; ConfigError for one that is not known."""
    tool_rows, reasoning_rows = _known_rows(args.tool_parser_plugin)
    return (
        find_tool_format(args.tool_call_parser, tool_rows) if args.tool_call_parser else None,
        find_reasoning_format(args.reasoning_parser, reasoning_rows) if args.reasoning_parser else None,
    )


@cache
def _known_rows(plugin: str | None) -> tuple[list[ToolFormat], list[ReasoningFormat]]:
    """The rows of plugins, which come first, and our own."""
    found: list[Any] = [row for rows in plugins.load(plugins.OUTPUT_FORMATS).values() for row in rows]
    if plugin is not None:
        names = _run_plugin(plugin)
        found += [row for name in ("TOOL_FORMATS", "REASONING_FORMATS") for row in names.get(name, ())]
    return (
        [row for row in found if isinstance(row, ToolFormat)] + list(TOOL_FORMATS),
        [row for row in found if isinstance(row, ReasoningFormat)] + list(REASONING_FORMATS),
    )


def _run_plugin(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ConfigError(f"tool_parser_plugin={path!r} is not a file.", param="tool_parser_plugin")
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise ConfigError(
            f"tool_parser_plugin={path!r} failed: {type(error).__name__}: {error}.", param="tool_parser_plugin"
        ) from error
    if not names.get("TOOL_FORMATS") and not names.get("REASONING_FORMATS"):
        raise ConfigError(
            f"tool_parser_plugin={path!r} defines neither TOOL_FORMATS nor REASONING_FORMATS.",
            param="tool_parser_plugin",
        )
    return names


def _choose(what: str, named: Row | None, detected: Row | None) -> Row | None:
    """The row that was named, else the one that was detected, said in the log."""
    if named is None and detected is not None:
        logger.info(
            "%s are read in the format %s (%s), by the model's chat template or type",
            what,
            detected.names[0],
            detected.models,
        )
    return named or detected


def _call_ids(messages: Iterable[dict[str, Any]]) -> frozenset[str]:
    """The ids of the calls in a conversation."""
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    return frozenset(call["id"] for call in calls if isinstance(call.get("id"), str))
