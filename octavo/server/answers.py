"""The two kinds of answer, both of which stop working when the client hangs up.

`run_while_connected` is the only place that listens for a disconnect: it cancels the work, whose generators abort their
requests in the engine as they close.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from octavo.server.activity import Activity
from octavo.server.errors import ShuttingDownError, describe
from octavo.server.json_body import encode

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would collect the stream
]


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody left to answer."""


def sse(value: Any, event: str | None = None) -> bytes:
    """One server-sent event, with its name where the API names them."""
    data = b"data: " + encode(value) + b"\n\n"
    return data if event is None else b"event: " + event.encode() + b"\n" + data


class Json:
    """A whole JSON answer."""

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None):
        self.body = value if isinstance(value, bytes) else encode(value)
        self.status = status
        self.headers = {"content-type": "application/json", **(headers or {})}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in self.headers.items()]
        headers.append((b"content-length", str(len(self.body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """How one API's streams end."""

    fail: Callable[[BaseException], bytes]  # the event that tells an error
    end: bytes  # what follows the last event


OPENAI_STREAM = StreamStyle(lambda error: sse(describe(error).body), DONE)


class EventStream:
    """Server-sent events from a generator of frames; an error on the way becomes the last event."""

    def __init__(self, frames: AsyncGenerator[bytes, None], activity: Activity, style: StreamStyle = OPENAI_STREAM):
        self.frames = frames
        self.activity = activity
        self.style = style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS})
        try:
            await run_while_connected(receive, self.activity, self._pump(send))
        except ClientGoneError:
            return
        except Exception as error:
            await self._write(send, self.style.fail(error))
        await send({"type": "http.response.body", "body": self.style.end, "more_body": False})

    async def _pump(self, send: Send) -> None:
        async with aclosing(self.frames) as frames:
            async for frame in frames:
                await self._write(send, frame)

    @staticmethod
    async def _write(send: Send, frame: bytes) -> None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})


async def run_while_connected(receive: Receive, activity: Activity, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it when the client hangs up (ClientGoneError) or the server stops (ShuttingDownError).

    The request's body must have been read: what `receive` says next is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    stopping = asyncio.ensure_future(activity.stopping.wait())
    try:
        await asyncio.wait({task, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise ShuttingDownError("the server is shutting down; send the request again later.")
    finally:
        for waiter in (task, gone, stopping):
            waiter.cancel()
        await asyncio.gather(task, gone, stopping, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
