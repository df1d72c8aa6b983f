"""Grammars by xgrammar: compiled ahead, then masks in ten microseconds however large the vocabulary.

https://github.com/mlc-ai/xgrammar. It passes over what it does not know in a schema, and reads a keyword only where `type`
stands beside it; so schemas are checked here for what it is known to enforce.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import xgrammar

from octavo.errors import ClientError
from octavo.structured_output.constraint import NO_WHITESPACE, WHITESPACE, Constraint
from octavo.structured_output.grammar import Backend, CompiledGrammar, Grammar, Masks
from octavo.structured_output.json_schema import KEYWORDS, Path, clean_schema, schema_error
from octavo.structured_output.vocabulary import Vocabulary

# White space between two tokens of JSON. It can be bounded in number only.
MAX_WHITESPACE = 8
NOT_ENFORCED = frozenset(
    ("additionalItems", "allOf", "format", "maxProperties", "minProperties", "multipleOf", "oneOf", "patternProperties")
)
# Parts of patterns that are read and not followed, or not read: looking around, back references, word borders.
_NOT_FOLLOWED = re.compile(r"\(\?<?[=!]|\\[1-9bBk]")
_NOT_FOLLOWED_SAID = "look-around, back references and word borders are not supported by xgrammar."
# Keyword -> keywords beside which it is passed over, or passes over them.
_ALL = KEYWORDS.keys() - {"$defs", "definitions"}
_NOT_BESIDE = dict.fromkeys(("$ref", "anyOf", "const", "enum"), _ALL) | {"pattern": {"minLength", "maxLength"}}


class XGrammar(Backend):
    def __init__(self, vocabulary: Vocabulary):
        self._num_words = vocabulary.num_words
        tokens = list(vocabulary.tokens)
        for token_id in vocabulary.special.values():
            tokens[token_id] = b""  # never allowed
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=vocabulary.num_logits, stop_token_ids=vocabulary.end_token_ids
        )
        # Compiled grammars are kept by the manager, and its threads are those that compile.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher()

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            compiled = _Compiled(self._compile(constraint))
            first = np.zeros((1, self._num_words), dtype=np.int32)
            self.fill([compiled.start()], first, [0])
            if not first.any():
                raise ValueError("no text can match it")
            return compiled
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ClientError):
                raise
            raise ClientError(
                f"structured_outputs: {constraint.kind}: {_one_line(str(error))}.", param="structured_outputs"
            ) from None

    def _compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, constraint.text
        match constraint.kind:
            case "json":
                clean_schema(json.loads(text), check=_refuse)
                return compiler.compile_json_schema(text, strict_mode=False, **_whitespace(constraint))
            case "choice":
                rules = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
                return compiler.compile_grammar(f"root ::= {rules}")
            case "regex":
                if _NOT_FOLLOWED.search(text):
                    raise ClientError(f"structured_outputs: regex: {_NOT_FOLLOWED_SAID}", param="structured_outputs")
                return compiler.compile_regex(text)
            case "gbnf":
                return compiler.compile_grammar(text)
            case "lark":
                return compiler.compile_lark(text)
            case "structural_tag":
                return compiler.compile_structural_tag(text)

    def fill(self, grammars: Sequence[Grammar], masks: Masks, rows: Sequence[int]) -> dict[int, str]:
        matchers = [grammar.matcher for grammar in cast("Sequence[_Grammar]", grammars)]
        if len(matchers) == 1:
            matchers[0].fill_next_token_bitmask(masks, rows[0])
        else:
            self._batch.batch_fill_next_token_bitmask(matchers, masks, list(rows))
        return {}


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: xgrammar.CompiledGrammar):
        self._compiled = compiled
        self.num_bytes = compiled.memory_size_bytes

    def start(self) -> Grammar:
        return _Grammar(xgrammar.GrammarMatcher(self._compiled))


class _Grammar(Grammar):
    def __init__(self, matcher: xgrammar.GrammarMatcher):
        self.matcher = matcher

    def accept(self, token_id: int) -> bool:
        return self.matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    @property
    def is_accepting(self) -> bool:
        return self.matcher.is_completed()

    @property
    def is_terminated(self) -> bool:
        return False  # told by an empty mask

    def forced_tokens(self) -> list[int]:
        return self.matcher.find_jump_forward_tokens()


def _whitespace(constraint: Constraint) -> dict[str, Any]:
    if constraint.whitespace == WHITESPACE:
        return {"any_whitespace": True, "max_whitespace_cnt": MAX_WHITESPACE}
    if constraint.whitespace == NO_WHITESPACE:
        return {"any_whitespace": False, "separators": (",", ":")}
    raise ClientError(
        "structured_outputs: whitespace_pattern is not supported by xgrammar; leave it out.", param="structured_outputs"
    )


def _refuse(schema: Mapping[str, Any], path: Path) -> None:
    """Refuse a subschema that xgrammar would not enforce in full."""
    keywords = KEYWORDS.keys() & schema.keys()
    for keyword in keywords & NOT_ENFORCED:
        raise schema_error((*path, keyword), "is not supported by xgrammar.")
    if isinstance(schema.get("items"), list):
        raise schema_error((*path, "items"), "as a list is not supported by xgrammar; use prefixItems.")
    for keyword in keywords & _NOT_BESIDE.keys():
        others = (keywords & _NOT_BESIDE[keyword]) - {keyword}
        if others:
            raise schema_error((*path, keyword), f"beside {', '.join(sorted(others))} is not supported by xgrammar.")
    if _NOT_FOLLOWED.search(schema.get("pattern", "")):
        raise schema_error((*path, "pattern"), f"cannot be enforced: {_NOT_FOLLOWED_SAID}")
    for name in schema.get("required", ()):
        if name not in schema.get("properties", ()):
            raise schema_error(
                (*path, "required"), f"names {name!r}, which properties does not: not supported by xgrammar."
            )
    for keyword in keywords:
        types = KEYWORDS[keyword][1]
        if types and schema.get("type") not in types:
            raise schema_error((*path, keyword), f'needs "type": "{types[0]}" beside it with xgrammar.')


def _one_line(message: str) -> str:
    """A message without the place in xgrammar's sources it comes from."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", message.strip().partition("\n")[0])
