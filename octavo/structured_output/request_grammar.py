"""`RequestGrammar`: where one request stands in its grammar, and what it may sample next.

    reasoning (prelude) │ text under the grammar │ end

End tokens belong to no grammar: they are allowed exactly where the text may end. Where it must end, the scheduler ends
the request without one.
"""

from collections.abc import Sequence

import numpy as np

from octavo.structured_output.grammar import Backend, Grammar, GrammarError, Masks
from octavo.structured_output.prelude import Prelude
from octavo.structured_output.vocabulary import Vocabulary
from octavo.types.sampling_params import ReasoningSection


class RequestGrammar:
    """`end_token_ids` end this request where the grammar lets them."""

    def __init__(
        self,
        backend: Backend,
        grammar: Grammar,
        vocabulary: Vocabulary,
        end_token_ids: Sequence[int],
        section: ReasoningSection | None = None,
    ):
        self.backend = backend
        self.grammar = grammar
        self.is_terminated = False  # nothing more may follow
        self.error: str | None = None  # set when no mask could be made
        self._no_ends = ~_bits(vocabulary.end_token_ids, vocabulary.num_words)
        self._ends = _bits(end_token_ids, vocabulary.num_words)
        self._prelude: Prelude | None = None
        if section is not None:
            first = np.zeros((1, vocabulary.num_words), dtype=np.int32)
            backend.fill([grammar], first, [0])
            self._prelude = Prelude(section, vocabulary, first[0])

    @property
    def needs_mask(self) -> bool:
        """Whether the grammar has to fill a mask before `complete_mask` sees it."""
        return self._prelude is None or self._prelude.is_over or self._prelude.is_choice

    def follow(self, token_ids: Sequence[int]) -> int:
        """Go on by sampled tokens, none of them an end token. Returns how many count: the text may be over before.

        Raises GrammarError when one is not allowed.
        """
        for count, token_id in enumerate(token_ids):
            if self.is_terminated:
                return count
            if self._prelude is not None and self._prelude.feed(token_id):
                continue
            if not self.grammar.accept(token_id):
                raise GrammarError(self.error or f"token {token_id} does not follow the grammar")
            self.is_terminated = self.grammar.is_terminated
        return len(token_ids)

    def complete_mask(self, mask: Masks) -> None:
        """Make what the grammar has filled (if `needs_mask`) the mask of the next token."""
        if self.needs_mask:
            self._put_ends(mask)
        if self._prelude is not None and not self._prelude.is_over:
            self._prelude.fill(mask, self._no_ends)

    def _put_ends(self, mask: Masks) -> None:
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
