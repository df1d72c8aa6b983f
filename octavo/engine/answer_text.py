"""The text of one answer: tokens become text, stop strings end it, readers take it piece by piece or whole.

The text is the same however its tokens arrive and however it is read: a whole answer is the collected stream.
"""

from collections.abc import Sequence

from octavo.tokenizer.detokenizer import IncrementalDetokenizer
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.sampling_params import SamplingParams


class AnswerText:
    """Without a tokenizer, or with `detokenize` off, there is no text and every token counts."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams):
        self.stop: str | None = None  # the stop string that ended the answer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._stops = _StopStrings(params.stop) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        # Whatever was not handed over for good: the rest of a delta stream, else everything.
        self._pieces: list[str] = []

    def append(self, token_ids: Sequence[int]) -> int:
        """Take in tokens; returns how many of them the answer keeps: fewer when one of them completes a stop string."""
        if self._detokenizer is None:
            return len(token_ids)
        if self._stops is None:
            self._pieces.append(self._detokenizer.append(token_ids))
            return len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            piece = self._detokenizer.append((token_id,))
            self._pieces.append(piece)
            if piece and self._stops.feed(piece, may_stop=self._num_tokens >= self._min_tokens):
                self._cut(self._stops)
                return count
        return len(token_ids)

    def close(self) -> None:
        """No more tokens will come: what was held back is text after all."""
        if self._detokenizer is not None and self.stop is None:
            self._pieces.append(self._detokenizer.flush())
        if self._stops is not None:
            self._stops.num_held = 0

    def take(self, *, delta: bool) -> str:
        """The text that is certain: what `take` has not returned before (`delta`), or all of it."""
        text = "".join(self._pieces)
        num_shown = len(text) - (self._stops.num_held if self._stops is not None else 0)
        self._pieces = [text[num_shown:]] if delta else [text]
        return text[:num_shown]

    def _cut(self, stops: "_StopStrings") -> None:
        """End the text at the stop string that fired."""
        self.stop = stops.fired
        text = "".join(self._pieces)
        end = len(text) - stops.num_behind
        if not self._include_stop:
            end -= len(stops.fired)
        self._pieces = [text[:end]]


class _StopStrings:
    """Looks for stop strings across the pieces of a text.

    The match that completes first wins; of two that complete at the same character, the longer.
    """

    def __init__(self, stops: Sequence[str]):
        self.fired = ""
        self.num_behind = 0  # characters after the one that fired
        self.num_held = 0  # characters at the end of the text that may be the beginning of a stop string
        self._stops = stops
        self._max_overlap = max(map(len, stops)) - 1  # characters before a piece that a match ending in it can use
        self._tail = ""  # the last `_max_overlap` characters

    def feed(self, piece: str, *, may_stop: bool) -> bool:
        """Take in a piece; True when a stop string completes in it.

        With `may_stop=False` (fewer than `min_tokens` are out) a match that completes in this piece does not count, now
        or later; one that begins here and completes later does.
        """
        window = self._tail + piece
        if may_stop and self._find(window):
            self.num_held = 0
            return True
        self.num_held = max(_overlap(window, stop) for stop in self._stops)
        self._tail = window[-self._max_overlap :] if self._max_overlap else ""
        return False

    def _find(self, window: str) -> bool:
        best: tuple[int, int] | None = None  # end, start
        for stop in self._stops:
            # Only matches that end inside the new piece: the others have been decided.
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        if best is None:
            return False
        end, start = best
        self.fired, self.num_behind = window[start:end], len(window) - end
        return True


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
