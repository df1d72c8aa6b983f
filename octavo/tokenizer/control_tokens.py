"""Keeping what clients type from becoming special tokens.

A `MARK` nobody can guess is put inside every special token that a client wrote (after its first character). The
template then writes the conversation around it; the rendered text is cut at the marks and each piece is encoded on its
own, so the broken token is ordinary text, while the template's own special tokens work. Vocabularies that put a space
before each piece (older SentencePiece models) show such a broken token with a space inside.
"""

import re
import secrets
from collections.abc import Iterable
from typing import Any

from octavo.errors import ClientError

# Digits only: a template may change the case of a text, or write it as JSON, and the mark must survive that.
MARK = "".join(str(secrets.randbelow(10)) for _ in range(40))


class ControlTokens:
    """The special tokens of one vocabulary as a pattern."""

    def __init__(self, tokens: Iterable[str]):
        tokens = sorted({token for token in tokens if token}, key=len, reverse=True)
        # A look-ahead, so that a token that starts inside another one is broken as well.
        alternatives = "|".join(re.escape(token) for token in tokens)
        self._pattern = re.compile(f"(?=({alternatives}))(.)", re.DOTALL) if tokens else None

    def escape(self, value: Any) -> Any:
        """`value` (plain data, as in JSON) with every special token in its strings broken; keys of objects too."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(self._break, value)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list):
            # Neighbouring texts of a list must not complete a token together.
            return [self._close(self.escape(item)) for item in value[:-1]] + [self.escape(item) for item in value[-1:]]
        return value

    @staticmethod
    def _break(match: re.Match[str]) -> str:
        if len(match[1]) == 1:
            raise ClientError(f"the text contains {match[1]!r}, a special token that cannot be written as text.")
        return match[2] + MARK

    @staticmethod
    def _close(part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return {**part, "text": part["text"] + MARK}
        return part
