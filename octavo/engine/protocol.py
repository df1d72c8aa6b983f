"""The messages between the front process and the engine core: tagged structs, msgpack on the wire, never pickle.

One message carries what one step or one call produced for everybody, not one request's share.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from octavo import errors
from octavo.config.engine import EngineConfig
from octavo.errors import OctavoError, ServerError
from octavo.types.outputs import EngineOutputs
from octavo.types.request import EngineRequest

# --- front to core ---------------------------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag="configure", array_like=True):
    """The first message: what to start."""

    config: EngineConfig


class AddRequests(msgspec.Struct, tag="add", array_like=True):
    """Requests to queue, in this order."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    """Requests whose answers nobody wants any more; unknown and finished ids are ignored."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, tag="call", array_like=True):
    """Call one of `EngineCore.UTILITIES` with plain data; answered by a `UtilityResult` of the same id."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """End the process. Open requests are dropped: the front drains first when it wants to."""


ToCore = Configure | AddRequests | AbortRequests | UtilityCall | Shutdown


# --- core to front ---------------------------------------------------------------------------------------------------


class StartReport(msgspec.Struct):
    """What the core found out while it started."""

    num_blocks: int = 0
    block_size: int = 0
    kv_cache_bytes: int = 0
    memory_plan: str = ""  # a printable table
    seconds: dict[str, float] = {}  # where the time of the start went


class RemoteError(msgspec.Struct):
    """An exception on its way to the other process: the name of its class and its message."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        if isinstance(error, OctavoError):
            return cls(type(error).__name__, str(error))
        return cls("ServerError", f"{type(error).__name__}: {error}")

    def to_exception(self) -> OctavoError:
        """The same class again when it is one of Octavo's, else a ServerError with the same message."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, OctavoError):
            return kind(self.message)
        return ServerError(self.message)


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The core serves from now on."""

    report: StartReport


class StepOutputs(msgspec.Struct, tag="outputs", array_like=True):
    """What one step produced."""

    outputs: EngineOutputs


class UtilityResult(msgspec.Struct, tag="result", array_like=True):
    """The answer to a `UtilityCall`."""

    call_id: int
    result: Any = None
    error: RemoteError | None = None


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    """The loop is alive and has nothing to say. Sent by the loop itself, so a hung step sends none."""

    timestamp: float  # time.monotonic() in the core


class Fatal(msgspec.Struct, tag="fatal", array_like=True):
    """The core's last words."""

    error: RemoteError


ToFront = Ready | StepOutputs | UtilityResult | Heartbeat | Fatal


def take_arrived(socket: "zmq.Socket[bytes]") -> Iterator[bytes]:
    """Every message that has arrived, without waiting for more."""
    while True:
        try:
            data = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield data
