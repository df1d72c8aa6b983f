"""Hostile answers: 100 kB of anything takes time in proportion, loses no text and never fails."""

import random
import time
from dataclasses import replace

import pytest

from octavo.server.parsers.calls import Tool
from octavo.server.reasoning_formats import REASONING_FORMATS
from octavo.server.tool_formats import TOOL_FORMATS
from tests.server.parsers.collect import Answer, collect, make_plan

SIZE = 100_000
# A quiet machine stays under a second; work that grows with the square of the text would take minutes.
MAX_SECONDS = 5.0
# One row for each way of reading calls, and the marks that open them.
KINDS = {
    "hermes": "<tool_call>",
    "llama3_json": "",
    "mistral": "[TOOL_CALLS]",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "qwen3_coder": "<tool_call><function=f>",
    "glm45": "<tool_call>f",
    "pythonic": "[f(a=",
    "gemma4": "<|tool_call>call:f{a:",
    "openai": "<|channel|>",
}
OBJECT = '{"name": "f", "arguments": '
HOSTILE = {
    "openings": lambda mark: (mark or "{") * (SIZE // max(1, len(mark))),
    "half openings": lambda mark: (mark[:-1] or "{") * (SIZE // max(1, len(mark))),
    "nested": lambda mark: mark + OBJECT + '{"a":[' * (SIZE // 6),
    "brackets": lambda mark: mark + "[({" * (SIZE // 3),
    "long string": lambda mark: mark + OBJECT + '{"a": "' + "x\n" * (SIZE // 2),
    "backslashes": lambda mark: mark + OBJECT + '{"a": "' + "\\" * SIZE,
    "arguments first": lambda mark: mark + '{"arguments": {"a": "' + "xy" * (SIZE // 2),
    "digits": lambda mark: mark + OBJECT + '{"a": ' + "9" * SIZE,
    "whitespace": lambda mark: mark + " \n" * (SIZE // 2),
    "parameters": lambda mark: mark + "<parameter=a><arg_key>a</arg_key><arg_value>" * (SIZE // 44),
}


def pieces_of(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("name", KINDS)
def test_linear_time(name: str, hostile: str) -> None:
    """100 kB, whole and in pieces."""
    text = HOSTILE[hostile](KINDS[name])
    for size in (len(text), 16):
        machine, plan = make_plan(name, None if name == "openai" else "glm45")
        begun = time.process_time()
        collect(machine(plan), pieces_of(text, size))
        assert time.process_time() - begun < MAX_SECONDS


def test_schemas_that_refer_to_themselves() -> None:
    """What type a value has is a question to a client's schema, whose references may branch for ever."""
    branches = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in "ab" for _ in range(100)]}
    tool = Tool("f", {"properties": {"a": branches}, "$defs": {"a": branches, "b": {"oneOf": [branches]}}})
    machine, plan = make_plan("glm45")
    text = "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 10 + "</tool_call>"
    begun = time.process_time()
    assert collect(machine(replace(plan, tools={"f": tool})), [text]).complete == [0]
    assert time.process_time() - begun < MAX_SECONDS


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.names[0])
def test_linear_time_of_every_format(row) -> None:
    """Half a call, and openings without end behind it."""
    mark = next(iter([*row.openings, *row.bare, row.example]))
    text = row.example[: len(row.example) // 2] + mark * (SIZE // len(mark))
    machine, plan = make_plan(row.names[0])
    begun = time.process_time()
    collect(machine(plan), pieces_of(text, 16))
    assert time.process_time() - begun < MAX_SECONDS


@pytest.mark.parametrize("row", REASONING_FORMATS, ids=lambda row: row.names[0])
def test_linear_time_of_reasoning(row) -> None:
    start, end = row.starts[0], row.ends[0]
    for text in (start + end[:-1] * (SIZE // len(end)), start * (SIZE // len(start)), start + " \n" * (SIZE // 2)):
        machine, plan = make_plan(None, row.names[0])
        begun = time.process_time()
        collect(machine(plan), pieces_of(text, 16))
        assert time.process_time() - begun < MAX_SECONDS


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.names[0])
def test_broken_answers(row) -> None:
    """Bits of formats in any order: whole and in pieces it is the same, and no word is lost."""
    rng = random.Random(row.names[0])
    marks = [*row.openings, *row.layout, row.example, row.example[: len(row.example) // 2], row.example[7:]]
    bits = [*marks, "{", "}", "[", "]", '"', "f", "(", ")", "a=1", ",", ":", "\\", "\n", "<", ">", " word ", "</", "'"]
    for _ in range(60):
        text = "".join(rng.choice(bits) for _ in range(rng.randint(1, 14)))
        reason = rng.choice(["stop", "length"])
        whole, *others = (run(row.names[0], pieces, reason) for pieces in ([text], list(text), pieces_of(text, 5)))
        for other in others:
            assert comparable(other) == comparable(whole), text
        said = whole.content + whole.reasoning + "".join(name + arguments for name, arguments in whole.calls)
        if reason == "stop" and not row.is_harmony:  # the headers of channels are markup
            assert said.count("word") >= text.count("word") - text.count("<function=") - row.example.count("word"), text


def run(name: str, pieces: list[str], reason: str) -> Answer:
    machine, plan = make_plan(name)
    return collect(machine(plan), pieces, reason)


def comparable(answer: Answer) -> tuple[object, ...]:
    return answer.reasoning, answer.content, answer.calls, answer.complete, answer.finish
