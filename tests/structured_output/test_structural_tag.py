"""Structural tags in both spellings, by both engines."""

import pytest

from octavo.errors import ClientError
from octavo.structured_output.constraint import make_constraint
from octavo.structured_output.llguidance_backend import LLGuidance
from octavo.types.structured_outputs import StructuredOutputsParams
from tests.structured_output.bytes_vocabulary import CALL, bytes_vocabulary, compile_with, takes

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ARGUMENTS = {"type": "json_schema", "json_schema": SCHEMA}
LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<fn=a>", "schema": SCHEMA, "end": "</fn>"},
        {"begin": "<fn=b>", "schema": {"type": "boolean"}, "end": "</fn>"},
    ],
    "triggers": ["<fn="],
}


def tag(begin: str, content: dict, end: str | list[str]) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


A, B = (
    tag("<fn=a>", ARGUMENTS, "</fn>"),
    tag("<fn=b>", {"type": "json_schema", "json_schema": {"type": "boolean"}}, "</fn>"),
)
TRIGGERED = {"type": "triggered_tags", "triggers": ["<fn="], "tags": [A, B]}
CALLS = ['<fn=a>{"x": 1}</fn>', "<fn=b>true</fn>"]
ANY = {"type": "any_text"}


@pytest.mark.parametrize(
    ("given", "taken", "not_taken"),
    [
        (
            LEGACY,
            ["", "text < fn", f"so {CALLS[0]} and {CALLS[1]} end", CALLS[1]],
            ["<fn=c>", "<fn=a>1</fn>", "<fn=a>{"],
        ),
        ({"format": TRIGGERED}, ["hi", f"x{CALLS[0]}y"], ["<fn=b>1</fn>"]),
        (
            {"format": TRIGGERED | {"at_least_one": True}},
            [f"{CALLS[0]}y", f"{CALLS[0]}y{CALLS[1]}"],
            ["hi", "", f"x{CALLS[0]}"],
        ),
        (
            {"format": TRIGGERED | {"at_least_one": True, "stop_after_first": True}},
            [CALLS[0]],
            [CALLS[0] + "y", CALLS[0] + CALLS[1], "hi"],
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": [A, B], "separator": ";", "at_least_one": True}},
            [CALLS[0], ";".join(CALLS)],
            ["", CALLS[0] + ";", CALLS[0] + CALLS[1]],
        ),
        (
            {"format": {"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), ARGUMENTS]}},
            ['<think>so <b> it goes</think>{"x": 1}', '<think></think>{"x":2}'],
            ['{"x": 1}', "<think>so</think>no"],
        ),
        (
            {
                "format": {
                    "type": "or",
                    "elements": [{"type": "const_string", "value": "é🌶"}, {"type": "regex", "pattern": r"\d{2}"}],
                }
            },
            ["é🌶", "12"],
            ["é", "1", "123"],
        ),
        ({"format": {"type": "grammar", "grammar": 'root ::= "a" "b"*'}}, ["a", "abb"], ["b", ""]),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "optional", "content": {"type": "const_string", "value": "o"}},
                        {"type": "plus", "content": {"type": "const_string", "value": "p"}},
                        {"type": "star", "content": {"type": "const_string", "value": "s"}},
                        {"type": "repeat", "content": {"type": "const_string", "value": "r"}, "min": 1, "max": 2},
                    ],
                }
            },
            ["opsr", "ppssrr", "pr"],
            ["op", "or", "prrr"],
        ),
        ({"format": tag("<", {"type": "const_string", "value": "x"}, [">", "/>"])}, ["<x>", "<x/>"], ["<x", "<x//>"]),
    ],
)
def test_texts_of_a_tag(backend, given, taken, not_taken):
    compiled = compile_with(backend, structural_tag=given)
    for text in taken:
        assert takes(backend, compiled, text), text
    for text in not_taken:
        assert not takes(backend, compiled, text), text


def test_a_special_token_in_a_tag_is_the_token():
    engine = LLGuidance(bytes_vocabulary())
    given = {"format": {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [tag("<|call|>f", ARGUMENTS, "")]}}
    grammar = compile_with(engine, structural_tag=given).start()
    for token in (*b"text <", CALL, *b'f{"x":1}', *b" more"):
        assert grammar.accept(token), token
    other = compile_with(engine, structural_tag=given).start()
    other.accept(CALL)
    assert not other.accept(ord("g"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "is not JSON"),
        ({"type": "structural_tag"}, 'needs "format"'),
        ({"structures": []}, "$.structures must be a list"),
        ({"structures": [{"begin": "<"}], "triggers": ["<"]}, "$.structures[0] must be"),
        ({"structures": [{"begin": "<", "end": ">"}]}, "triggers must be"),
        ({"format": {"type": "sequence", "elements": [3]}}, "$.format.elements[0] must be an object"),
        (
            {"format": tag("<", {"type": "json_schema", "json_schema": {"type": "strnig"}}, ">")},
            "$.format.content.json_schema: JSON schema: $.type",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_path(given, words):
    with pytest.raises(ClientError) as caught:
        make_constraint(StructuredOutputsParams(structural_tag=given))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "qwen_xml_parameter is not supported by llguidance"),
        ({"type": "any_text", "excludes": ["x"]}, "any_text.excludes is not supported"),
        ({"type": "const_string"}, "const_string needs value"),
        ({"type": "repeat", "content": {"type": "any_text"}, "min": 2, "max": 1}, "repeat needs"),
        (TRIGGERED | {"triggers": ["<other"]}, "begins with none of its triggers"),
    ],
)
def test_what_llguidance_is_not_told_is_refused(given, words):
    with pytest.raises(ClientError) as caught:
        compile_with(LLGuidance(bytes_vocabulary()), structural_tag={"format": given})
    assert words in str(caught.value)
