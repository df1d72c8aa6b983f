"""Which tokens of an answer are reasoning: for the count in usage, and so that hidden reasoning is hidden everywhere.

The machine that reads the answer sees text in pieces of several tokens, cut where stop strings and half characters say.
Here a machine of the same kind is fed the text of one token at a time, and asked where it stands.
"""

from collections.abc import Sequence

from octavo.server.parsers.answer import AnswerMachine
from octavo.tokenizer.tokenizer import Tokenizer


class TokenSections:
    """Follows one answer. `is_hidden`: its client must not see reasoning."""

    def __init__(self, machine: AnswerMachine, tokenizer: Tokenizer, is_hidden: bool):
        self.is_hidden = is_hidden
        self._machine = machine
        self._tokenizer = tokenizer

    def of(self, token_ids: Sequence[int]) -> list[bool]:
        """For each of the next tokens, whether it is reasoning (the closing mark included)."""
        flags = []
        for token_id in token_ids:
            before = self._machine.in_reasoning
            self._machine.feed(self._tokenizer.token_text(token_id), [])
            flags.append(before or self._machine.in_reasoning)
        return flags
