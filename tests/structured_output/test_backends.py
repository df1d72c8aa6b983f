"""What every grammar engine does, on a vocabulary of bytes."""

import numpy as np
import pytest

from octavo.errors import ClientError
from octavo.structured_output.constraint import make_constraint
from octavo.types.structured_outputs import StructuredOutputsParams
from tests.structured_output.bytes_vocabulary import END, bytes_vocabulary, compile_with, takes

ARITHMETIC = """
root ::= expr ("=" term)?
expr ::= term ([-+*/] term)*
term ::= [a-z]+ | [0-9]+ | "(" expr ")"
"""
LARK = """
start: greeting " " NAME ("!" | "?")?
greeting: "hello" | "bye"
NAME: /[A-Z][a-z]+/
"""


@pytest.mark.parametrize(
    ("fields", "taken", "not_taken"),
    [
        ({"regex": r"\d{3}-[a-f]+"}, ["123-abc", "000-f"], ["12-a", "123-", "123-g", ""]),
        ({"regex": r"^(yes|no)$"}, ["yes", "no"], ["^yes$", "maybe"]),
        ({"regex": r"[\x00-\x1f]+"}, ["\x01\x1f", "\n"], ["a", ""]),
        ({"regex": "é🌶?"}, ["é", "é🌶"], ["e", "🌶"]),
        ({"choice": ["yes", "yes, but", "no", "yes"]}, ["yes", "yes, but", "no"], ["ye", "yes,", "nope", ""]),
        ({"choice": ["naïve", "🌶", 'a"b\\c\n']}, ["naïve", "🌶", 'a"b\\c\n'], ["naive", "a"]),
        ({"grammar": ARITHMETIC}, ["a+b", "(a*(b-1))/2=x", "1"], ["a+", "(a", "A", ""]),
        ({"grammar": 'root ::= "🌶" [\\u00e0-\\u00ef] "\\x41\\""'}, ['🌶éA"'], ["🌶eA", "🌶éA"]),
        ({"grammar": LARK}, ["hello Ann", "bye Bob!"], ["hello ann", "hi Ann", "hello"]),
        ({"json_object": True}, ['{"a": [1, {"b": null}]}', "{}"], ["[]", "1", '{"a"}', "{'a': 1}"]),
    ],
)
def test_texts_of_a_constraint(backend, fields, taken, not_taken):
    compiled = compile_with(backend, **fields)
    for text in taken:
        assert takes(backend, compiled, text), text
    for text in not_taken:
        assert not takes(backend, compiled, text), text


@pytest.mark.parametrize("regex", ["[a-", "(", "(?<=x)y", "(?=a)", r"(a)\1", r"\bx", "a{2,1}", "*a"])
def test_broken_patterns_are_the_clients_mistake(backend, regex):
    """FC-059: a pattern that is wrong, or more than an engine can follow, is refused."""
    with pytest.raises(ClientError, match="regex"):
        compile_with(backend, regex=regex)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= nothing",
        'x ::= "a"',
        'root ::= "a" (',
        "root ::= [a-z",
        "start: nothing",
        'start: "a',
        'foo: "a"',
        "root ::= root",
    ],
)
def test_broken_grammars_are_the_clients_mistake(backend, grammar):
    """FC-067: undefined rules, no root, open brackets."""
    with pytest.raises(ClientError, match=r"gbnf|lark"):
        compile_with(backend, grammar=grammar)


def test_rollback_and_end(backend):
    compiled = compile_with(backend, regex="ab(c|d)?")
    grammar = compiled.start()
    for byte in b"ab":
        assert grammar.accept(byte)
    assert grammar.is_accepting
    assert grammar.accept(ord("c"))
    grammar.rollback(2)
    assert not grammar.is_accepting
    assert grammar.accept(ord("b")) and grammar.is_accepting
    assert not grammar.accept(ord("x"))
    other = compiled.start()
    assert not other.is_accepting, "two requests share a place"


def test_masks_of_several_grammars_in_one_call(backend):
    grammars = [compile_with(backend, regex=f"{letter}x").start() for letter in "abcdef"]
    masks = np.full((8, bytes_vocabulary().num_words), -1, dtype=np.int32)
    rows = [6, 5, 4, 2, 1, 0]
    assert backend.fill(grammars, masks, rows) == {}
    for letter, row in zip("abcdef", rows, strict=True):
        allowed = [t for t in range(bytes_vocabulary().num_logits) if masks[row, t // 32] >> t % 32 & 1]
        assert [t for t in allowed if t != END] == [ord(letter)]
    assert (masks[[3, 7]] == -1).all()


def test_forced_tokens(backend):
    grammar = compile_with(backend, json={"type": "object", "properties": {"abc": {}}, "required": ["abc"]}).start()
    for byte in b'{"':
        grammar.accept(byte)
    assert bytes(grammar.forced_tokens()).startswith(b"abc")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "foo**"}, "multiple repeat"),
        ({"regex": "(" * 1000}, "200 brackets"),
        ({"grammar": "root ::= " + "(" * 1000}, "200 brackets"),
        ({"json": {"enum": ["x" * 300_000]}}, "at most 262144"),
        ({"json": '{"const": 1e999}'}, "not JSON"),
        ({"json": {"const": "\ud800"}}, "no text"),
        ({"regex": "\udfff"}, "no text"),
        ({"choice": ["\ud83c"]}, "no text"),
    ],
)
def test_what_no_engine_is_asked(fields, words):
    with pytest.raises(ClientError, match=words):
        make_constraint(StructuredOutputsParams(**fields))
