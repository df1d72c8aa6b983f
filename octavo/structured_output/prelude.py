"""`Prelude`: the reasoning in front of the text that a grammar rules, in any cut of tokens.

    FREE ──────── the end mark ────────► OVER        an answer that begins inside the section
    CHOICE ─┬─ any token of the grammar ─► OVER      an answer that may open it first
            └─ OPENING (the start mark) ─► FREE

Inside the section the text is free. It may not end there, nor run past the end mark within a token.
"""

import enum
from collections.abc import Iterator

import numpy as np

from octavo.structured_output.grammar import Masks
from octavo.structured_output.vocabulary import Vocabulary
from octavo.types.sampling_params import ReasoningSection


class _State(enum.Enum):
    CHOICE = 0
    OPENING = 1
    FREE = 2
    OVER = 3


class Prelude:
    """Where one answer is before its grammar begins. `first` is the grammar's first mask."""

    def __init__(self, section: ReasoningSection, vocabulary: Vocabulary, first: Masks):
        self._vocabulary = vocabulary
        self._start = section.start_token_ids
        self._end = section.end.encode()
        self._state = _State.FREE if section.is_open else _State.CHOICE
        self._num_start = 0  # tokens of the start mark that are out
        self._tail = b""  # as much of the text as the end mark may begin in
        if self._state is _State.CHOICE and (not self._start or _has(first, self._start[0])):
            self._state = _State.OVER  # what looks like the start mark belongs to the grammar
        list(self._overruns())  # the slow first look at the vocabulary belongs here, beside the loop

    @property
    def is_over(self) -> bool:
        """Whether the grammar has begun."""
        return self._state is _State.OVER

    @property
    def is_choice(self) -> bool:
        """Whether the grammar and the start mark may come next."""
        return self._state is _State.CHOICE

    def feed(self, token_id: int) -> bool:
        """Take in a token; False when it is the grammar's."""
        if self._state is _State.CHOICE and token_id != self._start[0]:
            self._state = _State.OVER
        if self._state is _State.OVER:
            return False
        if self._state is _State.FREE:
            text = self._tail + self._vocabulary.bytes_of(token_id)
            self._tail = text[max(0, len(text) - len(self._end) + 1) :]
            if self._end in text:
                self._state = _State.OVER
            return True
        self._num_start += 1
        self._state = _State.FREE if self._num_start == len(self._start) else _State.OPENING
        return True

    def fill(self, mask: Masks, no_ends: Masks) -> None:
        """Write what may come next; of a choice, add the start mark to the grammar's mask."""
        if self._state is _State.FREE:
            mask[:] = no_ends
            for token_id in self._overruns():
                mask[token_id // 32] &= ~_bit(token_id)
            return
        if self._state is _State.OPENING:
            mask[:] = 0
        token_id = self._start[self._num_start]
        mask[token_id // 32] |= _bit(token_id)

    def _overruns(self) -> Iterator[int]:
        """Tokens that complete the end mark and go on behind it, where the grammar has its say."""
        yield from self._vocabulary.overruns(self._end, anywhere=True)
        for length in range(1, len(self._end)):
            if self._tail.endswith(self._end[:length]):
                yield from self._vocabulary.overruns(self._end[length:], anywhere=False)


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % 32).view(np.int32)


def _has(mask: Masks, token_id: int) -> bool:
    return bool(mask[token_id // 32] & _bit(token_id))
