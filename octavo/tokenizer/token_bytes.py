"""Token ids as bytes: the exact and quick way to turn ids into text.

The two big families of vocabularies, byte-level BPE and SentencePiece with byte fallback, give every token a fixed
string of bytes, and a text is the UTF-8 reading of the concatenation. So text can be produced id by id, in linear time,
and nothing a model can emit raises. Vocabularies of other kinds have no `TokenBytes` and go through their library.

Bytes that are not UTF-8 become U+FFFD, one for each maximal piece that could have started a character. (The Rust
decoder of SentencePiece vocabularies turns a whole run of byte tokens into U+FFFD when any of it is invalid. That
cannot be known while a run is still growing, so a stream could not agree with it.)
"""

import re
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class LeadingSpace(Enum):
    """What a decoder drops at the start of a text: nothing, one space, or every space mark of the first token."""

    KEEP = 0
    DROP_ONE = 1
    DROP_FIRST_TOKENS = 2


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable Latin-1 is itself, the rest stands from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    """A token with any character outside the alphabet (an added token) is plain text as a whole."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def _sentencepiece(space: str, byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(space, " ").encode("utf-8", "replace")

    return to_bytes


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, worked out when first asked for. Safe to share between threads.

    An id outside the vocabulary (heads are often padded) has no bytes.
    """

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        to_bytes: Callable[[str], bytes],
        leading_space: LeadingSpace = LeadingSpace.KEEP,
        space: str = " ",
    ):
        super().__init__()
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes
        self._space = space
        self.leading_space = leading_space

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        found = self[token_id] = b"" if token is None else self._to_bytes(token)
        return found

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that opens a text."""
        if self.leading_space is LeadingSpace.DROP_FIRST_TOKENS:
            token = self._id_to_token(token_id)
            return b"" if token is None else self._to_bytes(token.replace(self._space, ""))
        return self[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids that open a text."""
        token_ids = list(token_ids)
        if not token_ids:
            return ""
        data = self.first(token_ids[0]) + b"".join([self[token_id] for token_id in token_ids[1:]])
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.leading_space is LeadingSpace.DROP_ONE else text


def make_token_bytes(decoder: dict[str, Any] | None, id_to_token: Callable[[int], str | None]) -> TokenBytes | None:
    """The `TokenBytes` of a vocabulary whose decoder (in tokenizer.json's words) is understood, else None."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TokenBytes(id_to_token, _byte_level)
    space, byte_fallback, fused, leading_space = None, False, False, LeadingSpace.KEEP
    for step in steps:
        if leading_space is not LeadingSpace.KEEP:
            return None  # something comes after the step that looks at the start of the text
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "} if space is None:
                space = pattern
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                leading_space = LeadingSpace.DROP_ONE
            case {"type": "Metaspace", "replacement": str(pattern)} if space is None and not fused:
                space = pattern
                if step.get("prepend_scheme", "always") != "never":
                    leading_space = LeadingSpace.DROP_FIRST_TOKENS
            case _:
                return None
    if space is None:
        return None
    return TokenBytes(id_to_token, _sentencepiece(space, byte_fallback), leading_space, space)
