"""How the front reaches an engine core: in the same process, or in one of its own.

A client carries messages and notices death; it keeps no request. What each request was and what it has emitted is the
output processor's knowledge, so that whoever owns a client can replace it by a new one and hand the open requests over.
"""

import asyncio
import contextlib
import math
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from octavo.config.engine import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import make_executor
from octavo.engine.flight_record import FLIGHT_RECORD, read_in_flight
from octavo.engine.protocol import (
    AbortRequests,
    AddRequests,
    Configure,
    Fatal,
    Heartbeat,
    Ready,
    Shutdown,
    StartReport,
    StepOutputs,
    ToCore,
    ToFront,
    UtilityCall,
    UtilityResult,
    take_arrived,
)
from octavo.engine.spawn import INPUT_SOCKET, OUTPUT_SOCKET, SpawnedCore
from octavo.errors import EngineDeadError, ServerError
from octavo.logger import get_logger
from octavo.types.outputs import EngineOutputs
from octavo.types.request import EngineRequest

logger = get_logger(__name__)

# How long a core may take to end after it was told to.
SHUTDOWN_SECONDS = 5.0
# How long the last messages of a dead core may take through the socket.
LAST_WORDS_SECONDS = 0.1
# What an in-process core cannot have; appended to its last words.
NO_SUPERVISOR = "It runs in this process, where nobody can restart it: make a new LLM, or use AsyncLLM or the server."


class CoreClient(ABC):
    """What every client does, whoever drives it."""

    @abstractmethod
    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests in the core."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Tell the core that nobody wants these any more."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError when the core is dead or hung."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the core. May be called twice."""


class InProcessClient(CoreClient):
    """A core in this process, driven by its user one step at a time."""

    def __init__(self, config: EngineConfig):
        self._core = EngineCore(config, make_executor(config))
        self._error: Exception | None = None

    @property
    def report(self) -> StartReport:
        return self._core.report

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do; never after it failed."""
        return self._error is None and self._core.has_work

    def add_requests(self, requests: list[EngineRequest]) -> None:
        self.check_health()
        self._core.add_requests(requests)

    def abort_requests(self, request_ids: list[str]) -> None:
        if self._error is None:
            self._core.abort_requests(request_ids)

    def step(self) -> EngineOutputs | None:
        """Run the loop once. An exception that the core could not pin on a request ends it: EngineDeadError."""
        self.check_health()
        try:
            outputs = self._core.step()
            if not self._core.has_work:
                self._core.on_idle()
        except Exception as error:
            self._error = error
            raise EngineDeadError(f"the engine core failed: {error} {NO_SUPERVISOR}") from error
        return outputs

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run one of the core's utilities."""
        self.check_health()
        return self._core.call(method, args, kwargs)

    def check_health(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"the engine core failed earlier: {self._error} {NO_SUPERVISOR}") from self._error

    def shutdown(self) -> None:
        self._core.shutdown()


class CoreListener(Protocol):
    """Whom a `ProcessClient` tells what comes from its core. All are called on the event loop."""

    def on_ready(self, report: StartReport) -> None:
        """The core serves. Not called when `wait_ready` has said so."""

    def on_outputs(self, outputs: EngineOutputs) -> None:
        """One step's outputs."""

    def on_death(self, error: EngineDeadError) -> None:
        """The core is gone; no outputs follow. Called once, unless `shutdown` ended it."""


