"""Every format on whole example answers, each fed whole, character by character, at every two-way split and at random
ones: the same reasoning, content, calls and finish reason come out (FC-071, 074, 076, 082, 086).
"""

import json
from itertools import pairwise

import pytest

from octavo.server.reasoning_formats import REASONING_FORMATS, detect_reasoning_format
from octavo.server.tool_formats import TOOL_FORMATS, detect_tool_format
from tests.server.parsers.cases import BROKEN, THINKING, WELL_FORMED, Case
from tests.server.parsers.collect import Answer, collect, make_plan, splits


def run(case: Case, pieces: list[str]) -> Answer:
    machine, plan = make_plan(case.tools, case.thinks, case.prompt)
    return collect(machine(plan), pieces, case.reason)


def comparable(answer: Answer) -> tuple[object, ...]:
    return answer.reasoning, answer.content, answer.calls, answer.complete, answer.finish


@pytest.mark.parametrize("case", [*WELL_FORMED, *BROKEN, *THINKING], ids=str)
def test_answers(case: Case) -> None:
    whole = run(case, [case.text])
    assert (whole.reasoning, whole.content) == (case.reasoning, case.content)
    arguments = [
        value if isinstance(wanted, str) else json.loads(value)
        for (_, value), (_, wanted) in zip(whole.calls, case.calls, strict=True)
    ]
    assert [(name, value) for (name, _), value in zip(whole.calls, arguments, strict=True)] == list(case.calls)
    assert whole.finish == (case.finish or ("tool_calls" if case.calls else case.reason))
    for pieces in splits(case.text):
        assert comparable(run(case, pieces)) == comparable(whole), pieces


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.names[0])
def test_examples_of_tool_formats(row) -> None:
    """What the documentation shows is what is read, in the middle of a text, however it is cut."""
    machine, plan = make_plan(row.names[0])
    around = row.example.startswith(tuple(row.openings))  # others only at the beginning
    text = f"B {row.example} C" if around else row.example
    for pieces in ([text], *splits(text)):
        answer = collect(machine(plan), pieces)
        assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [("f", {"a": 1})]
        assert answer.content.split() == (["B", "C"] if around else []) and answer.complete == [0]


@pytest.mark.parametrize("row", REASONING_FORMATS, ids=lambda row: row.names[0])
def test_examples_of_reasoning_formats(row) -> None:
    machine, plan = make_plan(None, row.names[0])
    for pieces in ([row.example], *splits(row.example)):
        answer = collect(machine(plan), pieces)
        assert (answer.reasoning, answer.content) == ("why", "answer")


@pytest.mark.parametrize("case", WELL_FORMED, ids=str)
def test_cut_anywhere(case: Case) -> None:
    """FC-071: no markup in content, arguments as they are and only ever growing."""
    whole = run(case, [case.text])
    cuts = [
        run(Case(case.text[:at], tools=case.tools, reason="length"), [case.text[:at]])
        for at in range(len(case.text) + 1)
    ]
    for shorter, longer in pairwise([*cuts, whole]):
        assert whole.content.startswith(shorter.content.rstrip()) and shorter.reasoning in whole.reasoning
        assert len(shorter.calls) <= len(longer.calls)
        for (name, arguments), (same_name, more) in zip(shorter.calls, longer.calls, strict=False):
            assert name == same_name and more.startswith(arguments)
    assert all(cut.finish == "length" for cut in cuts)


@pytest.mark.parametrize("case", [case for case in WELL_FORMED if len(case.calls) > 1], ids=str)
def test_one_call_only(case: Case) -> None:
    """FC-076: the second call leaves no trace, and the machine says that it has enough."""
    for pieces in ([case.text], list(case.text)):
        machine, plan = make_plan(case.tools, max_calls=1)
        reader = machine(plan)
        answer = collect(reader, pieces)
        assert [name for name, _ in answer.calls] == ["get_weather"] and answer.complete == [0]
        assert (answer.content, answer.finish, reader.is_done) == (case.content, "tool_calls", True)


def test_ids() -> None:
    """Ids differ, take the form that a format needs, and are not those of the conversation."""
    machine, plan = make_plan("mistral", used_ids=frozenset({"call00001"}))
    text = (
        "[TOOL_CALLS]ping[CALL_ID]call00001[ARGS]{}[TOOL_CALLS]ping[CALL_ID]call00002[ARGS]{}[TOOL_CALLS]ping[ARGS]{}"
    )
    first, second, third = collect(machine(plan), [text]).ids
    assert second == "call00002" and len({first, second, third, "call00001"}) == 4
    assert all(len(one) == 9 and one.isalnum() for one in (first, third))
    machine, plan = make_plan("kimi_k2")
    assert collect(machine(plan), [machine_example("kimi_k2")]).ids == ["functions.f:0"]


def machine_example(name: str) -> str:
    return next(row.example for row in TOOL_FORMATS if name in row.names)


def test_names_are_unique() -> None:
    for rows in (TOOL_FORMATS, REASONING_FORMATS):
        names = [name for row in rows for name in row.names]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("template", "model_type", "tools", "thinks"),
    [
        ("<tool_call>\n{\"name\": …", "qwen3", "hermes", None),
        ("<tool_call><function=x><parameter=y>", "qwen3_moe", "qwen3_coder", None),
        ("<tool_call>{name}<arg_key> <think>", None, "glm45", "think"),
        ("<｜tool▁sep｜> ```json <think>", "deepseek_v3", "deepseek_v3", "think"),
        ("[TOOL_CALLS][ARGS][THINK]", "mistral", "mistral", "mistral"),
        ("<|channel|> analysis commentary", "gpt_oss", "openai", "openai_gptoss"),
        ("{{ message.content }}", "llama4", "llama4_pythonic", None),
        ("{{ message.content }}", "llama", None, None),
        (None, None, None, None),
    ],
)  # fmt: skip
def test_detection(template, model_type, tools, thinks) -> None:
    row, reasoning = detect_tool_format(template, model_type), detect_reasoning_format(template)
    assert (row and row.names[0], reasoning and reasoning.names[0]) == (tools, thinks)
