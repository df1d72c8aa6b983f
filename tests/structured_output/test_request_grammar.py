"""One request's way through its grammar: ends, the reasoning in front, and what an engine finds out late."""

import numpy as np
import pytest

from octavo.structured_output.grammar import GrammarError
from octavo.structured_output.llguidance_backend import LLGuidance
from octavo.structured_output.request_grammar import RequestGrammar
from octavo.types.sampling_params import ReasoningSection
from tests.structured_output.bytes_vocabulary import END, TEXTS, THINK, UNTHINK, bytes_vocabulary, compile_with

VOCABULARY = bytes_vocabulary()
OVERRUN, LINE_BREAK = TEXTS.index(b">{"), TEXTS.index(b">\n\n")


@pytest.fixture(scope="module")
def backend():
    return LLGuidance(VOCABULARY)


def make(backend, regex: str, ends=(END,), section: ReasoningSection | None = None) -> RequestGrammar:
    return RequestGrammar(backend, compile_with(backend, regex=regex).start(), VOCABULARY, ends, section)


def section(is_open: bool, *, split: bool = False) -> ReasoningSection:
    start, end = (list(b"<think>"), list(b"</think>")) if split else ([THINK], [UNTHINK])
    return ReasoningSection(is_open, "<think>", "</think>", start, end)


def allowed(grammar: RequestGrammar) -> set[int]:
    """The tokens of the next mask."""
    mask = np.zeros((1, VOCABULARY.num_words), dtype=np.int32)
    if grammar.needs_mask:
        assert not grammar.backend.fill([grammar.grammar], mask, [0])
    grammar.complete_mask(mask[0])
    return {t for t in range(VOCABULARY.num_words * 32) if mask[0, t // 32] >> t % 32 & 1}


def test_ends_are_allowed_where_the_text_may_end(backend):
    grammar = make(backend, "ab+")
    assert allowed(grammar) == {ord("a")}
    assert grammar.follow(b"ab") == 2
    assert allowed(grammar) == {ord("b"), END}
    assert not grammar.is_terminated


def test_a_request_has_the_ends_it_asks_for(backend):
    ignores_eos = make(backend, "ab+", ends=())
    ignores_eos.follow(b"ab")
    assert allowed(ignores_eos) == {ord("b")}
    own = make(backend, "ab+", ends=(END, ord("!")))
    assert ord("!") not in allowed(own)
    own.follow(b"ab")
    assert allowed(own) == {ord("b"), ord("!"), END}


def test_a_complete_text_ends_the_request(backend):
    grammar = make(backend, "abc")
    assert grammar.follow(b"abc") == 3 and grammar.is_terminated
    again = make(backend, "abc")
    assert again.follow(b"abcde") == 3, "tokens behind the end count"


def test_an_engine_that_sees_the_end_late_ends_the_request_a_step_later():
    xgrammar_backend = pytest.importorskip("octavo.structured_output.xgrammar_backend")
    grammar = make(xgrammar_backend.XGrammar(VOCABULARY), "abc")
    assert grammar.follow(b"abc") == 3 and not grammar.is_terminated
    assert allowed(grammar) >= {0, 1, END}, "the step in flight has to sample something"
    assert grammar.is_terminated and grammar.follow(b"x") == 0


def test_a_token_outside_the_grammar_is_an_error(backend):
    with pytest.raises(GrammarError, match="120"):
        make(backend, "abc").follow(b"ax")


def test_reasoning_that_is_open_is_free_and_does_not_end(backend):
    """FC-086: everything behind the end mark obeys the grammar."""
    grammar = make(backend, "abc", section=section(is_open=True))
    everything = set(range(VOCABULARY.num_logits))
    assert allowed(grammar) >= everything - {END, OVERRUN}
    assert END not in allowed(grammar)
    grammar.follow([*b"I think {", UNTHINK])
    assert allowed(grammar) == {ord("a")}


def test_a_mark_in_pieces_is_found_and_not_overrun(backend):
    """FC-086: the mark may be split over tokens, and its last one may run on only into white space."""
    grammar = make(backend, "abc", section=section(is_open=True))
    grammar.follow(b"x </thin </think")
    assert OVERRUN not in allowed(grammar) and {LINE_BREAK, ord(">"), ord("k")} <= allowed(grammar)
    grammar.follow([LINE_BREAK])
    assert allowed(grammar) == {ord("a")}
    elsewhere = make(backend, "abc", section=section(is_open=True))
    elsewhere.follow(b"x = a-")
    assert OVERRUN in allowed(elsewhere)


@pytest.mark.parametrize("split", [False, True])
def test_reasoning_may_be_opened_first(backend, split):
    start = list(b"<think>") if split else [THINK]
    at_once = make(backend, "abc", section=section(is_open=False, split=split))
    assert allowed(at_once) == {ord("a"), start[0]}
    at_once.follow(b"a")
    assert allowed(at_once) == {ord("b")}
    thinking = make(backend, "abc", section=section(is_open=False, split=split))
    for token in start:
        assert token in allowed(thinking)
        thinking.follow([token])
    assert ord("{") in allowed(thinking) and END not in allowed(thinking)
    thinking.follow([*b"so", UNTHINK])
    assert allowed(thinking) == {ord("a")}


def test_a_grammar_that_begins_like_the_mark_keeps_its_text(backend):
    grammar = make(backend, "<b>", section=section(is_open=False, split=True))
    grammar.follow(b"<")
    assert allowed(grammar) == {ord("b")}


def test_tokens_already_out_are_followed_again(backend):
    """A request that goes on after a restart."""
    grammar = make(backend, "abc", section=section(is_open=True))
    assert grammar.follow([*b"hm", UNTHINK, *b"ab"]) == 5
    assert allowed(grammar) == {ord("c")}
