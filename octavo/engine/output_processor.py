"""From the core's outputs to what clients wait for: ids to text, stop strings, log probabilities, statistics.

Nothing here waits and nothing here sends: whoever drives it passes on the aborts it asks for.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.engine.open_pooling import OpenPooling
from octavo.engine.open_request import Choice, OpenRequest
from octavo.engine.protocol import RemoteError
from octavo.engine.stats import IterationStats
from octavo.errors import OctavoError, RequestFailedError
from octavo.logger import get_logger
from octavo.tokenizer.detokenizer import IncrementalDetokenizer
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.outputs import EngineOutput, EngineOutputs, FinishReason
from octavo.types.request import EngineRequest

logger = get_logger(__name__)


@dataclass(slots=True)
class Processed:
    """What one message from the core meant."""

    stats: IterationStats = field(default_factory=IterationStats)
    updated: dict[OpenRequest, None] = field(default_factory=dict)  # those with news for their readers, each once
    finished: list[OpenRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)  # engine ids that the core computes for nobody now


class OutputProcessor:
    """Owns every open request of one front."""

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1):
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._requests: dict[str, list[OpenRequest]] = {}  # by the caller's id, which need not be unique
        self._choices: dict[str, tuple[OpenRequest, Choice]] = {}  # the unfinished ones, by engine id

    @property
    def num_unfinished(self) -> int:
        """Requests that are open."""
        return sum(map(len, self._requests.values()))

    def add(
        self,
        request_id: str,
        prompt: str | None,
        engine_requests: list[EngineRequest],
        encoder_prompt: str | None = None,
    ) -> OpenRequest:
        """Open a request whose choices are `engine_requests`, under ids that no other open request uses."""
        token_text = None if self._tokenizer is None else self._tokenizer.token_text
        choices = []
        for engine_request in engine_requests:
            prompt_token_ids, params = engine_request.prompt_token_ids, engine_request.sampling_params
            text = IncrementalDetokenizer(self._tokenizer, prompt_token_ids, params)
            choices.append(Choice(engine_request, text, token_text))
        kind = OpenRequest if engine_requests[0].pooling_params is None else OpenPooling
        request = kind(request_id, prompt, choices, token_text, self._stream_interval, encoder_prompt)
        for choice in choices:
            assert choice.request.request_id not in self._choices
            self._choices[choice.request.request_id] = (request, choice)
        self._requests.setdefault(request_id, []).append(request)
        return request

    def process(self, outputs: EngineOutputs) -> Processed:
        """Take in one message from the core."""
        processed = Processed()
        now = outputs.timestamp
        for output in outputs.outputs:
            known = self._choices.get(output.request_id)
            if known is None:
                continue  # it ended here before the core heard of it
            request, choice = known
            if output.finish_reason is FinishReason.ERROR:
                self._end(request, processed, now, _to_exception(output))
                continue
            num_known = len(choice.token_ids)
            try:
                if request.append(choice, output):
                    processed.aborts.append(output.request_id)
            except Exception as error:
                # A fault in one answer's text must not cost the others of this step their tokens.
                logger.exception("request %s failed", request.request_id)
                self._end(request, processed, now, RequestFailedError(f"its output cannot be read: {error!r}"))
                continue
            self._count(processed.stats, request, choice, output, len(choice.token_ids) - num_known, now)
            if request.has_news:
                processed.updated[request] = None
            if choice.finish_reason is not None:
                self._close(request, choice, processed, now)
        return processed

    def abort(self, request_ids: Iterable[str]) -> Processed:
        """End all requests of these names: their readers get a last output with finish reason `abort`."""
        processed = Processed()
        for request in [request for request_id in request_ids for request in self._requests.get(request_id, ())]:
            self._end(request, processed, time.monotonic())
        return processed

    def abort_request(self, request: OpenRequest) -> Processed:
        """End one request; nothing happens when it is finished."""
        processed = Processed()
        if not request.is_finished:
            self._end(request, processed, time.monotonic())
        return processed

    def abort_all(self) -> Processed:
        """End every request."""
        return self.abort(list(self._requests))

    def fail_all(self, error: OctavoError) -> Processed:
        """The core is gone: every reader gets `error`."""
        processed = Processed()
        for request in [request for same_name in self._requests.values() for request in same_name]:
            self._end(request, processed, time.monotonic(), error)
        return processed

    # When a core is lost

    def on_core_lost(self) -> None:
        """Make every open request ready to be resubmitted."""
        for request in [request for same_name in self._requests.values() for request in same_name]:
            request.on_core_lost()

    def progress(self) -> dict[str, int]:
        """Tokens of each unfinished choice by engine id, in the order they came."""
        return {engine_id: len(choice.token_ids) for engine_id, (_, choice) in self._choices.items()}

    def resubmissions(self, engine_ids: Iterable[str]) -> list[EngineRequest]:
        """What another core must get to go on with these unfinished choices."""
        known = (self._choices[engine_id] for engine_id in engine_ids)
        return [request.resubmission(choice) for request, choice in known]

    def fail(self, engine_id: str, error: OctavoError) -> Processed:
        """End the request that an unfinished choice belongs to."""
        processed = Processed()
        request, _ = self._choices[engine_id]
        self._end(request, processed, time.monotonic(), error)
        return processed

    def _end(self, request: OpenRequest, processed: Processed, now: float, error: OctavoError | None = None) -> None:
        """The one way a request ends from here: abort it, or fail it with `error`, and have the core forget it."""
        unfinished = [choice for choice in request.choices if not choice.is_finished]
        processed.aborts += [choice.request.request_id for choice in unfinished]
        request.end(error)
        processed.updated[request] = None
        for choice in unfinished:
            self._close(request, choice, processed, now)

    def _close(self, request: OpenRequest, choice: Choice, processed: Processed, now: float) -> None:
        """Forget a choice that has finished, and its request with the last one."""
        del self._choices[choice.request.request_id]
        processed.stats.finished.append(choice.summarize(len(request.choices), now))
        if not any(c.request.request_id in self._choices for c in request.choices):
            processed.finished.append(request)
            same_name = self._requests[request.request_id]
            same_name.remove(request)
            if not same_name:
                del self._requests[request.request_id]

    @staticmethod
    def _count(
        stats: IterationStats, request: OpenRequest, choice: Choice, output: EngineOutput, num_new: int, now: float
    ) -> None:
        """Note what a choice got in this step."""
        metrics = request.metrics
        if output.queued_time and choice.first_scheduled_time is None:
            choice.first_scheduled_time = output.queued_time
            choice.num_cached_tokens = output.num_cached_tokens
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = output.queued_time
        if output.num_preemptions:
            choice.num_preemptions = choice.num_earlier_preemptions + output.num_preemptions
        if output.pooled is not None:
            stats.num_prompt_tokens += choice.request.num_prompt_tokens
            stats.num_cached_tokens += choice.num_cached_tokens
        if not num_new:
            return
        stats.num_generation_tokens += num_new
        if choice.last_token_time is not None:
            stats.inter_token_latency.append(now - choice.last_token_time)
        else:
            choice.first_token_time = now
            stats.time_to_first_token.append(now - choice.request.arrival_time)
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            if choice.request.index == 0:
                stats.num_prompt_tokens += choice.request.num_prompt_tokens
                stats.num_cached_tokens += choice.num_cached_tokens
        choice.last_token_time = metrics.last_token_time = now
        metrics.num_generation_tokens += num_new


def _to_exception(output: EngineOutput) -> OctavoError:
    """The error of a request that the core failed, of the class the core named."""
    message = output.error or "the engine gave no reason"
    return RemoteError(output.error_kind or "RequestFailedError", message).to_exception()
