"""Clients that stop in the middle: of sending their body, or of reading what they are sent.

Neither may hold memory or a row in the engine for ever. A body that pauses too long is a 408; a reader that takes
nothing for too long loses its connection, and with it its request. What a slow reader has not taken waits in the engine
as merged text, never as a growing queue.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.logger import get_logger
from octavo.server.answers import ClientGoneError
from octavo.server.errors import HttpError

logger = get_logger(__name__)

# Where the HTTP protocol puts the function that drops a connection, with whatever is still to be sent.
ABORT = "octavo.abort"


class StallGuard:
    """Bounds each wait for the client by `seconds`."""

    def __init__(self, app: ASGIApp, seconds: float):
        self.app = app
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_body = False

        async def receive_in_time() -> Message:
            nonlocal has_body
            if has_body:  # what comes next is the end of the connection, whenever that is
                return await receive()
            try:
                async with asyncio.timeout(self.seconds):
                    message = await receive()
            except TimeoutError:
                raise HttpError(
                    408,
                    f"no part of the body came for {self.seconds:g} s.",
                    code="request_timeout",
                    headers={"connection": "close"},
                ) from None
            has_body = not message.get("more_body", False)
            return message

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self.seconds):
                    await send(message)
            except TimeoutError:
                logger.warning("a client read nothing for %g s and is cut off", self.seconds)
                if (abort := scope.get(ABORT)) is not None:
                    abort()
                raise ClientGoneError from None

        await self.app(scope, receive_in_time, send_in_time)
