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
    """How one API's streams end, and what they say while there is nothing to say."""

    fail: Callable[[BaseException], bytes]  # the event that tells an error
    end: bytes  # what follows the last event
    keep_alive: bytes = b": keep-alive\n\n"  # a comment, which readers skip


OPENAI_STREAM = StreamStyle(lambda error: sse(describe(error).body), DONE)


class EventStream:
    """Server-sent events from a generator of frames; an error on the way becomes the last event.

    With `keep_alive_interval` a stream that has been silent for so many seconds says that it is alive.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        activity: Activity,
        style: StreamStyle = OPENAI_STREAM,
        keep_alive_interval: float = 0.0,
    ):
        self.activity = activity
        self.style = style
        self.frames = frames if not keep_alive_interval else _kept_alive(frames, style.keep_alive, keep_alive_interval)

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


async def _kept_alive(
    frames: AsyncGenerator[bytes, None], keep_alive: bytes, interval: float
) -> AsyncGenerator[bytes, None]:
    """The frames, with `keep_alive` wherever none comes for `interval` seconds."""
    async with aclosing(frames):
        while True:
            waiting = asyncio.ensure_future(anext(frames, None))
            try:
                while not (await asyncio.wait({waiting}, timeout=interval))[0]:
                    yield keep_alive
            except BaseException:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)  # frames are closed once nobody reads them
                raise
            frame = await waiting
            if frame is None:
                return
            yield frame


async def run_while_connected(receive: Receive, activity: Activity, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it when the client hangs up (ClientGoneError) or the server stops (ShuttingDownError).

    The request's body must have been read: what `receive` says next is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    stopping = asyncio.ensure_future(activity.stopping.wait())
    try:
        await asyncio.wait({task, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():  # also when there is a result: nobody would say a second time that there is nobody
            raise ClientGoneError
        if task.done():
            return task.result()
        raise ShuttingDownError("the server is shutting down; send the request again later.")
    finally:
        for waiter in (task, gone, stopping):
            waiter.cancel()
        await asyncio.gather(task, gone, stopping, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
