"""The requests of one front, as long as their clients may hear of them.

`Choice` is one of a request's n answers and takes in what the core says; `OpenRequest` is what a client asked for and
waits on. Outputs are not queued: `take` builds one from whatever is new since the last, so that a slow reader finds its
deltas merged and costs no memory beyond the answer itself.

A choice keeps its `EngineRequest` and every token id it got: that is all it takes to hand it to another core.
"""

import asyncio
from collections.abc import Callable

import msgspec

from octavo.engine.stats import FinishedRequest
from octavo.errors import OctavoError
from octavo.tokenizer.detokenizer import IncrementalDetokenizer
from octavo.types.outputs import (
    CompletionOutput,
    EngineOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from octavo.types.request import EngineRequest
from octavo.types.sampling_params import RequestOutputKind

TokenText = Callable[[int], str]


class Choice:
    """One answer in the making."""

    def __init__(self, request: EngineRequest, text: IncrementalDetokenizer, token_text: TokenText | None):
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_earlier_preemptions = 0  # by cores that are gone
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self._text = text
        self._new_text: list[str] = []  # not handed over yet
        self._token_text = token_text
        params = request.sampling_params
        self._stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_token_ids)}
        wants_logprobs = params.logprobs is not None
        self._cumulative_logprob = 0.0 if wants_logprobs else None
        # Of a delta stream, only what was not handed over yet.
        self._logprobs: list[PositionLogprobs] | None = [] if wants_logprobs else None
        self._num_taken = 0  # tokens in the outputs taken so far
        self._is_end_taken = False

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_new(self) -> int:
        """Tokens that no output has shown yet."""
        return len(self.token_ids) - self._num_taken

    @property
    def has_news(self) -> bool:
        return len(self.token_ids) > self._num_taken or (self.finish_reason is not None and not self._is_end_taken)

    def append(self, output: EngineOutput) -> bool:
        """Take in one step's share; True when a stop string ended the answer, of which the core does not know."""
        token_ids, reason = output.new_token_ids, output.finish_reason
        delta = self._text.update(
            token_ids,
            finished=reason is not None,
            # A grammar that is complete ends an answer behind its last token, without a stop token.
            stopped_by_token=reason is FinishReason.STOP and bool(token_ids) and token_ids[-1] in self._stop_ids,
        )
        if delta.text:
            self._new_text.append(delta.text)
        self.token_ids += token_ids if delta.stop is None else token_ids[: delta.num_tokens]
        if self._logprobs is not None and output.logprobs is not None:
            self._append_logprobs(self._logprobs, output.logprobs[: delta.num_tokens])
        if delta.stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, delta.stop
            return True
        self.finish_reason, self.stop_reason = reason, output.stop_reason
        return False

    def resubmission(self, *, wants_prompt_logprobs: bool) -> EngineRequest:
        """The request that makes another core go on where this answer is."""
        params = self.request.sampling_params
        if params.prompt_logprobs is not None and not wants_prompt_logprobs:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request, sampling_params=params, output_token_ids=self.token_ids.copy(), is_admitted=True
        )

    def finish(self, reason: FinishReason) -> None:
        """End an answer that goes on; text that was held back comes out, unless the answer failed."""
        assert not self.is_finished
        self.finish_reason = reason
        if reason is not FinishReason.ERROR:
            self._new_text.append(self._text.update([], finished=True).text)

    def take(self, *, delta: bool) -> CompletionOutput:
        """What the client has not seen (`delta`), or all there is."""
        text = "".join(self._new_text) if delta else self._text.text
        self._new_text.clear()
        token_ids = self.token_ids[self._num_taken :] if delta else self.token_ids.copy()
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = [] if delta else logprobs.copy()
        self._num_taken = len(self.token_ids)
        self._is_end_taken = self.is_finished
        return CompletionOutput(
            index=self.request.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )

    def summarize(self, n: int, now: float) -> FinishedRequest:
        """The numbers of an answer that ended at `now`; phases it did not reach count 0."""
        arrival = self.request.arrival_time
        scheduled = self.first_scheduled_time if self.first_scheduled_time is not None else now
        first = self.first_token_time if self.first_token_time is not None else now
        last = self.last_token_time if self.last_token_time is not None else first
        return FinishedRequest(
            finish_reason=str(self.finish_reason),
            index=self.request.index,
            n=n,
            max_tokens=self.request.sampling_params.max_tokens,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_generation_tokens=len(self.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            e2e_seconds=now - arrival,
            queue_seconds=scheduled - arrival,
            prefill_seconds=max(0.0, first - scheduled),
            decode_seconds=last - first,
            inference_seconds=max(0.0, last - scheduled),
        )

    def _append_logprobs(self, logprobs: list[PositionLogprobs], entries: list[TokenLogprobs]) -> None:
        assert self._cumulative_logprob is not None
        for entry in entries:
            logprobs.append(to_position_logprobs(entry, self._token_text))
            self._cumulative_logprob += entry.logprobs[0]


class OpenRequest:
    """What a client asked for: n choices and a way to wait for news of them."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        choices: list[Choice],
        token_text: TokenText | None,
        stream_interval: int,
        encoder_prompt: str | None = None,
    ):
        params = choices[0].request.sampling_params
        self.request_id = request_id
        self.choices = choices
        self.error: OctavoError | None = None
        self._prompt, self._encoder_prompt = prompt, encoder_prompt
        self._token_text = token_text
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._interval = max(stream_interval, params.stream_interval or 1)
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._num_open = len(choices)
        self._news = asyncio.Event()
        self.metrics = RequestMetrics(choices[0].request.arrival_time)  # goes on with the request, in every output

    @property
    def has_news(self) -> bool:
        """Whether `take` has something that the client should see now."""
        return self._news.is_set()

    @property
    def is_finished(self) -> bool:
        return self._num_open == 0

    def append(self, choice: Choice, output: EngineOutput) -> bool:
        """Take in one choice's share of a step; True when a stop string ended it, of which the core does not know."""
        if output.prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs += [to_position_logprobs(entry, self._token_text) for entry in output.prompt_logprobs]
        is_first = not choice.token_ids
        stopped = choice.append(output)
        if choice.finish_reason is not None:
            self._num_open -= 1
            has_news = self._num_open == 0 or not self._is_final_only
        elif self._is_final_only:
            has_news = False
        else:
            num_new = choice.num_new
            has_news = num_new >= self._interval or (is_first and num_new > 0)
        if has_news:
            self._news.set()
        return stopped

    def end(self, error: OctavoError | None = None) -> None:
        """End every choice that is open: aborted, or failed with an error that `wait` raises."""
        self.error = error
        for choice in self.choices:
            if not choice.is_finished:
                choice.finish(FinishReason.ABORT if error is None else FinishReason.ERROR)
        self._num_open = 0
        self._news.set()

    def resubmission(self, choice: Choice) -> EngineRequest:
        """What another core must get to go on with one of the choices. Scores of the prompt are asked for once."""
        return choice.resubmission(wants_prompt_logprobs=self._wants_prompt_logprobs)

    def on_core_lost(self) -> None:
        """The next core starts over with what the last one had told in part or counted from its own start."""
        if self._wants_prompt_logprobs:
            self._prompt_logprobs = [None]
        for choice in self.choices:
            choice.num_earlier_preemptions = choice.num_preemptions

    @property
    def _wants_prompt_logprobs(self) -> bool:
        """Whether scores of the prompt are still to come."""
        scores = self._prompt_logprobs
        return scores is not None and len(scores) < len(self.choices[0].request.prompt_token_ids)

    async def wait(self) -> None:
        """Return when `take` has something new; raises what went wrong with the request."""
        await self._news.wait()
        if self.error is not None:
            raise self.error

    def take(self) -> RequestOutput:
        """What the client has not seen (delta), or all there is (cumulative, final)."""
        self._news.clear()
        is_delta = self._is_delta
        first = self.choices[0]
        encoder_input = first.request.encoder_input
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=first.request.prompt_token_ids,
            outputs=[choice.take(delta=is_delta) for choice in self.choices if not is_delta or choice.has_news],
            finished=self._num_open == 0,
            prompt_logprobs=self._take_prompt_logprobs(),
            metrics=self.metrics,
            num_cached_tokens=first.num_cached_tokens,
            error=None if self.error is None else str(self.error),
            encoder_prompt=self._encoder_prompt,
            encoder_prompt_token_ids=None if encoder_input is None else encoder_input.token_ids,
        )

    def _take_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """The scores of the prompt once they are complete; in a delta stream, once."""
        scores = self._prompt_logprobs
        if scores is None or self._wants_prompt_logprobs:
            return None
        if self._is_delta:
            self._prompt_logprobs = None
        return scores


def to_position_logprobs(entry: TokenLogprobs, token_text: TokenText | None) -> PositionLogprobs:
    """One position as users see it: the chosen token first, then the most likely ones that are not it."""
    position: PositionLogprobs = {}
    for rank, token_id in enumerate(entry.token_ids):
        if token_id not in position:
            text = token_text(token_id) if token_text is not None else None
            position[token_id] = Logprob(entry.logprobs[rank], rank or entry.rank, text)
    return position
