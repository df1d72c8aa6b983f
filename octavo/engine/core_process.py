"""The engine core as a process of its own: `python -m octavo.engine.core_process <folder> [executor]`.

The folder holds the two sockets (`spawn.INPUT_SOCKET`, bound here; `spawn.OUTPUT_SOCKET`, bound by the front).
The configuration is the first message; the executor named is imported while it is on its way. One thread does
everything: between steps it takes what has arrived, and when idle it sleeps in the socket.

Signals that ask for an end are the front's to answer: this process ends by a `Shutdown` message, by the end of its
standard input (the front is gone, however it went), or by SIGKILL.
"""

import faulthandler
import gc
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from octavo.engine.core import EngineCore
from octavo.engine.executor import load_executor, make_executor
from octavo.engine.flight_record import FLIGHT_RECORD, FlightRecorder
from octavo.engine.protocol import (
    AbortRequests,
    AddRequests,
    Configure,
    Fatal,
    Heartbeat,
    Ready,
    RemoteError,
    Shutdown,
    StepOutputs,
    ToCore,
    ToFront,
    UtilityCall,
    UtilityResult,
    take_arrived,
)
from octavo.engine.spawn import INPUT_SOCKET, OUTPUT_SOCKET
from octavo.errors import OctavoError
from octavo.logger import get_logger, set_role

logger = get_logger("octavo.engine.core_process")  # __name__ is __main__ here

HEARTBEAT_SECONDS = 1
LAST_WORDS_SECONDS = 2.0  # how long the end waits for the front to read


class CoreProcess:
    """Serves one `EngineCore` over the two sockets of `folder`."""

    def __init__(self, folder: str):
        self._folder = Path(folder)
        self._context = zmq.Context(io_threads=1)
        self._inputs = self._context.socket(zmq.PULL)
        self._inputs.setsockopt(zmq.RCVHWM, 0)
        self._inputs.bind(f"ipc://{folder}/{INPUT_SOCKET}")
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.connect(f"ipc://{folder}/{OUTPUT_SOCKET}")
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()
        self._last_sent = 0.0
        self._is_stopping = False

    def run(self, executor: str | None = None) -> int:
        """Start the core and serve until told to stop; returns the exit code."""
        core = None
        try:
            if executor is not None:
                load_executor(executor)
                gc.freeze()  # what was imported stays: no collection need walk it
            message = self._decoder.decode(self._inputs.recv())
            if isinstance(message, Shutdown):
                return 0
            assert isinstance(message, Configure), f"the first message is {type(message).__name__}"
            recorder = FlightRecorder(self._folder / FLIGHT_RECORD, message.config.scheduler.max_num_seqs)
            core = EngineCore(message.config, make_executor(message.config), recorder)
            gc.enable()
            self._send(Ready(core.report))
            self._serve(core)
            return 0
        except Exception as error:
            # Octavo's own errors are sentences that the front shows; a trace helps with all others.
            if not isinstance(error, OctavoError):
                logger.exception("the engine core ends")
            self._send(Fatal(RemoteError.of(error)))
            return 1
        finally:
            if core is not None:
                core.shutdown()
            self._context.destroy(linger=int(LAST_WORDS_SECONDS * 1000))

    def _serve(self, core: EngineCore) -> None:
        while True:
            if core.has_work:
                self._take_inputs(core)
            else:
                core.on_idle()
                self._inputs.poll(HEARTBEAT_SECONDS * 1000)
                self._take_inputs(core)
            if self._is_stopping:
                return
            outputs = core.step()
            if outputs is not None:
                self._send(StepOutputs(outputs))
            elif time.monotonic() - self._last_sent >= HEARTBEAT_SECONDS:
                self._send(Heartbeat(time.monotonic()))

    def _take_inputs(self, core: EngineCore) -> None:
        """Handle everything that has arrived, without waiting."""
        for data in take_arrived(self._inputs):
            message = self._decoder.decode(data)
            match message:
                case AddRequests(requests):
                    core.add_requests(requests)
                case AbortRequests(request_ids):
                    core.abort_requests(request_ids)
                case UtilityCall():
                    self._send(_answer(core, message))
                case Shutdown():
                    self._is_stopping = True
                    return
                case Configure():
                    raise AssertionError("configured twice")

    def _send(self, message: ToFront) -> None:
        self._outputs.send(self._encoder.encode(message))
        self._last_sent = time.monotonic()


def _answer(core: EngineCore, call: UtilityCall) -> UtilityResult:
    try:
        return UtilityResult(call.call_id, msgspec.to_builtins(core.call(call.method, call.args, call.kwargs)))
    except Exception as error:
        if not isinstance(error, OctavoError):
            logger.exception("%s failed", call.method)
        return UtilityResult(call.call_id, error=RemoteError.of(error))


def _end_with_the_front(folder: str) -> None:
    """Watch standard input, whose other end the front holds: its end means that the front is gone."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="octavo-front-watch", daemon=True).start()


def main() -> int:
    """Entry point of the process."""
    gc.disable()  # until the core is up: imports make a million objects and no garbage
    folder, *executor = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    _end_with_the_front(folder)
    set_role("core")
    return CoreProcess(folder).run(*executor)


if __name__ == "__main__":
    sys.exit(main())
