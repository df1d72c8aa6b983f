"""`Supervisor`: keeps a core alive for the requests of one front.

It owns the client of the core there is. When the core dies, for whatever reason, or has said nothing for too long, a
new one is started after a pause that grows while restarts bring nothing, and every open request is sent to it as prompt
plus the tokens that its client has. Greedy and seeded answers continue as if nothing had happened: random numbers depend
on (seed, position) alone, and all that clients have seen stays in the front. Requests that arrive meanwhile wait, up to
the limits of the queue. A request that kills cores is found (`quarantine.py`) and failed by name.

Everything here runs on the event loop. Nothing is queued here: who is open, in which order and with which tokens is the
listener's knowledge, asked for when a core is ready for it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from octavo.config.engine import EngineConfig
from octavo.engine.client import ProcessClient
from octavo.engine.protocol import StartReport
from octavo.engine.quarantine import Quarantine
from octavo.engine.spawn import SpawnedCore
from octavo.errors import EngineDeadError, EngineRestartingError, QueueFullError, RequestFailedError, ServerError
from octavo.logger import get_logger
from octavo.types.outputs import EngineOutputs, FinishReason
from octavo.types.request import EngineRequest

logger = get_logger(__name__)

BACKOFF_SECONDS = 0.5  # before the second restart in a row; doubles from there, the first is immediate
MAX_BACKOFF_SECONDS = 30.0
# Restarts that lie further apart than this are not "in a row", even if the core had nothing to do in between.
WINDOW_SECONDS = 600.0
# A restarted core may take this many times as long as the first one did before it counts as hung.
START_FACTOR = 10.0
# Utilities that read weights, capture graphs or write profiles.
LONG_CALLS = frozenset({"sleep", "wake_up", "collective_rpc"})
# How often silence is looked at, as a share of what is allowed.
WATCHES_PER_LIMIT = 20
# Requests that may arrive while there is no core, where the queue has no limit of its own.
MAX_HELD_REQUESTS = 4096


class SupervisorListener(Protocol):
    """Whom a `Supervisor` serves. All methods are called on the event loop."""

    def on_outputs(self, outputs: EngineOutputs) -> None:
        """One step's outputs."""

    def on_core_lost(self, error: EngineDeadError) -> None:
        """A core is gone; another one is on its way."""

    def on_core_ready(self) -> None:
        """A restarted core serves, and has the open requests."""

    def on_death(self, error: EngineDeadError) -> None:
        """No core could be kept alive; no outputs follow."""

    def progress(self) -> dict[str, int]:
        """How many tokens each unfinished answer has, by the core's id and in the order they came."""

    def resubmissions(self, request_ids: Iterable[str]) -> list[EngineRequest]:
        """What a new core must get to go on with these answers."""

    def fail_request(self, request_id: str, error: RequestFailedError) -> None:
        """End the request that this id of the core belongs to."""


