"""Who runs, and how much of it, in each step: `schedule` before, `update` after.

One token budget a step, no phases. In order:

1. running requests that need one token (decodes), best first;
2. running requests that need more (the rest of a prompt, or of a preempted request), best first, in chunks;
3. waiting requests, best first, while nobody was short of blocks in this step. The first that does not fit ends the
   search: nobody is overtaken.

Decodes go before chunks so that a long prompt never makes a stream wait for the budget. "Best first" is arrival
(fcfs), or priority, improved by waiting, and then arrival; `_running` is kept in this order.

**Short of blocks.** A request takes blocks from the worst one that is worse than itself and not yet in this step, by
preempting it: its blocks and row go, its tokens stay, and it is computed again from the front of the queue. When
there is none, it keeps what it has and sits out the step. So nobody is ever preempted by a worse request, and the
best one always gets on. A resumed request is protected until it is past where it was; it was admitted with all blocks
for that reserved. A request is admitted only with blocks for its whole prompt in sight and, if others run, one more
for each of them.

Under "priority" a waiting request may also preempt running ones of worse priority when rows or blocks are all that keep
it out.

**Several steps in flight.** `schedule` may be called again before `update`. A token that is being sampled counts in
`Request.num_tokens` although nobody knows it yet; the worker has it in the row. Steps run in order, so blocks and rows
freed now may go to the next step even while an older one still uses them. A request that turns out to have ended leaves
behind a token or two in flight, which `update` drops. A preempted request still gets its tokens in flight, and waits
until they are in before it is resumed.

**Grammars.** A request that follows one waits until it is compiled (grammar_gate), and from then on is like any other,
except that the steps which sample it await masks.

What does not belong here: what a KV group keeps (group_managers), how blocks are found and counted (kv_cache_manager),
anything about text, sampling or devices.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from octavo.config.engine import CacheConfig, SchedulerConfig
from octavo.errors import ClientError
from octavo.logger import get_logger
from octavo.scheduler.admission import check_config, check_queue, check_request
from octavo.scheduler.grammar_gate import GrammarGate
from octavo.scheduler.kv_cache_manager import KVCacheManager, PrefixHit
from octavo.scheduler.queue import RequestQueue
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.step_builder import StepBuilder
from octavo.structured_output.grammar import GrammarError
from octavo.structured_output.manager import GrammarManager
from octavo.types.kv_spec import KVCacheConfig
from octavo.types.outputs import EngineOutput, FinishReason, TokenLogprobs
from octavo.types.request import EngineRequest
from octavo.types.stats import SchedulerStats
from octavo.types.step import ModelRunnerOutput, NewRow, SchedulerOutput, TokenMasks

logger = get_logger(__name__)

_by_order = attrgetter("order")


class Scheduler:
    """Owns the queue, the running requests, the rows and the KV blocks.

    Not thread-safe: one thread calls everything.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_cache_config: KVCacheConfig,
        grammars: GrammarManager | None = None,
    ):
        """`grammars` None: no request follows one."""
        config = scheduler_config
        check_config(config)
        self._config = config
        self._has_priorities = config.policy == "priority"
        self._kv = KVCacheManager(
            kv_cache_config,
            max_chunk=config.max_num_batched_tokens,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            max_encoder_len=config.max_encoder_len,
        )
        # Where every request ends at the latest. Its last token is sampled, not computed, and needs no slot.
        self._pool_tokens = self._kv.max_request_tokens(config.max_model_len)
        self.max_total_tokens = min(config.max_model_len, self._pool_tokens + 1)
        if self.max_total_tokens < config.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, less than max_model_len=%d: answers end there, with reason 'length'",
                self._pool_tokens,
                config.max_model_len,
            )
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._grammars = GrammarGate(grammars)
        self._num_grammar_rows = 0  # running requests that follow a grammar
        self._waiting = RequestQueue()
        self._running: list[Request] = []
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._freed_rows: list[int] = []  # not yet told to the worker
        self._in_flight: deque[tuple[int, list[Request]]] = (
            deque()
        )  # steps without a result, their requests in row order
        self._last_step_issued = -1
        self._last_step_done = -1
        self._num_arrivals = 0
        self._stats = SchedulerStats()

    # ---- what the core asks for

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._grammars)

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._grammars)

    def has_unfinished(self) -> bool:
        """Whether any request is still owed tokens."""
        return bool(self._requests)

    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request. One that can never run, or whose queue is full, is refused with a `ClientError`."""
        if engine_request.request_id in self._requests:
            raise ClientError(
                f"request id {engine_request.request_id!r} is in use; choose another.", param="request_id"
            )
        check_request(engine_request, self._config, self._pool_tokens)
        num_tokens = self._waiting.num_prompt_tokens + self._grammars.num_prompt_tokens
        check_queue(engine_request, self._config, self.num_waiting, num_tokens)
        priority = self._rank(engine_request) if self._has_priorities else 0.0
        request = Request(engine_request, self._num_arrivals, priority, self.max_total_tokens, self._kv.num_tables)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        if request.sampling_params.structured_outputs is None:
            self._waiting.push(request)
        else:
            self._grammars.hold(request, engine_request)

    def take_compiled(self) -> list[EngineOutput]:
        """Queue the requests whose grammar has become ready; those for which there is none end with an error."""
        outputs = []
        for request, error in self._grammars.release():
            self._waiting.push(request)
            if error is not None:
                outputs.append(self._fail(request, str(error), type(error).__name__))
        return outputs

    def wait_for_grammar(self, seconds: float) -> None:
        """Return as soon as `take_compiled` has something to do, or the time is over."""
        self._grammars.wait(seconds)

    def masks(self, step: SchedulerOutput) -> TokenMasks:
        """What the rows of the step issued last may sample; it is the only one without a result."""
        step_id, requests = self._in_flight[-1]
        assert step_id == step.step_id and len(self._in_flight) == 1
        return self._grammars.masks(step, requests)

    def _rank(self, request: EngineRequest) -> float:
        """Priority with ageing, smaller first.

        A priority that falls by one level every `priority_aging_seconds` of waiting orders any two requests alike at all
        times: by priority × seconds + arrival. So ageing is a number given once, not work in the queue.
        """
        seconds = self._config.priority_aging_seconds
        return request.priority * seconds + request.arrival_time if seconds else float(request.priority)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests; each that was not finished gets a last output.

        Unknown ids are passed over: they just finished.
        """
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request)
                outputs.append(self._make_output(request, [], FinishReason.ABORT))
        self._sweep_running()
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while blocks are in use."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """The state now, and the counts since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running = len(self._running)
        stats.num_waiting = self.num_waiting
        stats.kv_cache_usage = self._kv.usage
        return stats

    def check_invariants(self) -> None:
        """Check all accounting; an AssertionError says what is wrong."""
        self._kv.check_invariants(self._running)
        assert [r.order for r in self._running] == sorted(r.order for r in self._running), "running is out of order"
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting)
        assert len(self._running) + len(waiting) + len(self._grammars) == len(self._requests)
        for request in self._running:
            assert request.status == RequestStatus.RUNNING and self._requests[request.request_id] is request
            assert 0 <= request.num_computed_tokens <= request.num_tokens
        for request in waiting:
            assert request.status == RequestStatus.WAITING and self._requests[request.request_id] is request
            assert request.row == -1 and not any(request.block_ids) and request.num_reserved_blocks == 0
        assert self._num_grammar_rows == sum(request.grammar is not None for request in self._running)
        rows = sorted(self._free_rows + [r.row for r in self._running])
        assert rows == list(range(self._config.max_num_seqs)), f"rows are lost or doubled: {rows}"
        num_in_flight = {r.request_id: 0 for r in self._requests.values()}
        for _, requests in self._in_flight:
            for request in requests:
                if not request.is_finished:
                    num_in_flight[request.request_id] += 1
        for request in self._requests.values():
            assert 0 <= request.num_tokens - len(request.token_ids) <= num_in_flight[request.request_id]

    @property
    def holds_nothing(self) -> bool:
        """Whether all that is lent to requests is back, by the counters: what `check_idle` proves by looking at every block."""
        pool = self._kv.pool
        return (
            not self._requests
            and pool.num_free == pool.num_usable
            and len(self._free_rows) == self._config.max_num_seqs
        )

    def check_idle(self) -> None:
        """Check that nothing is held while no request is open."""
        assert not self._requests, f"{len(self._requests)} requests are open"
        self.check_invariants()
        assert self._kv.pool.num_free == self._kv.pool.num_usable, (
            f"{self._kv.pool.num_usable - self._kv.pool.num_free} KV blocks are held by nobody"
        )

    # ---- before a step

    def schedule(self) -> SchedulerOutput | None:
        """Put the next step together; None when no request can do anything before the results of older steps are in."""
        step = StepBuilder(self._last_step_issued + 1, self._config.max_num_batched_tokens)
        if self._has_priorities and self._waiting and self._running:
            self._make_room_for_better()
        catching_up = self._schedule_decodes(step)
        if catching_up:
            self._schedule_chunks(step, catching_up)
        if self._waiting and not step.is_short:
            self._admit(step)
        if step.is_empty:
            return None
        self._last_step_issued = step.step_id
        self._in_flight.append((step.step_id, step.requests + step.chunk_requests))
        freed_rows, self._freed_rows = self._freed_rows, []
        return step.build(freed_rows, self._num_grammar_rows > 0)

    def _schedule_decodes(self, step: StepBuilder) -> list[Request]:
        """Schedule the running requests that need one token; return those that need more, in order."""
        catching_up = []
        requests, rows = step.requests, step.rows
        # Preemption may shorten the list during the walk, but only behind the current request.
        for request in self._running:
            num_tokens = request.num_tokens
            if num_tokens <= request.steady_until:
                request.num_computed_tokens = num_tokens
                request.num_tokens = num_tokens + 1
            else:
                num_new = num_tokens - request.num_computed_tokens
                if num_tokens >= request.max_total_tokens:
                    # Either its last token is in flight, or it only wants its prompt computed.
                    if num_new > 0 and num_tokens == len(request.token_ids):
                        catching_up.append(request)
                    continue
                if num_new > 1:
                    catching_up.append(request)
                    continue
                if not self._take_blocks(step, request, 1):
                    continue
                self._advance(step.step_id, request, 1)
            requests.append(request)
            rows.append(request.row)
        step.samples = [True] * len(rows)
        step.budget -= len(rows)
        return catching_up

    def _schedule_chunks(self, step: StepBuilder, catching_up: list[Request]) -> None:
        is_contended = len(catching_up) + len(self._waiting) > 1
        for request in catching_up:
            if request.status != RequestStatus.RUNNING:
                continue  # preempted for one before it
            num_new = request.num_tokens - request.num_computed_tokens
            size = self._chunk_size(num_new, step.budget, is_contended)
            if size and self._take_blocks(step, request, size):
                step.add(request, size, self._advance(step.step_id, request, size))

    def _admit(self, step: StepBuilder) -> None:
        """Start or resume waiting requests, best first, until one does not fit."""
        while self._waiting and self._free_rows:
            request = self._waiting.peek()
            if request.resumable_after_step > self._last_step_done:
                return
            if self._num_blocks_to_spare <= 0:
                return
            hit = self._kv.find_prefix(request)
            is_contended = len(self._waiting) > 1 or bool(step.chunk_requests)
            budget = max(0, step.budget - hit.num_to_encode)
            size = self._chunk_size(request.num_tokens - hit.num_tokens, budget, is_contended)
            if not size or not self._fits(request, hit):
                return
            self._waiting.pop()
            self._start(step, request, size, hit)

    def _start(self, step: StepBuilder, request: Request, size: int, hit: PrefixHit) -> None:
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        self._num_grammar_rows += request.grammar is not None
        request.admitted_step = step.step_id
        request.is_protected = request.num_preemptions > 0
        request.num_prompt_logprobs = 0
        if request.first_scheduled_time == 0.0:
            request.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = hit.num_tokens
        if request.reads_prefix_cache:
            self._stats.prefix_cache_queries += request.num_tokens
            self._stats.prefix_cache_hits += hit.num_tokens
        self._kv.admit(request, size, hit)
        step.budget -= hit.num_to_encode
        self._stats.num_prompt_tokens += hit.num_to_encode
        step.new_rows.append(
            NewRow(
                row=request.row,
                request_id=request.request_id,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=hit.num_tokens,
                sampling_params=request.sampling_params,
                stop_token_ids=sorted(request.stop_token_ids),
                block_ids=[table.copy() for table in request.block_ids],
                pooling_params=request.pooling_params,
                num_encoder_positions=request.num_encoder_positions,
                encoder_input=request.encoder_input if hit.num_to_encode else None,
                prompt_embeds=request.prompt_embeds,
            )
        )
        step.add(request, size, self._advance(step.step_id, request, size))
        insort(self._running, request, key=_by_order)

    def _advance(self, step_id: int, request: Request, num_new_tokens: int) -> bool:
        """Count tokens as computed by this step. Returns whether a token is sampled after them."""
        before = request.num_computed_tokens
        request.num_computed_tokens = num_computed = before + num_new_tokens
        if before < request.num_prompt_tokens:
            self._stats.num_prompt_tokens += min(num_computed, request.num_prompt_tokens) - before
        if num_computed < request.num_tokens:
            return False
        request.is_protected = False
        if request.num_tokens >= request.max_total_tokens:
            request.final_step = step_id
            return False
        request.num_tokens += 1
        request.steady_until = min(self._kv.num_slots(request), request.max_total_tokens - 1)
        return True

    def _chunk_size(self, num_tokens: int, budget: int, is_contended: bool) -> int:
        """How many of `num_tokens` one request computes in this step; 0: none."""
        if not self._config.enable_chunked_prefill:
            return num_tokens if num_tokens <= budget else 0
        threshold = self._config.long_prefill_token_threshold
        if threshold and is_contended:
            num_tokens = min(num_tokens, threshold)
        return min(num_tokens, budget)

    # ---- blocks

    @property
    def _num_blocks_to_spare(self) -> int:
        """Free blocks beyond what running prefills count on and one block in each group for each running request."""
        return self._kv.num_unreserved - len(self._running) * self._kv.num_groups

    def _fits(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a waiting request can be admitted without soon being preempted."""
        return self._kv.num_blocks_to_admit(request, hit) <= self._num_blocks_to_spare

    def _take_blocks(self, step: StepBuilder, request: Request, num_new_tokens: int) -> bool:
        """Make slots for the next tokens of a running request, from worse requests if need be."""
        while (new_blocks := self._kv.allocate(request, num_new_tokens)) is None:
            step.is_short = True
            victim = self._find_victim(step, request)
            if victim is None:
                # A protected request that does not get on must not stand in the way of better ones.
                request.is_protected = False
                return False
            self._preempt(victim)
        step.new_blocks += new_blocks
        return True

    def _find_victim(self, step: StepBuilder, request: Request) -> Request | None:
        """The worst running request that is worse than `request`, not protected, and not in this step."""
        for victim in reversed(self._running):
            if victim is request:
                return None
            if not victim.is_protected and not step.holds(victim):
                return victim
        raise AssertionError(f"request {request.request_id} does not run")

    def _make_room_for_better(self) -> None:
        """Preempt running requests of worse priority for the best waiting one, if that lets it in."""
        waiting = self._waiting.peek()
        if self._running[-1].priority <= waiting.priority or waiting.resumable_after_step > self._last_step_done:
            return
        victims = [r for r in self._running if r.priority > waiting.priority and not r.is_protected]
        hit = self._kv.find_prefix(waiting)
        num_to_gain = sum(self._kv.num_blocks_held(r) + r.num_reserved_blocks + self._kv.num_groups for r in victims)
        if self._kv.num_blocks_to_admit(waiting, hit) > self._num_blocks_to_spare + num_to_gain:
            return
        while victims and (not self._free_rows or not self._fits(waiting, hit)):
            self._preempt(victims.pop())

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue, without its row and blocks."""
        self._running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.is_protected = False
        request.num_preemptions += 1
        request.resumable_after_step = self._last_step_issued
        self._waiting.push(request)
        self._stats.num_preemptions += 1

    def preempt_all(self) -> None:
        """Send everything that runs back to the queue: the cache is about to go. No step may be in flight."""
        for request in self._running[::-1]:
            self._preempt(request)

    def _release(self, request: Request) -> None:
        self._kv.free(request)
        self._num_grammar_rows -= request.grammar is not None
        self._free_rows.append(request.row)
        self._freed_rows.append(request.row)
        request.row = -1
        request.is_steady = False
        request.steady_until = 0

    # ---- after a step

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in the result of the oldest step in flight, end what has ended, and say what is new."""
        step_id, requests = self._in_flight.popleft()
        assert step_id == step.step_id == result.step_id, f"result of step {result.step_id}, expected {step_id}"
        self._last_step_done = step_id
        outputs = self._fail_rows(step_id, requests, result.errors) if result.errors else []
        num_generated = 0
        for request, token_ids, index in zip(requests, result.sampled_token_ids, range(len(requests)), strict=True):
            if request.is_steady and len(token_ids) == 1:
                token_id = token_ids[0]
                # num_tokens counts this token already, and possibly one that is still in flight.
                if token_id not in request.stop_token_ids and request.num_tokens < request.max_total_tokens:
                    request.token_ids.append(token_id)
                    outputs.append(EngineOutput(request.request_id, token_ids))
                    num_generated += 1
                    continue
            if not request.is_finished and request.discard_through_step < step_id:
                assert token_ids or not step.samples[index], f"step {step_id} sampled nothing for {request.request_id}"
                output = self._settle(request, index, result)
                if output is not None:
                    outputs.append(output)
                    num_generated += len(output.new_token_ids)
        self._stats.num_generation_tokens += num_generated
        self._sweep_running()
        return outputs

    def _settle(self, request: Request, index: int, result: ModelRunnerOutput) -> EngineOutput | None:
        """Apply one row's result in full: any number of tokens, log probabilities, stops. None: nothing to say."""
        token_ids = result.sampled_token_ids[index]
        reason: FinishReason | None = None
        stop_reason: int | None = None
        if token_ids:
            count, reason, stop_reason = request.find_stop(token_ids)
            if request.grammar is not None:
                try:
                    count, reason = request.follow_grammar(token_ids[:count], reason)
                except GrammarError as error:
                    return self._fail(request, str(error))
            token_ids = token_ids[:count]
            request.token_ids += token_ids
            request.num_tokens += count - 1  # one was counted when it was scheduled
            if count > 1:
                request.steady_until = 0
        elif request.final_step == result.step_id:
            reason = FinishReason.LENGTH if request.pooling_params is None else FinishReason.STOP
        logprobs = result.logprobs.get(index) if result.logprobs else None
        prompt_logprobs = result.prompt_logprobs.get(index) if result.prompt_logprobs else None
        if prompt_logprobs:
            prompt_logprobs = self._new_prompt_logprobs(request, prompt_logprobs)
        if reason is not None:
            self._finish(request)
        elif not token_ids and not prompt_logprobs:
            return None
        elif token_ids:
            is_running = request.status == RequestStatus.RUNNING
            is_plain = request.sampling_params.logprobs is None and request.grammar is None
            request.is_steady = is_running and is_plain
        output = self._make_output(request, token_ids, reason)
        output.stop_reason = stop_reason
        output.logprobs = logprobs[: len(token_ids)] if logprobs else None
        output.prompt_logprobs = prompt_logprobs or None
        output.pooled = result.pooled.get(index) if result.pooled else None
        return output

    def _new_prompt_logprobs(self, request: Request, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Of the scores of one chunk, those the client has not got: a resumed prompt is scored again from its start."""
        start = request.num_prompt_logprobs
        request.num_prompt_logprobs = end = start + len(entries)
        fresh = entries[max(0, request.num_prompt_logprobs_sent - start) :]
        request.num_prompt_logprobs_sent = max(end, request.num_prompt_logprobs_sent)
        return fresh

    def _make_output(self, request: Request, token_ids: list[int], reason: FinishReason | None) -> EngineOutput:
        is_first, request.was_announced = not request.was_announced, True
        return EngineOutput(
            request.request_id,
            token_ids,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            queued_time=request.first_scheduled_time if is_first else 0.0,
        )

    def _finish(self, request: Request) -> None:
        """Let go of a request. The caller sweeps `_running` once it is done finishing."""
        if request.status == RequestStatus.RUNNING:
            self._release(request)
        elif request in self._grammars:
            self._grammars.drop(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _fail(self, request: Request, message: str, kind: str | None = None) -> EngineOutput:
        """End a request with an error; `kind` as in `EngineOutput.error_kind`."""
        self._finish(request)
        output = self._make_output(request, [], FinishReason.ERROR)
        output.error, output.error_kind = message, kind
        return output

    def _sweep_running(self) -> None:
        if len(self._running) + self.num_waiting != len(self._requests):
            self._running = [r for r in self._running if r.status == RequestStatus.RUNNING]

    def _fail_rows(self, step_id: int, requests: Sequence[Request], errors: dict[int, str]) -> list[EngineOutput]:
        """End the requests whose rows failed, and make sure that nobody goes on from what they left in the cache."""
        outputs = []
        doubtful_roots = set()
        for index, message in errors.items():
            request = requests[index]
            if request.discard_through_step >= step_id:
                continue
            if not request.is_finished:
                if request.grammar is not None and request.grammar.error is not None:
                    message = request.grammar.error
                outputs.append(self._fail(request, message))
            self._kv.withdraw(request)
            doubtful_roots.update(request.block_names[:1] + request.encoder_names[:1])
        for request in list(self._requests.values()):
            # Admitted in the failed step or later, from a prefix that a failed row may have filled: start over.
            if request.admitted_step >= step_id and not doubtful_roots.isdisjoint(_shared_roots(request)):
                if request.status == RequestStatus.RUNNING:
                    self._preempt(request)
                self._kv.withdraw(request)
                request.discard_through_step = self._last_step_issued
                request.num_tokens = len(request.token_ids)
        return outputs


def _shared_roots(request: Request) -> list[bytes]:
    """The first names of what a running request may have from others: its prefix, and its encoder's output."""
    return request.block_names[: 1 if request.num_prefix_tokens else 0] + request.encoder_names[:1]
