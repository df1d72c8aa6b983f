"""Runs answers through a machine, in pieces, and collects what comes out."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo.server.parsers.answer import AnswerMachine, Plan
from octavo.server.parsers.calls import Tool
from octavo.server.parsers.harmony import HarmonyMachine
from octavo.server.reasoning_formats import ReasoningFormat, find_reasoning_format
from octavo.server.text_machine import (
    ContentDelta,
    Event,
    Finish,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from octavo.server.tool_formats import ToolFormat, find_tool_format

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
)
REFERRING = Tool(
    "visit",
    {
        "properties": {
            "first name": {"type": "string"},
            "day": {"allOf": [{"$ref": "#/$defs/Day"}]},
            "size": {"type": "integer"},
        },
        "$defs": {"Day": {"enum": ["1", "2"]}},
    },
)
NUMBER = Tool("f", {"properties": {"a": {"type": "integer"}}})
TOOLS = {tool.name: tool for tool in (WEATHER, Tool("ping"), NUMBER, REFERRING)}


@dataclass
class Answer:
    """What a client would make of the events."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments)
    complete: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish: str | None = None

    def add(self, event: Event) -> None:
        assert self.finish is None, "nothing follows the end"
        match event:
            case ReasoningDelta(text):
                assert text
                self.reasoning += text
            case ContentDelta(text):
                assert text
                self.content += text
            case ToolCallStart(index, call_id, name):
                assert index == len(self.calls)
                self.calls.append((name, ""))
                self.ids.append(call_id)
            case ToolCallArguments(index, text):
                assert text and index == len(self.calls) - 1 and index not in self.complete
                self.calls[index] = (self.calls[index][0], self.calls[index][1] + text)
            case ToolCallEnd(index):
                assert index == len(self.calls) - 1 and index not in self.complete
                self.complete.append(index)
            case Finish(reason):
                self.finish = reason


def make_plan(
    tools: str | None = None,
    reasoning: str | None = None,
    prompt: str = "",
    tool_rows: Iterable[ToolFormat] | None = None,
    **fields: object,
) -> tuple[type[AnswerMachine], Plan]:
    """The machine and plan for two formats by name."""
    tool_format = find_tool_format(tools) if tools else None
    reasoning_format = find_reasoning_format(reasoning) if reasoning else None
    is_harmony = any(row is not None and row.is_harmony for row in (tool_format, reasoning_format))
    plan = {
        "tools": TOOLS,
        **(_tool_fields(tool_format) if tool_format else {}),
        **(_reasoning_fields(reasoning_format, prompt) if reasoning_format else {}),
        **fields,
    }
    return HarmonyMachine if is_harmony else AnswerMachine, Plan(**plan)  # type: ignore[arg-type]


def _tool_fields(row: ToolFormat) -> dict[str, object]:
    return {"openings": row.openings, "bare": row.bare, "make_id": row.make_id, "layout": row.layout}


def _reasoning_fields(row: ReasoningFormat, prompt: str) -> dict[str, object]:
    is_open = row.is_open(prompt, {})
    return {
        "reasoning_starts": row.starts,
        "reasoning_ends": row.ends,
        "in_reasoning": is_open is True,
        "may_reason": is_open is None,
        "calls_end_reasoning": row.calls_end_it,
        "layout": row.layout,
    }


def collect(machine: AnswerMachine, pieces: Iterable[str], reason: str = "stop") -> Answer:
    answer = Answer()
    for piece in pieces:
        for event in machine.feed(piece, []):
            answer.add(event)
    for event in machine.finish(reason):
        answer.add(event)
    return answer


def splits(text: str, seed: int = 0) -> Iterator[list[str]]:
    """The text character by character, cut in two at every place, and cut at random."""
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    rng = random.Random(seed)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), k=min(len(text), rng.randint(1, 12))))
        yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
