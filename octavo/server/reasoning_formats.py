"""The formats in which models set their reasoning off from the answer: one row each.

Whether an answer begins inside the section is read from the prompt: its template may have opened the section, or opened
and closed it (thinking switched off). Where a prompt says neither, the answer is looked at: most models write the opening
mark themselves; of some, text without it is reasoning all the same (`is_assumed`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.server.parsers.harmony import HARMONY_ANSWER

# What chat templates call the switch for thinking.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How the reasoning of some models looks. `example` reasons "why" and answers "answer"."""

    names: tuple[str, ...]
    models: str
    example: str
    starts: tuple[str, ...] = ("<think>",)  # the first one is the usual one
    ends: tuple[str, ...] = ("</think>",)
    is_assumed: bool = False  # an answer is reasoning up to the end mark, unless thinking is switched off
    calls_end_it: bool = False  # models go from reasoning to tool calls without an end mark
    layout: tuple[str, ...] = ()  # marks around the answer that follows
    words: tuple[str, ...] = ()  # all of them in a chat template: it is of this format
    is_harmony: bool = False

    def all_marks(self) -> list[str]:
        """Texts in which all marks occur: special tokens among them must not be skipped."""
        return [self.example, *self.starts, *self.ends, *self.layout]

    def is_open(self, prompt: str, variables: dict[str, Any]) -> bool | None:
        """Whether answers to a prompt begin inside the section; False: thinking is off, None: they may open it first."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.starts):
            return True
        if prompt.endswith(self.ends) or any(variables.get(name) is False for name in SWITCHES):
            return False
        return True if self.is_assumed else None


REASONING_FORMATS = (
    ReasoningFormat(
        ("openai_gptoss", "harmony", "gpt_oss"),
        "gpt-oss",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>",
        starts=("<|channel|>analysis<|message|>",),
        ends=(HARMONY_ANSWER,),
        words=("<|channel|>", "analysis"),
        is_harmony=True,
    ),
    ReasoningFormat(
        ("gemma4",),
        "Gemma 4",
        "<|channel>thought\nwhy<channel|>answer",
        starts=("<|channel>thought",),
        ends=("<channel|>",),
        words=("<|channel>",),
    ),
    ReasoningFormat(
        ("kimi_k3",),
        "Kimi K3",
        "<|open|>think<|sep|>why<|close|>think<|sep|><|open|>response<|sep|>answer<|close|>response<|sep|>",
        starts=("<|open|>think<|sep|>",),
        ends=("<|close|>think<|sep|>",),
        layout=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        words=("<|open|>", "<|sep|>"),
    ),
    ReasoningFormat(
        ("mistral",),
        "Magistral, Ministral 3",
        "[THINK]why[/THINK]answer",
        starts=("[THINK]",),
        ends=("[/THINK]",),
        words=("[THINK]",),
    ),
    ReasoningFormat(
        ("seed_oss",),
        "Seed-OSS",
        "<seed:think>why</seed:think>answer",
        starts=("<seed:think>",),
        ends=("</seed:think>",),
        words=("seed:think",),
    ),
    ReasoningFormat(
        ("cohere_command3", "cohere_command4"),
        "Command A",
        "<|START_THINKING|>why<|END_THINKING|><|START_RESPONSE|>answer<|END_RESPONSE|>",
        starts=("<|START_THINKING|>",),
        ends=("<|END_THINKING|>",),
        layout=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        words=("<|START_THINKING|>",),
    ),
    ReasoningFormat(
        ("solar",),
        "Solar Open",
        "<|think|>why<|end|><|begin|>assistant<|content|>answer",
        starts=("<|think|>",),
        ends=("<|end|>",),
        layout=("<|begin|>assistant", "<|content|>"),
        words=("<|think|>", "<|begin|>"),
    ),
    ReasoningFormat(
        ("minimax_m3",),
        "MiniMax M3",
        "<mm:think>why</mm:think>answer",
        starts=("<mm:think>",),
        ends=("</mm:think>",),
        words=("<mm:think>",),
    ),
    ReasoningFormat(
        ("granite",),
        "Granite 3.2",
        "Here is my thought process: why Here is my response: answer",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
        words=("Here is my thought process:",),
    ),
    ReasoningFormat(
        ("apriel",),
        "Apriel 1.6",
        "Here are my reasoning steps:\nwhy\n[BEGIN FINAL RESPONSE]\nanswer",
        starts=("Here are my reasoning steps:",),
        ends=("[BEGIN FINAL RESPONSE]",),
        layout=("[END FINAL RESPONSE]",),
        words=("[BEGIN FINAL RESPONSE]",),
    ),
    ReasoningFormat(
        ("hunyuan_a13b",),
        "Hunyuan A13B",
        "<think>\nwhy\n</think>\n<answer>\nanswer\n</answer>",
        layout=("<answer>", "</answer>"),
        words=("<think>", "<answer>"),
    ),
    ReasoningFormat(
        ("ernie45",),
        "ERNIE 4.5",
        "<think>\nwhy\n</think>\n\n<response>\nanswer\n</response>",
        is_assumed=True,
        layout=("<response>", "</response>"),
        words=("<think>", "<response>\n"),
    ),
    ReasoningFormat(
        ("hy_v3", "hy_v4"),
        "Hunyuan 3, 4",
        "<think>why</think>answer",
        starts=("<think>", "<think:opensource>"),
        ends=("</think>", "</think:opensource>"),
        words=("<think", "<tool_sep", "<arg_key"),
    ),
    ReasoningFormat(
        ("kimi_k2",),
        "Kimi K2 Thinking",
        "<think>why</think>answer",
        calls_end_it=True,
        words=("<think>", "<|tool_calls_section_begin|>"),
    ),
    ReasoningFormat(
        (
            *("think", "glm45", "glm47", "ling3", "mimo", "minicpmv", "holo2", "nemotron_v3", "poolside_v1"),
            *("deepseek_v3", "deepseek_v4", "deepseek_v41", "granite_thinking_parser"),
        ),
        "GLM 4.5 to 4.7, DeepSeek V3.1 and later, Nemotron 3, Granite 3.3, and most others with think tags",
        "<think>why</think>answer",
        words=("<think>",),
    ),
    ReasoningFormat(
        ("deepseek_r1", "qwen3", "step3", "step3p5", "olmo3", "minimax_m2"),
        "DeepSeek R1, Qwen3 and QwQ, Step-3, OLMo 3, MiniMax M2: as above, the opening mark may be missing",
        "why</think>answer",
        is_assumed=True,
    ),
)


def find_reasoning_format(name: str, formats: Iterable[ReasoningFormat] = REASONING_FORMATS) -> ReasoningFormat:
    """The row of a name."""
    formats = list(formats)
    for row in formats:
        if name in row.names:
            return row
    known = ", ".join(sorted(name for row in formats for name in row.names))
    raise ConfigError(f"reasoning_parser={name!r} is not known; use one of {known}.", param="reasoning_parser")


def detect_reasoning_format(
    template: str | None, formats: Iterable[ReasoningFormat] = REASONING_FORMATS
) -> ReasoningFormat | None:
    """The first row whose words all stand in a chat template."""
    if not template:
        return None
    return next((row for row in formats if row.words and all(word in template for word in row.words)), None)
