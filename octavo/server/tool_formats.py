"""The formats in which models write tool calls: one row each.

A row says which marks open calls and what reads them (the readers are in `octavo.server.parsers`). Its names are those
that `--tool-call-parser` takes. Without that option the first row is taken whose words all stand in the model's chat
template, so rows with rarer words come first; where a template says nothing about tools, the model's type may.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError
from octavo.server.parsers.answer import Opening
from octavo.server.parsers.calls import Body, MakeId, random_call_id, short_call_id
from octavo.server.parsers.json_calls import first_of, from_mark, headed_call, json_calls, read_keyed_call, section
from octavo.server.parsers.literal_calls import literal_calls, read_gemma_call, read_python_call
from octavo.server.parsers.markup_calls import Markup


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the calls of some models look.

    `written` is a call with all its marks: of `f` with a=1, or with placeholders, NAME and either ARGUMENTS (a JSON
    object) or KEYWORDS (Python's). With those the format can be explained to models whose chat template does not.
    """

    names: tuple[str, ...]
    models: str
    written: str
    openings: Mapping[str, Opening] = field(default_factory=dict)  # by opening mark
    bare: Mapping[str, Body] = field(default_factory=dict)  # by first character, for answers that are nothing but calls
    words: tuple[str, ...] = ()  # all of them in a chat template: it is of this format
    model_types: tuple[str, ...] = ()
    make_id: MakeId = random_call_id
    layout: tuple[str, ...] = ()  # marks that mean nothing by themselves
    other_marks: tuple[str, ...] = ()  # further ones that occur, besides those of the example
    is_harmony: bool = False  # the answer consists of channels

    @property
    def example(self) -> str:
        """A call of `f` with a=1."""
        return self.write("f", {"a": 1}) or self.written

    @property
    def can_be_written(self) -> bool:
        """Whether putting names and arguments in places makes a call."""
        return "NAME" in self.written

    def write(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """A call as the model would write it, if it can be written."""
        if not self.can_be_written:
            return None
        if "KEYWORDS" in self.written:
            before, _, after = self.written.partition("KEYWORDS")
            text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        else:
            before, _, after = self.written.partition("ARGUMENTS")
            text = json.dumps(arguments, ensure_ascii=False)
        return before.replace("NAME", name, 1) + text + after

    @property
    def trigger(self) -> str | None:
        """The mark that `written` begins with, where a grammar can take over the rest of the call.

        The beginning of an object is none: answers may hold JSON that is no call.
        """
        if "ARGUMENTS" not in self.written or self.written.startswith("{"):
            return None
        return next((mark for mark in self.openings if self.written.startswith(mark)), None)

    def all_marks(self) -> list[str]:
        """Texts in which all marks occur: special tokens among them must not be skipped."""
        return [self.example, *self.openings, *self.layout, *self.other_marks]


def _json(*marks: str, end: str | None = None) -> dict[str, Opening]:
    """JSON behind any of `marks`."""
    return {mark: Opening(json_calls(end), end) for mark in marks}


def _sections(call_mark: str, call: Body, call_end: str, sections: Mapping[str, str]) -> dict[str, Opening]:
    """Calls behind `call_mark`, in sections (opening mark -> end mark) or, since models forget, without."""
    calls = {call_mark: Opening(call, call_end)}
    return calls | {begin: Opening(section(call_mark, call, end), end) for begin, end in sections.items()}


def _anywhere(mark: str) -> dict[str, Opening]:
    """A JSON object that begins with `mark`, amid text."""
    return {mark: Opening(from_mark(mark, json_calls()))}


def _markup(tags: Markup, begin: str, end: str, fillers: Iterable[str] = ()) -> dict[str, Opening]:
    """A section of marked-up calls."""
    return {begin: Opening(tags.section(end, fillers), end)}


def _function_tags(is_verbatim: bool = False) -> Markup:
    """`<function=f><parameter=a>1</parameter></function>`"""
    return Markup(
        call="<function=",
        name_end=">",
        call_end="</function>",
        parameter="<parameter=",
        key_end=">",
        value_end="</parameter>",
        also_value_ends=("<parameter=", "</function>"),
        is_verbatim=is_verbatim,
    )


def _invoke_tags(prefix: str = "", parameter: str = "parameter", is_verbatim: bool = False) -> Markup:
    """`<invoke name="f"><parameter name="a">1</parameter></invoke>`"""
    return Markup(
        call=f"<{prefix}invoke name=",  # a quote is read with the name, or left out by the model
        name_end=">",
        call_end=f"</{prefix}invoke>",
        parameter=f"<{prefix}{parameter} name=",
        key_end=">",
        value_end=f"</{prefix}{parameter}>",
        is_verbatim=is_verbatim,
    )


def _key_value_tags(suffix: str = "", name_end: str | None = None) -> Markup:
    """`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`"""
    return Markup(
        call=f"<tool_call{suffix}>",
        name_end=name_end,
        call_end=f"</tool_call{suffix}>",
        parameter=f"<arg_key{suffix}>",
        key_end=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
    )


def _qwen_coder(is_verbatim: bool = False) -> dict[str, Opening]:
    tags = _function_tags(is_verbatim)
    # The outer tag is often forgotten.
    return _markup(tags, "<tool_call>", "</tool_call>") | {tags.call: Opening(tags.read_call, tags.call_end)}


def _hunyuan3() -> dict[str, Opening]:
    openings: dict[str, Opening] = {}
    for suffix in ("", ":opensource"):
        tags = _key_value_tags(suffix, name_end=f"<tool_sep{suffix}>")
        openings |= _markup(tags, f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")
    return openings


_GLM = _key_value_tags()
_DSML = _invoke_tags("｜DSML｜", is_verbatim=True)
_KIMI3 = Markup(
    call='<|open|>call tool="',
    name_end="<|sep|>",
    call_end="<|close|>call<|sep|>",
    parameter='<|open|>argument key="',
    key_end="<|sep|>",
    value_end="<|close|>argument<|sep|>",
    is_verbatim=True,
)
_MISTRAL_CALL = headed_call(r"{name}\s*(?:\[CALL_ID\]\s*{id})?\s*(?:\[ARGS\])?")
_PYTHON_LIST = literal_calls(read_python_call)

TOOL_FORMATS = (
    ToolFormat(
        ("openai", "harmony", "gpt_oss"),
        "gpt-oss",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
        words=("<|channel|>", "commentary"),
        model_types=("gpt_oss",),
        is_harmony=True,
    ),
    ToolFormat(
        ("gemma4",),
        "Gemma 4",
        "<|tool_call>call:f{a:1}<tool_call|>",
        {"<|tool_call>": Opening(literal_calls(read_gemma_call, "<tool_call|>"))},
        words=("<|tool_call>",),
        other_marks=('<|"|>',),
    ),
    ToolFormat(
        ("functiongemma",),
        "FunctionGemma",
        "<start_function_call>call:f{a:1}<end_function_call>",
        {"<start_function_call>": Opening(literal_calls(read_gemma_call, "<end_function_call>"))},
        words=("<start_function_call>",),
        other_marks=("<escape>",),
    ),
    ToolFormat(
        ("kimi_k2",),
        "Kimi K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>"
        "ARGUMENTS<|tool_call_end|><|tool_calls_section_end|>",
        _sections(
            "<|tool_call_begin|>",
            headed_call(
                r"(?P<id>(?:functions\.)?{name}(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
                ("<|tool_call_end|>",),
                names=r"[\w./-]+",
            ),
            "<|tool_call_end|>",
            {
                "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
                "<|tool_call_section_begin|>": "<|tool_call_section_end|>",
            },
        ),
        words=("<|tool_call_argument_begin|>",),
    ),
    ToolFormat(
        ("kimi_k3",),
        "Kimi K3",
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        _markup(_KIMI3, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        words=("<|open|>", "<|sep|>"),
    ),
    ToolFormat(
        ("deepseek_v32", "deepseek_v4", "deepseek_v41"),
        "DeepSeek V3.2, V4",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        _markup(_DSML, "<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
        | _markup(_DSML, "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        words=("DSML",),
        model_types=("deepseek_v32", "deepseek_v4"),
    ),
    ToolFormat(
        ("deepseek_v3",),
        "DeepSeek V3, R1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n"
        "```json\nARGUMENTS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        _sections(
            "<｜tool▁call▁begin｜>",
            headed_call(r"function<｜tool▁sep｜>{name}\s*```(?:json)?", ("```", "<｜tool▁call▁end｜>")),
            "<｜tool▁call▁end｜>",
            {"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"},
        ),
        words=("<｜tool▁sep｜>", "```json"),
        model_types=("deepseek_v3",),
    ),
    ToolFormat(
        ("deepseek_v31",),
        "DeepSeek V3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        _sections(
            "<｜tool▁call▁begin｜>",
            headed_call(r"{name}\s*<｜tool▁sep｜>", ("<｜tool▁call▁end｜>",)),
            "<｜tool▁call▁end｜>",
            {"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"},
        ),
        words=("<｜tool▁sep｜>",),
    ),
    ToolFormat(
        ("mistral",),
        "Mistral, Mixtral, Devstral, Magistral",
        "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        {"[TOOL_CALLS]": Opening(first_of({"[": json_calls(), "{": json_calls()}, _MISTRAL_CALL))},
        words=("[TOOL_CALLS]",),
        make_id=short_call_id,
        other_marks=("[CALL_ID]",),
    ),
    ToolFormat(
        ("minimax_m2",),
        "MiniMax M2",
        '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>',
        _markup(_invoke_tags(), "<minimax:tool_call>", "</minimax:tool_call>"),
        words=("minimax:tool_call",),
    ),
    ToolFormat(
        ("dots",),
        "dots",
        '<dots_function_call><invoke name="f"><parameter name="a">1</parameter></invoke></dots_function_call>',
        _markup(_invoke_tags(), "<dots_function_call>", "</dots_function_call>"),
        words=("dots_function_call",),
    ),
    ToolFormat(
        ("step3",),
        "Step-3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
        '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        _markup(
            _invoke_tags("steptml:"),
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            ("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
        ),
        words=("steptml",),
    ),
    ToolFormat(
        ("hy_v3", "hy_v4"),
        "Hunyuan 3, 4",
        "<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value></tool_call></tool_calls>",
        _hunyuan3(),
        words=("<tool_sep", "<arg_key"),
        other_marks=tuple(
            f"{slash}{tag}:opensource>"
            for slash in ("<", "</")
            for tag in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
        ),
    ),
    ToolFormat(
        ("glm45", "glm47", "ling3", "poolside_v1"),
        "GLM 4.5 to 4.7, Ling 3, Laguna",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        {_GLM.call: Opening(_GLM.read_call, _GLM.call_end)},
        words=("<arg_key>",),
    ),
    ToolFormat(
        ("seed_oss",),
        "Seed-OSS",
        "<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>",
        _markup(_function_tags(), "<seed:tool_call>", "</seed:tool_call>"),
        words=("seed:tool_call",),
    ),
    ToolFormat(
        ("qwen3_coder", "qwen3_xml", "step3p5"),
        "Qwen3-Coder, Qwen3.5, Step-3.5, Nemotron 3",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        _qwen_coder(),
        words=("<function=", "<parameter="),
    ),
    ToolFormat(
        ("mimo",),
        "MiMo V2",
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        _qwen_coder(is_verbatim=True),
    ),
    ToolFormat(
        ("functionary",),
        "Functionary 3.1, Llama's custom functions",
        "<function=NAME>ARGUMENTS</function>",
        {"<function=": Opening(headed_call(r"{name}\s*>", ("</function>",)), "</function>")},
        words=("<function=",),
    ),
    ToolFormat(
        ("granite",),
        "Granite 3",
        '<|tool_call|>[{"name": "NAME", "arguments": ARGUMENTS}]',
        _json("<|tool_call|>", "<tool_call>"),
        bare={"[": json_calls()},
        words=("<|tool_call|>",),
    ),
    ToolFormat(
        ("granite-20b-fc",),
        "Granite 20B FC",
        '<function_call> {"name": "NAME", "arguments": ARGUMENTS}',
        _json("<function_call>"),
        words=("<function_call>",),
    ),
    ToolFormat(
        ("internlm",),
        "InternLM 2, 2.5",
        '<|action_start|><|plugin|>{"name": "NAME", "parameters": ARGUMENTS}<|action_end|>',
        _json("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>", end="<|action_end|>"),
        words=("<|action_start|>",),
        model_types=("internlm2",),
    ),
    ToolFormat(
        ("cohere_command3", "cohere_command4"),
        "Command R7B, Command A",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}]<|END_ACTION|>',
        _json("<|START_ACTION|>", end="<|END_ACTION|>"),
        words=("START_ACTION",),
        model_types=("cohere2",),
    ),
    ToolFormat(
        ("apertus",),
        "Apertus",
        '<|tools_prefix|>[{"NAME": ARGUMENTS}]<|tools_suffix|>',
        {"<|tools_prefix|>": Opening(json_calls("<|tools_suffix|>", read_keyed_call), "<|tools_suffix|>")},
        words=("<|tools_prefix|>",),
    ),
    ToolFormat(
        ("lfm2",),
        "LFM2",
        "<|tool_call_start|>[NAME(KEYWORDS)]<|tool_call_end|>",
        {"<|tool_call_start|>": Opening(literal_calls(read_python_call, "<|tool_call_end|>"))},
        words=("<|tool_call_start|>",),
        model_types=("lfm2", "lfm2_moe"),
    ),
    ToolFormat(
        ("olmo3",),
        "OLMo 3",
        "<function_calls>NAME(KEYWORDS)</function_calls>",
        {"<function_calls>": Opening(literal_calls(read_python_call, "</function_calls>"))},
        words=("<function_calls>",),
        model_types=("olmo3",),
    ),
    ToolFormat(
        ("longcat",),
        "LongCat",
        '<longcat_tool_call>{"name": "NAME", "arguments": ARGUMENTS}</longcat_tool_call>',
        _json("<longcat_tool_call>", end="</longcat_tool_call>"),
        words=("<longcat_tool_call>",),
    ),
    ToolFormat(
        ("gigachat3",),
        "GigaChat 3",
        '<|function_call|>{"name": "NAME", "arguments": ARGUMENTS}',
        _json("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>"),
        words=("<|role_sep|>", "function"),
    ),
    ToolFormat(
        ("solar",),
        "Solar Open",
        "<|tool_calls|><|tool_call:begin|>1<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>",
        {
            "<|tool_call:begin|>": Opening(
                headed_call(r"[\w.:-]*<\|tool_call:name\|>{name}<\|tool_call:args\|>", ("<|tool_call:end|>",)),
                "<|tool_call:end|>",
            ),
        },
        words=("<|tool_call:args|>",),
        layout=("<|tool_calls|>",),
    ),
    ToolFormat(
        ("inkling",),
        "Inkling",
        '<|content_invoke_tool_json|>{"name": "NAME", "args": ARGUMENTS}<|end_message|>',
        _json("<|content_invoke_tool_json|>", end="<|end_message|>"),
        words=("<|content_invoke_tool_json|>",),
    ),
    ToolFormat(
        ("nemotron_json",),
        "Nemotron Nano 2",
        '<TOOLCALL>[{"name": "NAME", "arguments": ARGUMENTS}]</TOOLCALL>',
        _json("<TOOLCALL>", end="</TOOLCALL>"),
        words=("<TOOLCALL>",),
    ),
    ToolFormat(
        ("jamba", "hunyuan_a13b", "minimax"),
        "Jamba 1.5, Hunyuan A13B, MiniMax M1, Apriel",
        '<tool_calls>[{"name": "NAME", "arguments": ARGUMENTS}]</tool_calls>',
        _json("<tool_calls>", end="</tool_calls>"),
        words=("<tool_calls>",),
        model_types=("jamba", "hunyuan_v1_moe"),
    ),
    ToolFormat(
        ("hermes", "qwen3_json", "granite4", "ernie45"),
        "Hermes 2 and 3, Qwen 2.5 and 3, QwQ, Granite 4, ERNIE 4.5",
        '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
        _json("<tool_call>", end="</tool_call>"),
        words=("<tool_call>", '"name"'),
        model_types=("qwen2", "qwen3", "qwen3_moe", "smollm3", "ernie4_5_moe"),
    ),
    ToolFormat(
        ("phi4_mini_json",),
        "Phi-4-mini, Firefunction 2",
        'functools[{"name": "NAME", "arguments": ARGUMENTS}]',
        _json("functools") | _json("<|tool_call|>", end="<|/tool_call|>"),
        words=("functools",),
        model_types=("phi3",),
    ),
    ToolFormat(
        ("xlam",),
        "xLAM",
        '[{"name": "NAME", "arguments": ARGUMENTS}]',
        _json("[TOOL_CALLS]")
        | _json("<tool_call>", end="</tool_call>")
        | {"```json": Opening(json_calls("```"), "```")},
        bare={"[": json_calls()},
    ),
    ToolFormat(
        ("llama4_pythonic",),
        "Llama 4",
        "<|python_start|>[NAME(KEYWORDS)]<|python_end|>",
        {"<|python_start|>": Opening(literal_calls(read_python_call, "<|python_end|>"))},
        bare={"[": _PYTHON_LIST},
        words=("<|python_start|>",),
        model_types=("llama4",),
    ),
    ToolFormat(
        ("pythonic",),
        "Llama 3.2, ToolACE",
        "[NAME(KEYWORDS)]",
        bare={"[": _PYTHON_LIST},
        words=("[func_name1(",),
    ),
    ToolFormat(
        ("llama3_json", "llama4_json"),
        "Llama 3.1 to 4",
        '{"name": "NAME", "parameters": ARGUMENTS}',
        _json("<|python_tag|>") | _anywhere('{"name"') | _anywhere('{"type"'),
        bare={"{": json_calls()},
        words=('{"name": function name',),
    ),
)


def find_tool_format(name: str, formats: Iterable[ToolFormat] = TOOL_FORMATS) -> ToolFormat:
    """The row of a name."""
    formats = list(formats)
    for row in formats:
        if name in row.names:
            return row
    known = ", ".join(sorted(name for row in formats for name in row.names))
    raise ConfigError(f"tool_call_parser={name!r} is not known; use one of {known}.", param="tool_call_parser")


def detect_tool_format(
    template: str | None, model_type: str | None, formats: Iterable[ToolFormat] = TOOL_FORMATS
) -> ToolFormat | None:
    """The row that a chat template is written for, else the one of the model's type."""
    formats = list(formats)
    for row in formats:
        if template and row.words and all(word in template for word in row.words):
            return row
    return next((row for row in formats if model_type in row.model_types), None)