class ProcessClient(CoreClient):
    """A core in a child process, reached over two ZeroMQ sockets in a private folder.

    `configure` tells it what to be, `wait_ready` blocks until it serves: a front reads its tokenizer in between. `listen`
    binds the client to the running event loop; a front that must not block listens right away and is told.
    """

    def __init__(self, core: SpawnedCore | None = None):
        core = core or SpawnedCore()
        self._stall_seconds = math.inf
        self._error: EngineDeadError | None = None
        self._is_ready = False
        self._is_shut_down = False
        self._listener: CoreListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_words = ""  # why the core said it ends
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self.last_heard = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToFront)

        self._folder = folder = core.folder
        self._context = zmq.Context(io_threads=1)
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.bind(f"ipc://{folder}/{OUTPUT_SOCKET}")
        # The core binds this one, so that what is sent before it is up waits here instead of failing.
        self._inputs = self._context.socket(zmq.PUSH)
        self._inputs.setsockopt(zmq.SNDHWM, 0)
        self._inputs.setsockopt(zmq.RECONNECT_IVL, 10)
        self._inputs.connect(f"ipc://{folder}/{INPUT_SOCKET}")
        self._process = core.process
        self._finalizer = weakref.finalize(self, _release, core, self._context)
        # The thread must not keep the client alive.
        watch = threading.Thread(target=_watch, args=(self._process, weakref.ref(self)), name="octavo-core-watch")
        watch.daemon = True
        watch.start()

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    def configure(self, config: EngineConfig) -> None:
        """Tell the core what to be; it starts at once."""
        self._stall_seconds = config.supervision.stall_seconds
        self._send(Configure(config))

    def wait_ready(self) -> StartReport:
        """Block until the core serves. Raises what stopped it, a LoadError or ConfigError as such."""
        while True:
            # The end of the process shows between two polls; what it said before is read first.
            is_running = self._process.poll() is None
            if not self._outputs.poll(100):
                if is_running:
                    continue
                raise EngineDeadError(self._describe_end())
            message = self._decode(self._outputs.recv())
            if isinstance(message, Ready):
                self._is_ready = True
                return message.report
            if isinstance(message, Fatal):
                self._error = EngineDeadError(message.error.message)
                raise message.error.to_exception()

    def listen(self, listener: CoreListener) -> None:
        """Deliver what comes from the core to `listener` on the running loop; call it again after a change of loops."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self._error is not None:
            return
        self._stop_listening()
        self._listener, self._loop, self.last_heard = listener, loop, time.monotonic()
        loop.add_reader(self._outputs.fileno(), self._on_readable)
        # The descriptor tells of changes only: what came before, or an end before anybody listened, is looked up once.
        loop.call_soon(self._on_readable)
        if self._process.poll() is not None:
            self._on_exit()

    def add_requests(self, requests: list[EngineRequest]) -> None:
        self._check_alive()
        self._send(AddRequests(requests))

    def abort_requests(self, request_ids: list[str]) -> None:
        if self._error is None:
            self._send(AbortRequests(request_ids))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run one of the core's utilities; arguments and result are plain data. Needs `listen`."""
        self._check_alive()
        self._num_calls += 1
        call_id = self._num_calls
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(UtilityCall(call_id, method, list(args), kwargs))
            return await future
        finally:
            del self._calls[call_id]

    def tell(self, method: str, *args: Any) -> None:
        """Have the core run one of its utilities, in the order of what is sent, without waiting for it."""
        self._send(UtilityCall(0, method, list(args)))

    def check_health(self) -> None:
        self._check_alive()
        silence = time.monotonic() - self.last_heard
        if self._loop is not None and silence > self._stall_seconds:
            raise EngineDeadError(f"the engine core has been silent for {silence:.0f} s; a step in it hangs.")

    def kill(self, reason: str) -> None:
        """End a core that is beyond talking to; its death is told as any other's, with `reason`."""
        self._last_words = reason
        if self._process.poll() is None:
            self._process.kill()

    def read_in_flight(self, request_ids: Iterable[str]) -> set[str]:
        """Those of `request_ids` that a dead core was computing. Ask before `shutdown`."""
        return read_in_flight(Path(self._folder, FLIGHT_RECORD), request_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, and kill it when it takes longer than `timeout` seconds."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._stop_listening()
        if self._process.poll() is None:
            self._send(Shutdown())
            timeout = SHUTDOWN_SECONDS if timeout is None else timeout
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout if self._is_ready else 0)  # one that still starts does not listen
        self._declare_dead(EngineDeadError("the engine was shut down."))
        self._finalizer()

    def _send(self, message: ToCore) -> None:
        try:
            data = self._encoder.encode(message)
        except (TypeError, OverflowError) as error:
            raise ServerError(f"only plain data can go to the engine core: {error}") from None
        self._inputs.send(data, zmq.NOBLOCK)

    def _decode(self, data: bytes) -> ToFront:
        self.last_heard = time.monotonic()
        message: ToFront = self._decoder.decode(data)
        return message

    def _on_readable(self) -> None:
        """Handle every message that has arrived: the descriptor only tells that there may be some."""
        if self._error is not None:
            return
        for data in take_arrived(self._outputs):
            self._handle(self._decode(data))
            if self._is_shut_down:  # by whoever heard this message
                return

    def _handle(self, message: ToFront) -> None:
        match message:
            case StepOutputs(outputs):
                assert self._listener is not None
                self._listener.on_outputs(outputs)
            case UtilityResult(call_id, result, error):
                future = self._calls.get(call_id)
                if future is None or future.done():
                    return  # the caller was cancelled
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error.to_exception())
            case Fatal(error):
                self._last_words = error.message
            case Ready(report):
                self._is_ready = True
                assert self._listener is not None
                self._listener.on_ready(report)
            case Heartbeat():
                pass

    def _tell_exit(self) -> None:
        """Called on the watching thread: the process has ended."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        """The process has ended; what it said last may still be on its way through the socket."""
        if self._loop is not None:
            self._loop.call_later(LAST_WORDS_SECONDS, self._finish_exit)

    def _finish_exit(self) -> None:
        if self._error is not None:
            return
        self._on_readable()
        self._stop_listening()
        error = EngineDeadError(self._describe_end())
        self._declare_dead(error)
        if self._listener is not None:
            self._listener.on_death(error)

    def _stop_listening(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._outputs.fileno())

    def _declare_dead(self, error: EngineDeadError) -> None:
        if self._error is None:
            self._error = error
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        if self._process.poll() is not None:
            raise EngineDeadError(self._describe_end())

    def _describe_end(self) -> str:
        code = self._process.poll()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return f"the engine core {how}" + (f": {self._last_words}" if self._last_words else ".")


def _watch(process: "subprocess.Popen[bytes]", client: "weakref.ref[ProcessClient]") -> None:
    """Thread: wait for the end of the process and tell the client at once."""
    process.wait()
    if (owner := client()) is not None:
        owner._tell_exit()


def _release(core: SpawnedCore, context: "zmq.Context[Any]") -> None:
    core.end()
    context.destroy(linger=0)
