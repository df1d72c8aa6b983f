"""The text of one answer while its tokens arrive, ended by stop strings.

Rules, the same for a stream and for a whole answer (which is the collected stream):

- The text is the UTF-8 reading of the tokens' bytes. Bytes that may still become a character are held back; when the
  answer ends, they become one U+FFFD. Bytes that can no longer become one are U+FFFD at once.
- A special token is text only if `skip_special_tokens` is off; that goes for the one that ends the answer, too. Those
  in `shown_special_token_ids` are text in any case, unless they end the answer.
- A stop token that is ordinary text is cut from the text, unless `include_stop_str_in_output`.
- A stop string ends the text before it (after it, if included); the tokens up to the one that completed it count. A
  match that is complete before min_tokens tokens are out does not end the answer, then or later.
"""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.tokenizer.stop_strings import StopChecker
from octavo.tokenizer.text_stream import open_text_stream
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.sampling_params import SamplingParams


class TextDelta(NamedTuple):
    """What one update adds."""

    text: str  # new text that may be shown
    num_tokens: int  # how many of the new ids belong to the answer: fewer than given when a stop string fired early
    stop: str | None = None  # the stop string that fired; the answer ends here


class IncrementalDetokenizer:
    """Text, stop strings and token count of one answer.

    `tokenizer` None or `params.detokenize` off: there is no text, and ids are only counted.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams):
        self.num_tokens = 0
        self._params = params
        self._chunks: list[str] = []
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._special_ids: frozenset[int] = frozenset()
        self._stream = None
        if tokenizer is not None and params.detokenize:
            self._special_ids = tokenizer.special_ids
            self._stream = open_text_stream(
                tokenizer,
                prompt_token_ids,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
                params.shown_special_token_ids or (),
            )

    @property
    def text(self) -> str:
        """All text shown so far."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return self._chunks[0] if self._chunks else ""

    def update(self, new_token_ids: Sequence[int], finished: bool, stopped_by_token: bool = False) -> TextDelta:
        """Take the ids of one step.

        `finished`: no more will come. `stopped_by_token`: the last id is the EOS or stop token that ended the answer.
        When the returned `stop` is set, the answer ended at that stop string, whatever else the step said.
        """
        if self._stream is None:
            self.num_tokens += len(new_token_ids)
            return TextDelta("", len(new_token_ids))
        shown = new_token_ids
        if stopped_by_token and self._hides_stop_token(new_token_ids[-1]):
            shown = new_token_ids[:-1]
        if self._checker is not None:
            delta = self._update_until_stop(self._checker, shown, len(new_token_ids), finished)
        else:
            text = self._stream.append(shown)
            delta = TextDelta(text + self._stream.flush() if finished else text, len(new_token_ids))
        self.num_tokens += delta.num_tokens
        if delta.text:
            self._chunks.append(delta.text)
        return delta

    def _hides_stop_token(self, token_id: int) -> bool:
        """Whether the token that ended the answer is left out of the text."""
        if token_id in self._special_ids:
            return self._params.skip_special_tokens
        return not self._params.include_stop_str_in_output

    def _update_until_stop(self, checker: StopChecker, shown: Sequence[int], num_new: int, finished: bool) -> TextDelta:
        """Go token by token, to know which one completes a stop string."""
        assert self._stream is not None
        text = ""
        for count, token_id in enumerate(shown, 1):
            may_stop = self.num_tokens + count >= self._params.min_tokens
            released, stop = checker.push(self._stream.append([token_id]), may_stop)
            text += released
            if stop is not None:
                return TextDelta(text, count, stop)
        if finished:
            may_stop = self.num_tokens + num_new >= self._params.min_tokens
            released, stop = checker.push(self._stream.flush(), may_stop)
            text += released
            if stop is not None:
                return TextDelta(text, num_new, stop)
            text += checker.flush()
        return TextDelta(text, num_new)
