"""From generated text to what an answer is made of: the seam between the engine's output and every API.

A machine is fed each delta of one choice in order and answers with events. Today there is one kind of text, content;
reasoning and tool calls are further machines that emit further events, and no route changes its loop for them. Whatever
the machine, feeding a text in one piece or character by character must come to the same events once joined.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(slots=True, frozen=True)
class Finish:
    """The end of the choice, with the reason its client is told (a machine may know better than the engine)."""

    reason: str


Event = ContentDelta | Finish


class TextMachine(Protocol):
    """One choice's reader. It may hold text back while it cannot yet tell what the text is."""

    def feed(self, delta_text: str, token_ids: list[int]) -> list[Event]:
        """Take what was generated since the last call."""

    def finish(self, reason: str) -> list[Event]:
        """Flush what was held back; the last event is `Finish`."""


class PlainText:
    """All text is content."""

    def feed(self, delta_text: str, token_ids: list[int]) -> list[Event]:
        return [ContentDelta(delta_text)] if delta_text else []

    def finish(self, reason: str) -> list[Event]:
        return [Finish(reason)]
