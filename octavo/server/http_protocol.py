"""Which HTTP parser to use, and what a connection may cost before the application sees a request.

Headers are bounded in size (h11 has a limit of its own, 64 KiB) and in time, connections in number. The time covers
everything that a client sends while no request of its is being answered, so a body that trickles in behind an answer
holds a connection no longer than headers that never end.
"""

import asyncio
from typing import Any

from octavo.logger import get_logger
from octavo.server.errors import problem
from octavo.server.stall_guard import ABORT

logger = get_logger(__name__)

MAX_HEADER_BYTES = 256 << 10  # what may arrive before a request's headers are complete

_FULL = problem(503, "the server has as many connections as it may; try again later.", code="too_many_connections")
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_FULL.encode()), _FULL.encode())
)


def http_protocol(max_connections: int, header_seconds: float) -> type[asyncio.Protocol]:
    """A protocol for uvicorn: httptools where it is installed (much faster), else h11."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return _bounded(H11Protocol, max_connections, header_seconds)

    class SizedHttpTools(HttpToolsProtocol):
        """httptools reads headers without end; this closes the connection of a client that sends them so."""

        _header_bytes = 0
        _in_headers = True

        def on_message_begin(self) -> None:
            self._in_headers = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_headers, self._header_bytes = False, 0
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_headers = True
            super().on_message_complete()

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                self._header_bytes += len(data)
            super().data_received(data)
            if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
                self.transport.close()

    return _bounded(SizedHttpTools, max_connections, header_seconds)


def _bounded(base: Any, max_connections: int, header_seconds: float) -> type[asyncio.Protocol]:
    """The protocol `base` of uvicorn with a bound on connections and on the time a request takes to arrive."""

    class Bounded(base):
        app: Any
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                logger.warning("refusing a connection: there are %d", max_connections)
                transport.write(_REFUSAL)
                transport.close()
                return
            app: Any = self.app

            async def abortable(scope: Any, receive: Any, send: Any) -> None:
                scope[ABORT] = transport.abort
                await app(scope, receive, send)

            self.app = abortable
            self._start_deadline()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_deadline()
            elif self._deadline is None:
                self._start_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_deadline()
            super().connection_lost(exc)

        def _start_deadline(self) -> None:
            self._deadline = self.loop.call_later(header_seconds, self.transport.abort)

        def _stop_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Bounded
