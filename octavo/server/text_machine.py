"""From generated text to what an answer is made of: the seam between the engine's output and every API.

A machine is fed each delta of one choice in order and answers with events. No route parses text: what an answer
consists of (reasoning, content, tool calls) is told by events, and a whole answer is its events folded. Whatever the
machine, feeding a text in one piece or character by character comes to the same events once neighbours are joined.

The order of events: any mixture of `ReasoningDelta`, `ContentDelta` and tool calls, a call being one `ToolCallStart`,
its `ToolCallArguments`, and `ToolCallEnd`, with nothing in between; `Finish` comes last, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(slots=True, frozen=True)
class ReasoningDelta:
    """More of the thinking before (or between) the answer's text."""

    text: str


@dataclass(slots=True, frozen=True)
class ToolCallStart:
    """A call begins: of a tool that was offered, with an id that no other call of the conversation has."""

    index: int  # of the call within the choice, from 0
    id: str
    name: str


@dataclass(slots=True, frozen=True)
class ToolCallArguments:
    """More of a call's arguments. Joined they are one JSON object, unless the answer was cut or the model erred."""

    index: int
    text: str


@dataclass(slots=True, frozen=True)
class ToolCallEnd:
    """The call is complete. A call that the answer's end cut short has no such event."""

    index: int


@dataclass(slots=True, frozen=True)
class Finish:
    """The end of the choice, with the reason its client is told (a machine may know better than the engine)."""

    reason: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | Finish


class Sections(Protocol):
    """Tells which tokens are reasoning. `is_hidden`: the client must not see them."""

    is_hidden: bool

    def of(self, token_ids: Sequence[int]) -> list[bool]:
        """For each of the next tokens, whether it is reasoning."""


class TextMachine(Protocol):
    """One choice's reader. It may hold text back while it cannot yet tell what the text is."""

    is_done: bool  # nothing further can matter: generation may stop
    sections: Sections | None  # None: no token is reasoning

    def feed(self, delta_text: str, token_ids: list[int]) -> list[Event]:
        """Take what was generated since the last call."""

    def finish(self, reason: str) -> list[Event]:
        """Flush what was held back; the last event is `Finish`."""


class PlainText:
    """All text is content."""

    is_done = False
    sections: Sections | None = None

    def feed(self, delta_text: str, token_ids: list[int]) -> list[Event]:
        return [ContentDelta(delta_text)] if delta_text else []

    def finish(self, reason: str) -> list[Event]:
        return [Finish(reason)]
