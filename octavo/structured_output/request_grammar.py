"""`RequestGrammar`: where one request stands in its grammar, and what it may sample next.

    free text … </think>│ text under the grammar                  │ end
                        └ `starts_after`; without it, at once     └ nothing more may follow: the scheduler ends the request

End tokens belong to no grammar: they are allowed exactly where the text may end.
"""

from collections.abc import Sequence

import numpy as np

from octavo.structured_output.grammar import Backend, Grammar, GrammarError, Masks
from octavo.structured_output.marker import Marker
from octavo.structured_output.vocabulary import Vocabulary


class RequestGrammar:
    """`end_token_ids` end this request where the grammar lets them; `marker`: the text behind which the grammar begins."""

    def __init__(
        self,
        backend: Backend,
        grammar: Grammar,
        vocabulary: Vocabulary,
        end_token_ids: Sequence[int],
        marker: Marker | None = None,
    ):
        self.backend = backend
        self.grammar = grammar
        self.is_terminated = False  # nothing more may follow
        self.error: str | None = None  # set when no mask could be made
        self._marker = marker
        self._no_ends = ~_bits(vocabulary.end_token_ids, vocabulary.num_words)
        self._ends = _bits(end_token_ids, vocabulary.num_words)

    @property
    def has_begun(self) -> bool:
        """Whether the text before the grammar is over."""
        return self._marker is None

    def follow(self, token_ids: Sequence[int]) -> int:
        """Go on by sampled tokens, none of them an end token. Returns how many count: the text may be over before.

        Raises GrammarError when one is not allowed.
        """
        for count, token_id in enumerate(token_ids):
            if self.is_terminated:
                return count
            if self._marker is not None:
                if self._marker.feed(token_id):
                    self._marker = None
            elif not self.grammar.accept(token_id):
                raise GrammarError(self.error or f"token {token_id} does not follow the grammar")
            else:
                self.is_terminated = self.grammar.is_terminated
        return len(token_ids)

    def fill_free(self, mask: Masks) -> None:
        """Before the grammar begins: allow anything but an end, or a token that goes on behind the beginning."""
        assert self._marker is not None
        mask[:] = self._no_ends
        for token_id in self._marker.overrunning():
            mask[token_id // 32] &= ~np.uint32(1 << token_id % 32).view(np.int32)

    def allow_ends(self, mask: Masks) -> None:
        """Put the end tokens right in a mask that the grammar has filled."""
        mask &= self._no_ends
        if self.grammar.is_accepting:
            if not mask.any():
                # Found out late: the step that waits for this mask samples a token for nothing.
                self.is_terminated = True
                mask[:] = -1
            mask |= self._ends


def _bits(token_ids: Sequence[int], num_words: int) -> Masks:
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
