"""Grammars by llguidance: nothing to compile ahead, a mask in some ten microseconds, JSON schemas enforced exactly.

https://github.com/guidance-ai/llguidance. Its limits on the work for one mask bound what a hostile grammar can cost.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from octavo.errors import ClientError
from octavo.structured_output.constraint import NO_WHITESPACE, Constraint
from octavo.structured_output.grammar import Backend, CompiledGrammar, Grammar, Masks
from octavo.structured_output.json_schema import find_fault, schema_error
from octavo.structured_output.structural_tag import LarkWriter
from octavo.structured_output.vocabulary import Vocabulary

# What a matcher holds besides its grammar's text, by rough measurement; it grows with use.
_MATCHER_BYTES = 1 << 18
# From this many masks on, threads help more than they cost.
_MIN_PARALLEL = 4


class LLGuidance(Backend):
    def __init__(self, vocabulary: Vocabulary):
        self._special = vocabulary.special
        wrapper = llguidance.TokenizerWrapper(_Source(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.num_logits)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)  # verbose ones would show the whole grammar
        self._executor = llguidance.LLExecutor()

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        text = self._spell(constraint)
        matcher = self._match(text)
        if matcher.is_error():
            if constraint.kind == "json":
                raise schema_error(*find_fault(json.loads(constraint.text), self._complaint))
            raise _refusal(constraint, matcher.get_error())
        # The first mask shows whether there is any text at all, and pays for what later ones share.
        first = matcher.deep_copy()
        has_text = any(first.compute_bitmask())
        error = first.get_error()
        if not has_text or error.startswith("NoExtension"):
            raise _refusal(constraint, "no text can match it")
        if error:
            raise _refusal(constraint, error)
        return _Compiled(matcher, _MATCHER_BYTES + len(text))

    def _spell(self, constraint: Constraint) -> str:
        """The constraint as llguidance writes grammars."""
        if constraint.kind == "structural_tag":
            writer = LarkWriter(self._special, _to_lark, lambda regex: llguidance.regex_to_lark(regex, "dw"))
            return writer.write(json.loads(constraint.text), _whitespace(constraint))
        return _SPELLINGS[constraint.kind](constraint)

    def _match(self, text: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)

    def _complaint(self, schema: Any) -> str | None:
        """What is wrong with a schema, if anything is."""
        matcher = self._match(llguidance.LLMatcher.grammar_from_json_schema(schema))
        return f"cannot be enforced: {_one_line(matcher.get_error())}." if matcher.is_error() else None

    def fill(self, grammars: Sequence[Grammar], masks: Masks, rows: Sequence[int]) -> dict[int, str]:
        matchers = [grammar.matcher for grammar in cast("Sequence[_Grammar]", grammars)]
        num_bytes = masks.shape[1] * masks.itemsize
        if len(matchers) >= _MIN_PARALLEL:
            jobs = list(zip(matchers, rows, strict=True))
            self._executor.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, num_bytes, len(masks))
        else:
            for matcher, row in zip(matchers, rows, strict=True):
                matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, num_bytes)
        return {i: _one_line(matcher.get_error()) for i, matcher in enumerate(matchers) if matcher.is_error()}


class _Compiled(CompiledGrammar):
    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int):
        self._matcher = matcher
        self.num_bytes = num_bytes

    def start(self) -> Grammar:
        return _Grammar(self._matcher.deep_copy())


class _Grammar(Grammar):
    def __init__(self, matcher: llguidance.LLMatcher):
        self.matcher = matcher

    def accept(self, token_id: int) -> bool:
        return self.matcher.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    @property
    def is_accepting(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def is_terminated(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def forced_tokens(self) -> list[int]:
        return self.matcher.compute_ff_tokens()


class _Source:
    """The vocabulary as llguidance asks for it: a token that stands for no text begins with the byte 0xFF."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id = vocabulary.end_token_ids[0]
        self.special_token_ids = list(vocabulary.special.values())
        self.tokens = list(vocabulary.tokens)
        for name, token_id in vocabulary.special.items():
            self.tokens[token_id] = b"\xff" + name.encode()
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


# ---- the constraint in llguidance's words


def _whitespace(constraint: Constraint) -> Any:
    if constraint.whitespace == NO_WHITESPACE:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": constraint.whitespace}


def _json(constraint: Constraint) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(constraint.text, overrides=_whitespace(constraint))


def _choice(constraint: Constraint) -> str:
    # One terminal, so that a choice which continues another is not shut out by it.
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.text))
    return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")


def _regex(constraint: Constraint) -> str:
    # \d and \w are ASCII, as in JSON schema patterns.
    return llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(constraint.text, 'dw')}/")


def _gbnf(constraint: Constraint) -> str:
    return llguidance.LLMatcher.grammar_from_lark(_to_lark(constraint.text))


def _to_lark(grammar: str) -> str:
    """A GBNF or Lark grammar as Lark."""
    if "::=" not in grammar:
        return grammar
    try:
        return str(any_to_lark(_plain_characters(grammar)))
    except Exception as error:  # the converter raises bare ones
        raise ClientError(f"structured_outputs: gbnf: {error}.", param="structured_outputs") from None


def _plain_characters(gbnf: str) -> str:
    r"""A GBNF with characters instead of \x and \u escapes, which the converter does not get right."""

    def plain(match: re.Match[str]) -> str:
        character = chr(int(match[1] or match[2] or match[3], 16))
        return f"\\{character}" if character in '"\\[]^-' else character

    return re.sub(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})", plain, gbnf)


_SPELLINGS: dict[str, Callable[[Constraint], str]] = {
    "json": _json,
    "choice": _choice,
    "regex": _regex,
    "gbnf": _gbnf,
    "lark": lambda constraint: llguidance.LLMatcher.grammar_from_lark(constraint.text),
}


def _refusal(constraint: Constraint, message: str) -> ClientError:
    return ClientError(f"structured_outputs: {constraint.kind}: {_one_line(message)}.", param="structured_outputs")


def _one_line(message: str) -> str:
    """What a message of many lines comes to: they draw the place in the grammar, which the client knows."""
    return message.rpartition("\nerror: ")[2].partition("\n")[0].strip()
