"""The engine core: the loop that every token passes through.

    step():   schedule ─► execute ─► (the step before) ─► update ─► outputs

With async scheduling two steps are in flight: step n + 1 is scheduled and handed to the executor before the tokens of
step n are known. In lock step one is. Nothing else differs.

What may not go in here: who runs (scheduler), what is computed (worker), text (output processor), sockets and processes
(core_process), and any feature that few requests use: it gets a file of its own and one call from here.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from octavo import envs
from octavo.config.engine import EngineConfig
from octavo.engine.executor import Executor, StepHandle
from octavo.engine.flight_record import FlightRecorder
from octavo.engine.grammars import make_grammar_manager
from octavo.engine.protocol import StartReport
from octavo.engine.sleep import CoreSleep
from octavo.engine.step_ranges import add_step_ranges
from octavo.errors import ClientError, OctavoError, RequestFailedError, ServerError
from octavo.logger import get_logger
from octavo.scheduler.scheduler import Scheduler
from octavo.types.outputs import EngineOutput, EngineOutputs, FinishReason
from octavo.types.request import EngineRequest
from octavo.types.step import ModelRunnerOutput, SchedulerOutput

logger = get_logger(__name__)

# After this many failed steps in a row the fault is not the requests'.
MAX_CONSECUTIVE_FAULTS = 3
# How long the loop looks away from its inputs while all that is open waits for a grammar.
COMPILE_POLL_SECONDS = 0.005


class EngineCore:
    """Owns the scheduler and the executor. Not thread-safe: one thread calls everything."""

    # What a `UtilityCall` may name.
    UTILITIES = frozenset({"reset_prefix_cache", "collective_rpc", "set_paused", "sleep", "wake_up"})

    def __init__(self, config: EngineConfig, executor: Executor, recorder: FlightRecorder | None = None):
        self._executor = executor
        self._recorder = recorder
        start_up = executor.initialize()
        self._grammars = make_grammar_manager(config)
        self._scheduler = Scheduler(config.scheduler, config.cache, start_up.kv_cache_config, self._grammars)
        self._max_in_flight = 2 if config.scheduler.async_scheduling else 1
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._pending: list[EngineOutput] = []  # outputs that no step made: aborts and refusals
        self._wants_stats = not config.observability.disable_log_stats
        self._checks_every_step = envs.OCTAVO_CHECK_INVARIANTS
        self._has_custom_processors = bool(config.model.logits_processors)
        self._is_paused = False
        self._sleep = CoreSleep(executor, self._scheduler)
        add_step_ranges(config, self._scheduler, executor)
        self._num_faults = 0  # in a row
        self._idle_checked = True
        kv = start_up.kv_cache_config
        self.report = StartReport(
            num_blocks=kv.num_blocks,
            block_size=config.cache.block_size,
            kv_cache_bytes=kv.total_bytes,
            memory_plan=start_up.memory_plan,
            seconds=start_up.seconds,
        )
        # What lives from here to the end need not be walked by every collection.
        gc.collect()
        gc.freeze()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return bool(self._in_flight or self._pending) or (not self._is_held and self._scheduler.has_unfinished())

    @property
    def _is_held(self) -> bool:
        """Whether nothing new may run."""
        return self._is_paused or bool(self._sleep.parts)

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests. One that the scheduler refuses is answered with an error; the others are queued."""
        for request in requests:
            try:
                if self._has_custom_processors:
                    self._executor.validate_params(request.sampling_params)
                self._scheduler.add_request(request)
            except ClientError as error:
                self._pending.append(_refuse(request, error))
            except Exception as error:
                logger.exception("request %s cannot be queued", request.request_id)
                self._pending.append(_refuse(request, RequestFailedError(f"it cannot be queued: {error!r}")))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Free what these requests hold; each that was open gets a last output with `FinishReason.ABORT`."""
        self._pending += self._scheduler.abort(request_ids)

    def step(self) -> EngineOutputs | None:
        """Fill the pipeline, wait for its oldest step, return what that step produced; None when nothing happened."""
        self._idle_checked = False
        if self._scheduler.num_compiling:
            self._pending += self._scheduler.take_compiled()
        while self._has_room() and (step := self._scheduler.schedule()) is not None:
            if self._recorder is not None:
                self._recorder.begin(step)
            self._in_flight.append((step, self._launch(step)))
            self._send_masks()
        if self._in_flight:
            self._finish_oldest()
        elif self._scheduler.num_compiling and not self._pending:
            self._scheduler.wait_for_grammar(COMPILE_POLL_SECONDS)
            return None
        elif not self._pending and not self._is_held and self._scheduler.has_unfinished():
            raise ServerError("the scheduler holds unfinished requests but schedules none of them.")
        elif not self._pending:
            return None
        outputs, self._pending = self._pending, []
        stats = self._scheduler.stats() if self._wants_stats else None
        return EngineOutputs(outputs, stats, time.monotonic())

    def _finish_oldest(self) -> None:
        step, handle = self._in_flight.popleft()
        self._pending += self._scheduler.update(step, self._wait(step, handle))
        self._send_masks()
        if self._recorder is not None:
            self._recorder.end(step)
        if self._checks_every_step:
            self._scheduler.check_invariants()

    def on_idle(self) -> None:
        """Nothing is left to do: every KV block must be back. Checked once each time the core falls idle."""
        if self._idle_checked:
            return
        self._idle_checked = True
        if self._scheduler.has_unfinished():
            return  # paused: they keep their blocks
        if self._scheduler.holds_nothing:
            return
        try:
            self._scheduler.check_idle()
        except Exception:
            # A leak hurts nobody yet, and the blocks it lost are better looked for in a log than in an outage.
            if self._checks_every_step:
                raise
            logger.exception("block accounting is wrong while no request is open; please report this")

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False when blocks are in use and the cache was left as it is."""
        return self._scheduler.reset_prefix_cache()

    def set_paused(self, is_paused: bool) -> None:
        """Schedule nothing from now on, or go on. Requests stay where they are; steps in flight end."""
        self._is_paused = is_paused

    def sleep(self, level: int, parts: Sequence[str] | None = None) -> list[str]:
        """Give memory back as `engine/sleep.py` says; returns the parts that sleep. What ran waits in the queue."""
        while self._in_flight:
            self._finish_oldest()
        return self._sleep.begin(level, parts)

    def wake_up(self, tags: Sequence[str] | None = None) -> list[str]:
        """Undo `sleep` for the parts that `tags` name, None: for all; returns those that still sleep."""
        return self._sleep.end(tags)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a worker method on every rank, between two steps."""
        return self._executor.collective_rpc(method, args, kwargs, timeout)

    def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of `UTILITIES` by name."""
        if method not in self.UTILITIES:
            raise ServerError(f"the engine core has no utility {method!r}; it has {sorted(self.UTILITIES)}.")
        return getattr(self, method)(*args, **kwargs)

    def shutdown(self) -> None:
        """Let go of the workers. Open requests are dropped without an output."""
        self._in_flight.clear()
        self._grammars.shutdown()
        self._executor.shutdown()

    def _has_room(self) -> bool:
        return not self._is_held and len(self._in_flight) < self._max_in_flight

    def _launch(self, step: SchedulerOutput) -> StepHandle:
        try:
            return self._executor.execute(step)
        except Exception as error:
            return _FailedStep(error)

    def _send_masks(self) -> None:
        """Let the newest step sample once the tokens of all older ones are known; until then it computes."""
        if len(self._in_flight) != 1 or not self._in_flight[0][0].awaits_masks:
            return
        step, handle = self._in_flight[0]
        if isinstance(handle, _FailedStep):
            return
        try:
            self._executor.sample(self._scheduler.masks(step))
        except Exception as error:
            self._in_flight[0] = step, _FailedStep(error)

    def _wait(self, step: SchedulerOutput, handle: StepHandle) -> ModelRunnerOutput:
        """The step's result. A step that raised fails its own requests, nobody else's, unless the workers are gone."""
        try:
            result = handle.result()
        except Exception as error:
            self._num_faults += 1
            logger.exception("step %d failed with %d requests in it", step.step_id, len(step.rows))
            self._executor.check_health()
            if self._num_faults >= MAX_CONSECUTIVE_FAULTS:
                raise ServerError(f"{self._num_faults} steps in a row failed, the last with: {error!r}") from error
            reason = f"the step that computed this request failed: {error!r}"
            failed = range(len(step.rows))
            return ModelRunnerOutput(step.step_id, [[] for _ in failed], errors=dict.fromkeys(failed, reason))
        self._num_faults = 0
        return result


class _FailedStep:
    """Stands in for a step that could not even be started, so that both kinds of failure meet in one place."""

    def __init__(self, error: Exception):
        self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput:
        raise self._error


def _refuse(request: EngineRequest, error: OctavoError) -> EngineOutput:
    return EngineOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_kind=type(error).__name__,
    )