class Supervisor:
    """Looks like a client that does not die. Made around the first core once that is ready."""

    def __init__(
        self,
        client: ProcessClient,
        config: EngineConfig,
        report: StartReport,
        listener: SupervisorListener,
        *,
        start_seconds: float = 0.0,
        make_client: Callable[[SpawnedCore], ProcessClient] = ProcessClient,
    ):
        """`start_seconds`: how long the first core took to come up."""
        # Later cores get exactly the blocks of the first: what fitted once must fit again.
        self._config = replace(config, cache=replace(config.cache, num_blocks_override=report.num_blocks))
        self._client: ProcessClient | None = client
        self._listener = listener
        self._make_client = make_client
        self._is_serving = True
        self._is_shut_down = False
        self._is_paused = False  # what cores were last told
        self._asleep: tuple[int, list[str]] | None = None  # level, and the parts that sleep
        self._num_long_calls = 0  # that the core is working on
        self._has_progress = False  # whether this core has brought anything
        self._reason = ""  # why there is no core
        self._dead_error: EngineDeadError | None = None
        self._restarts: list[float] = []  # when, since the last progress
        self._start_limit = max(config.supervision.stall_seconds, START_FACTOR * start_seconds)
        self._quarantine = Quarantine()
        self._sent: set[str] = set()  # while suspects are tried: who the core knows of
        self._num_held = self._num_held_tokens = 0  # of requests that the core was not told of
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restart_at: float | None = None
        self._lost_at = 0.0
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._silent_seconds = 0.0
        self._last_heard = self._last_watch = 0.0

    # What a client does

    @property
    def pid(self) -> int | None:
        """Process id of the core there is."""
        return None if self._client is None else self._client.pid

    def listen(self) -> None:
        """Bind to the running loop; cheap when that is done."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self._is_shut_down or self._dead_error is not None:
            return
        self._loop = loop
        self._timers.clear()  # the old loop's
        if self._client is not None:
            self._client.listen(self)
            self._start_watch()
        elif self._restart_at is not None:
            self._call_at(self._restart_at, self._restart)

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests in the core, or have them wait for one. QueueFullError when too many wait already."""
        self._check_alive()
        if self._is_serving and not self._quarantine.is_trying:
            assert self._client is not None
            try:
                self._client.add_requests(requests)
                return
            except EngineDeadError:
                pass  # we shall hear of it; the requests are open by then
        self._hold(requests)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Tell the core that nobody wants these any more. They are no longer among the listener's open requests."""
        if self._is_serving:
            assert self._client is not None
            self._client.abort_requests(request_ids)
            if self._sent:
                self._go_on_trying()

    async def call(self, method: str, *args: Any) -> Any:
        """Run one of the core's utilities, once there is a core."""
        self._check_alive()
        while not self._is_serving:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        assert self._client is not None
        if method == "set_paused":
            [self._is_paused] = args
        try:
            if method in LONG_CALLS:
                return await self._call_long(self._client, method, *args)
            return await self._client.call(method, *args)
        except EngineDeadError as error:
            self._check_alive()
            raise ServerError(f"{method} was lost with its core: {error} Call it again.") from error

    async def _call_long(self, client: ProcessClient, method: str, *args: Any) -> Any:
        """Run what may take as long as a start; remember what sleeps, for the core after this one."""
        self._num_long_calls += 1
        try:
            result = await client.call(method, *args)
        finally:
            self._num_long_calls -= 1
        if method == "sleep":
            self._asleep = (args[0], result)
        elif method == "wake_up" and self._asleep is not None:
            self._asleep = (self._asleep[0], result) if result else None
        return result

    def check_health(self) -> None:
        """Raise EngineDeadError when there is no hope, EngineRestartingError while there is no core."""
        self._check_alive()
        if not self._is_serving:
            raise EngineRestartingError(f"the engine core is being restarted: {self._reason}")
        assert self._client is not None
        try:
            self._client.check_health()
        except EngineDeadError as error:
            raise EngineRestartingError(str(error)) from error

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, and restart it no more. May be called twice."""
        self._is_shut_down = True
        self._is_serving = False
        self._cancel_timers()
        self._wake(EngineDeadError("the engine was shut down."))
        if self._client is not None:
            self._client.shutdown(timeout)

    # What the client says

    def on_ready(self, report: StartReport) -> None:
        """A restarted core serves."""
        self._is_serving, self._has_progress = True, False
        assert self._client is not None
        if self._is_paused:
            self._client.tell("set_paused", True)
        if self._asleep is not None:
            self._client.tell("sleep", *self._asleep)
        num_tokens = self._listener.progress()
        logger.warning(
            "a new engine core serves after %.1f s; %d answers go on", time.monotonic() - self._lost_at, len(num_tokens)
        )
        self._num_held = self._num_held_tokens = 0
        if self._quarantine.choose(num_tokens) is None:
            self._submit(num_tokens)
        else:
            self._go_on_trying()
        self._start_watch()
        self._wake(None)
        self._listener.on_core_ready()

    def on_outputs(self, outputs: EngineOutputs) -> None:
        """Pass on what a step produced, and see what it proves."""
        if not self._has_progress and any(o.finish_reason is not FinishReason.ABORT for o in outputs.outputs):
            self._has_progress = True
            self._restarts.clear()
        self._listener.on_outputs(outputs)
        if self._sent and self._is_serving:
            self._go_on_trying()

    def on_death(self, error: EngineDeadError) -> None:
        """The core is gone: find out whose fault it was, and start another one or give up."""
        client, self._client = self._client, None
        if client is None or self._is_shut_down:
            return
        num_tokens = self._listener.progress()
        in_flight = client.read_in_flight(num_tokens)
        if not in_flight and self._is_serving and not self._has_progress:
            in_flight = self._sent.intersection(num_tokens) if self._sent else set(num_tokens)
        self._is_serving = False
        self._sent = set()
        self._reason, self._lost_at = str(error), time.monotonic()
        self._cancel_timers()
        client.shutdown()
        culprit = self._quarantine.judge(in_flight, num_tokens)
        logger.error("%s (%d requests were being computed)", error, len(in_flight))
        self._listener.on_core_lost(error)
        if culprit is not None:
            self._restarts.clear()
            logger.error("request %s has killed the engine core twice and is failed", culprit)
            message = f"the engine core died twice while it computed this request, and is restarted without it: {error}"
            self._listener.fail_request(culprit, RequestFailedError(message))
        self._schedule_restart(error)

    # Restarts

    def _schedule_restart(self, error: EngineDeadError) -> None:
        now = time.monotonic()
        self._restarts = [then for then in self._restarts if now - then < WINDOW_SECONDS]
        num_restarts = len(self._restarts)
        if num_restarts >= self._config.supervision.max_restarts:
            told = f" (restarted {num_restarts} times in a row in vain)" if num_restarts else ""
            self._give_up(EngineDeadError(f"{error}{told}"))
            return
        delay = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (num_restarts - 1)) if num_restarts else 0.0
        self._restarts.append(now)
        self._restart_at = now + delay
        self._call_at(self._restart_at, self._restart)

    def _restart(self) -> None:
        self._restart_at = None
        try:
            self._client = client = self._make_client(SpawnedCore(self._config.parallel.executor))
        except OSError as error:  # no memory for a process, no room for its folder
            self._reason = f"its process cannot be started: {error}"
            self._schedule_restart(EngineDeadError(f"the engine core is gone, and {self._reason}"))
            return
        client.configure(self._config)
        client.listen(self)
        self._start_watch()

    def _give_up(self, error: EngineDeadError) -> None:
        self._dead_error = error
        self._wake(error)
        self._listener.on_death(error)

    def _go_on_trying(self) -> None:
        """Send the next suspect once the last one is cleared, and everybody else after the last suspect."""
        num_tokens = self._listener.progress()
        chosen = self._quarantine.choose(num_tokens)
        if chosen is None:
            tried, self._sent = self._sent, set()
            self._num_held = self._num_held_tokens = 0
            self._submit(name for name in num_tokens if name not in tried)
        elif chosen not in self._sent:
            self._sent.add(chosen)
            self._submit([chosen])

    def _submit(self, request_ids: Iterable[str]) -> None:
        assert self._client is not None
        requests = self._listener.resubmissions(request_ids)
        if requests:
            with contextlib.suppress(EngineDeadError):  # its death is about to be told; the next one gets them
                self._client.add_requests(requests)

    def _hold(self, requests: list[EngineRequest]) -> None:
        """Let requests wait for a core. They are not kept here: the listener opens them."""
        scheduler = self._config.scheduler
        num_tokens = sum(request.num_prompt_tokens for request in requests)
        limit, token_limit = scheduler.max_num_queued_reqs or MAX_HELD_REQUESTS, scheduler.max_num_queued_tokens
        if self._num_held + len(requests) > limit or (
            token_limit is not None and self._num_held_tokens + num_tokens > token_limit and self._num_held
        ):
            raise QueueFullError(
                f"{self._num_held} requests wait for the engine core to be restarted, the most allowed; try again later."
            )
        self._num_held += len(requests)
        self._num_held_tokens += num_tokens

    # Watching

    def _start_watch(self) -> None:
        self._silent_seconds, self._last_watch = 0.0, time.monotonic()
        self._call_at(self._last_watch + self._watch_interval, self._watch)

    @property
    def _silence_limit(self) -> float:
        may_be_long = not self._is_serving or self._num_long_calls
        return self._start_limit if may_be_long else self._config.supervision.stall_seconds

    @property
    def _watch_interval(self) -> float:
        return self._silence_limit / WATCHES_PER_LIMIT

    def _watch(self) -> None:
        """Kill a core that has said nothing for too long.

        Only silence that this loop lived through counts: a front that was held up itself, or a machine that slept, must
        not cost a core its life.
        """
        client = self._client
        if client is None:
            return
        now, interval = time.monotonic(), self._watch_interval
        heard = client.last_heard
        self._silent_seconds += min(now - self._last_watch, 2 * interval)
        if heard != self._last_heard:
            self._silent_seconds = 0.0
        self._last_heard, self._last_watch = heard, now
        if self._silent_seconds > self._silence_limit:
            client.kill(f"it had been silent for {self._silent_seconds:.1f} s")
            return
        self._call_at(now + interval, self._watch)

    def _call_at(self, when: float, what: Callable[[], None]) -> None:
        """Call `what` at a monotonic time, if the loop lives that long; `listen` on the next one arms it again."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        if (old := self._timers.pop(what, None)) is not None:
            old.cancel()
        self._timers[what] = loop.call_later(max(0.0, when - time.monotonic()), what)

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # Waiting

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down.")
        if self._dead_error is not None:
            raise EngineDeadError(str(self._dead_error))

    def _wake(self, error: EngineDeadError | None) -> None:
        """Let calls go on that wait for a core, or tell them that there will be none."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done() or waiter.get_loop().is_closed():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
