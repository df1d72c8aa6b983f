"""Who is being served right now, and whether the server still takes work."""

import asyncio

from octavo.server.errors import ShuttingDownError


class Activity:
    """Counts the requests in flight and carries the two stages of a shutdown.

    `drain()` refuses new work; `stop()` also ends what is running: everyone waiting on `stopping` gives up.
    Lives on one event loop.
    """

    def __init__(self) -> None:
        self.num_active = 0
        self.draining = False
        self.stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def check_open(self) -> None:
        """Raise ShuttingDownError when no new work is taken."""
        if self.draining:
            raise ShuttingDownError("the server is shutting down and takes no new requests.")

    def __enter__(self) -> None:
        self.check_open()
        self.num_active += 1
        self._idle.clear()

    def __exit__(self, *exc_info: object) -> None:
        self.num_active -= 1
        if self.num_active == 0:
            self._idle.set()

    def drain(self) -> None:
        self.draining = True

    def stop(self) -> None:
        self.draining = True
        self.stopping.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()
