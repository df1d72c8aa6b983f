"""Which HTTP parser to use, and a bound on headers where the parser has none."""

import asyncio

# What may arrive before a request's headers are complete. h11 has a limit of its own, 64 KiB.
MAX_HEADER_BYTES = 256 << 10


def http_protocol() -> "type[asyncio.Protocol] | str":
    """httptools where it is installed (much faster), else h11."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHttpTools(HttpToolsProtocol):
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

    return BoundedHttpTools
