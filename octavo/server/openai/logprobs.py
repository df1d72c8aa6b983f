"""Log probabilities in the two shapes of the OpenAI routes.

JSON has no infinity, so what cannot happen at all is reported as -9999.
"""

import codecs
from collections.abc import Sequence

from octavo.server.openai.responses import (
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.outputs import Logprob, PositionLogprobs

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """The logprob, or the floor for minus infinity (and for not-a-number, which compares as false)."""
    return logprob if logprob > FLOOR else FLOOR


def _likeliest(position: PositionLogprobs, k: int) -> list[tuple[int, Logprob]]:
    """The k likeliest tokens of a position; without the chosen one when it is not among them."""
    return sorted(position.items(), key=lambda item: finite(item[1].logprob), reverse=True)[:k]


class TextOffset:
    """Counts the characters of a text that arrives as bytes; a character counts once its last byte is there."""

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, data: bytes) -> None:
        self.characters += len(self._decoder.decode(data))


class LogprobWriter:
    """Writes positions as JSON objects; `as_ids` shows each token as `token_id:<id>` instead of its text."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool):
        self.tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None

    def token(self, token_id: int) -> str:
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_to_bytes(token_id)

    def chat(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], k: int) -> list[TokenLogprob]:
        """One entry a token, each with its k likeliest alternatives."""
        entries = []
        for token_id, position in zip(token_ids, positions, strict=True):
            top = [
                TopLogprob(self.token(other), finite(entry.logprob), list(self.bytes_of(other)))
                for other, entry in _likeliest(position, k)
            ]
            chosen = finite(position[token_id].logprob)
            entries.append(TokenLogprob(self.token(token_id), chosen, list(self.bytes_of(token_id)), top))
        return entries

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        offset: TextOffset,
        hidden: int = 0,
    ) -> CompletionLogprobs:
        """The four lists; `offset` is moved behind the last token. A position without logprobs has null in their place.

        The first `hidden` tokens are not in the text (a BOS that the tokenizer added): they take no room in it.
        """
        lists = CompletionLogprobs([], [], [], [])
        for index, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
            lists.tokens.append("" if index < hidden and not self.as_ids else self.token(token_id))
            lists.text_offset.append(offset.characters)
            if index >= hidden:
                offset.advance(self.bytes_of(token_id))
            if position is None:
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
                continue
            lists.token_logprobs.append(finite(position[token_id].logprob))
            top: dict[str, float] = {}
            for other, entry in _likeliest(position, len(position)):
                # Two tokens may read alike (parts of characters do); the likelier one is kept.
                top.setdefault(self.token(other), finite(entry.logprob))
            lists.top_logprobs.append(top)
        return lists


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """Per prompt position, each reported token id with its logprob, rank and text; null at the first."""
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(finite(entry.logprob), entry.rank, entry.decoded_token)
            for token_id, entry in position.items()
        }
        for position in positions
    ]
