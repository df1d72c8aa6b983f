"""Ids in, text out: the two ways a growing sequence of ids becomes a growing text.

The pieces, joined, are the text of all ids. Bytes that may still become a character are held back until they have, or
until `flush`, which makes incomplete ones one U+FFFD. Nothing here raises, whatever the ids are.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from octavo.tokenizer.token_bytes import LeadingSpace, TokenBytes
from octavo.tokenizer.tokenizer import Tokenizer


class TextStream(Protocol):
    """What both have in common."""

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that the next ids make certain."""

    def flush(self) -> str:
        """The text still held back, once, when no more ids will come."""


def open_text_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool,
    shown_special_ids: Sequence[int] = (),
) -> TextStream:
    """The stream for one answer to a prompt. `shown_special_ids` are text whether or not special tokens are skipped.

    An answer continues a text, so its first token keeps the leading space that a text of its own would lose
    (SentencePiece vocabularies). Incomplete bytes at the end of a prompt are not completed by the answer.
    """
    skipped = tokenizer.special_ids.difference(shown_special_ids) if skip_special_tokens else frozenset()
    if tokenizer.token_bytes is None:
        # What is skipped never reaches the library, so it need not be told, and would not make exceptions.
        skip_in_library = skip_special_tokens and not shown_special_ids
        return LibraryStream(tokenizer, prompt_token_ids, skipped, skip_in_library, spaces_between_special_tokens)
    continues = any(token_id not in tokenizer.special_ids for token_id in prompt_token_ids)
    return ByteStream(tokenizer.token_bytes, skipped, continues)


class ByteStream:
    """Text of a vocabulary whose tokens are bytes."""

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int], continues: bool):
        self._bytes = token_bytes
        self._skipped = skipped
        self._pending = b""  # at most three bytes: the beginning of a character
        self._at_start = not continues and token_bytes.leading_space is not LeadingSpace.KEEP

    def append(self, token_ids: Sequence[int]) -> str:
        skipped, token_bytes = self._skipped, self._bytes
        shown = [token_id for token_id in token_ids if token_id not in skipped]
        if not shown:
            return ""
        if not self._at_start:
            return self._decode(b"".join([token_bytes[token_id] for token_id in shown]), final=False)
        data = token_bytes.first(shown[0]) + b"".join([token_bytes[token_id] for token_id in shown[1:]])
        return self._strip_start(self._decode(data, final=False))

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return text

    def _strip_start(self, text: str) -> str:
        if self._bytes.leading_space is LeadingSpace.DROP_FIRST_TOKENS:
            self._at_start = False
        elif text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decode(b"", final=True)


class LibraryStream:
    """Text of any vocabulary: the library decodes a window of the last ids with and without the new ones.

    The window moves along, so the work for a token stays constant. While it ends in U+FFFD, its text is held back, but
    not for more ids than can make one character.
    """

    _CONTEXT = 4  # ids kept before the new ones: what a decoder's treatment of one token may depend on
    _MAX_PENDING = 8

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int],
        skip_special: bool,
        spaces_between: bool,
    ):
        self._tokenizer = tokenizer
        self._options = (skip_special, spaces_between)
        self._skipped = skipped
        self._window = [token_id for token_id in prompt_token_ids if token_id not in self._skipped][-self._CONTEXT :]
        self._num_pending = 0  # ids at the end of the window whose text is held back
        self._shown = tokenizer.decode(self._window, *self._options)  # the window's text without those

    def append(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            if token_id in self._skipped:
                continue  # the window is for context, and these give none
            self._window.append(token_id)
            self._num_pending += 1
            decoded = self._tokenizer.decode(self._window, *self._options)
            if not decoded.endswith("�") or self._num_pending >= self._MAX_PENDING:
                text += self._show(decoded)
        return text

    def flush(self) -> str:
        return self._show(self._tokenizer.decode(self._window, *self._options))

    def _show(self, decoded: str) -> str:
        new = decoded[len(self._shown) :]
        self._window = self._window[-self._CONTEXT :]
        self._num_pending = 0
        self._shown = self._tokenizer.decode(self._window, *self._options)
        return new
