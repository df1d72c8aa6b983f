"""Stop strings in a growing text."""

from collections.abc import Sequence


class StopChecker:
    """Watches a text for stop strings and holds back what may turn out to be the start of one.

    The match that completes first wins; of two that complete at the same character, the longer. Only the part of the
    text that could begin a stop string is held (at most the longest stop minus one character); the rest flows at once.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool):
        self._stops = list(stops)
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """Take new text; return what is released and the stop string that fired.

        When one fires, the released text ends before it (after it, if stops are included) and the rest is dropped.
        `may_stop=False` (fewer than min_tokens tokens are out) lets matches that complete in `text` pass; one that
        began there and completes later counts.
        """
        buffer = self._held + text
        if may_stop:
            match = self._first_match(buffer, len(self._held))
            if match is not None:
                end, start, stop = match
                self._held = ""
                return buffer[: end if self._include else start], stop
        cut = self._start_of_candidate(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The text still held, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, old: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the match that ends first behind the `old` characters seen before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best

    def _start_of_candidate(self, buffer: str) -> int:
        """Where the longest ending of `buffer` starts that some stop string starts with."""
        cut = len(buffer)
        for stop in self._stops:
            position = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= position < cut:
                if stop.startswith(buffer[position:]):
                    cut = position
                    break
                position = buffer.find(stop[0], position + 1)
        return cut
