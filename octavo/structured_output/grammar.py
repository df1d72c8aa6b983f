"""What a grammar engine must do. Each engine is one file and one row of `manager.BACKENDS`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.structured_output.constraint import Constraint

# [n, words]: row i allows token t where bit t % 32 of word t // 32 is set.
Masks = npt.NDArray[np.int32]


class GrammarError(Exception):
    """A grammar that was fine has come to more than its engine can follow; the message is for the client."""


class Grammar(ABC):
    """A place in a text that follows a grammar. End tokens are no part of the text and are never given to it."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and the grammar is of no use any more, when the token is not allowed."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens accepted."""

    @property
    @abstractmethod
    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the text must end here. An engine that cannot tell says False, and allows no token in the next mask."""

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, as far as they are certain; none when an engine cannot tell."""
        return []


class CompiledGrammar(ABC):
    """A grammar ready for use by any number of requests."""

    num_bytes: int  # roughly what it holds in memory

    @abstractmethod
    def start(self) -> Grammar:
        """The place before the first token."""


class Backend(ABC):
    """A grammar engine for one vocabulary. Several threads may compile, and fill the mask of one grammar of their own;
    only one fills those of several."""

    @abstractmethod
    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises ClientError when the constraint is wrong, or more than the engine can enforce."""

    @abstractmethod
    def fill(self, grammars: Sequence[Grammar], masks: Masks, rows: Sequence[int]) -> dict[int, str]:
        """Write which tokens may come next in each grammar (end tokens: either way) into its row of the masks.

        Returns what went wrong, by index.
        """
