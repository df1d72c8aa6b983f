"""An HTTP/1.1 client for load generation: asyncio streams, kept-alive connections, bodies as they arrive.

One event loop must carry thousands of token events a second without delaying their time stamps, so there is nothing
here but what an OpenAI-compatible server needs: no redirects, cookies, compression or proxies.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from octavo.errors import ClientError, OctavoError

MAX_HEAD_BYTES = 1 << 18
READ_BYTES = 1 << 16


class HttpError(OctavoError):
    """The connection broke, or what came over it is not HTTP."""


class ChunkedDecoder:
    """Takes the frames off a chunked body, in whatever pieces it arrives."""

    def __init__(self) -> None:
        self.is_done = False
        self._buffer = bytearray()
        self._left = 0  # bytes of the current chunk, its closing line break included
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """The body bytes that `data` completes."""
        self._buffer += data
        out = bytearray()
        while not self.is_done:
            if self._left:
                if not self._buffer:
                    break
                taken = self._buffer[: self._left]
                del self._buffer[: self._left]
                # The last two bytes of a chunk are its line break, which may come in a later piece than its data.
                body_left = self._left - 2
                out += taken[: max(body_left, 0)]
                self._left -= len(taken)
                continue
            end = self._buffer.find(b"\r\n")
            if end < 0:
                break
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 2]
            self._read_line(line)
        return bytes(out)

    def _read_line(self, line: bytes) -> None:
        if self._in_trailer:
            self.is_done = not line
            return
        try:
            size = int(line.split(b";", 1)[0], 16)
        except ValueError:
            raise HttpError(f"{line[:40]!r} is not the size of a chunk.") from None
        self._in_trailer = size == 0
        self._left = size + 2 if size else 0


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_reused: bool = False


class Response:
    """Status, headers (names in lower case) and a body to read once."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader, method: str):
        self.status = status
        self.headers = headers
        self._reader = reader
        self._has_body = method != "HEAD" and status not in (204, 304)
        self.is_complete = not self._has_body

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. HttpError when the connection ends before the body does."""
        if self.is_complete:
            return
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            decoder = ChunkedDecoder()
            while not decoder.is_done:
                piece = decoder.feed(await self._read(READ_BYTES))
                if piece:
                    yield piece
            self.is_complete = True
        elif "content-length" in self.headers:
            left = int(self.headers["content-length"])
            while left:
                piece = await self._read(min(left, READ_BYTES))
                left -= len(piece)
                yield piece
            self.is_complete = True
        else:  # the end of the connection is the end of the body, so the connection is not used again
            while piece := await self._reader.read(READ_BYTES):
                yield piece

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def _read(self, size: int) -> bytes:
        data = await self._reader.read(size)
        if not data:
            raise HttpError("the server closed the connection in the middle of an answer.")
        return data


class HttpClient:
    """Connections to one server, as many as there are requests at a time; idle ones are used again."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, *, verify: bool = True):
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{base_url} is not an http or https address.", param="base_url")
        self.base_url = base_url.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if not verify:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self._headers = {
            "Host": f"{host}:{parts.port}" if parts.port else host,
            "Accept-Encoding": "identity",
            **(headers or {}),
        }
        self._idle: list[_Connection] = []

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Response]:
        """Send a request; inside the block its response can be read. Raises HttpError and OSError."""
        message = self._message(method, path, body, headers or {})
        connection, response = await self._exchange(message, method)
        try:
            yield response
        finally:
            keeps = response.is_complete and response.headers.get("connection", "").lower() != "close"
            if keeps and not connection.reader.at_eof():
                connection.is_reused = True
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def close(self) -> None:
        """Close the idle connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.writer.close()
        await asyncio.gather(*(connection.writer.wait_closed() for connection in idle), return_exceptions=True)

    def _message(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        fields = {**self._headers, **headers}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in fields.items():
            if any(character in name + value for character in "\r\n"):
                raise ClientError(f"header {name!r} holds a line break.", param="header")
        lines = [f"{method} {self._path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")

    async def _exchange(self, message: bytes, method: str) -> tuple[_Connection, Response]:
        """Send on an idle connection or a new one. An idle one may have been closed by the server: then again."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                connection.writer.write(message)
                await connection.writer.drain()
                head = await connection.reader.readuntil(b"\r\n\r\n")
                return connection, _read_head(head, connection.reader, method)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                connection.writer.close()
                started = isinstance(error, asyncio.IncompleteReadError) and error.partial
                if not connection.is_reused or started:
                    raise HttpError("the server closed the connection without an answer.") from None
            except asyncio.LimitOverrunError:
                connection.writer.close()
                raise HttpError(f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes.") from None
            except BaseException:
                connection.writer.close()
                raise

    async def _connect(self) -> _Connection:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MAX_HEAD_BYTES)
        return _Connection(reader, writer)


def _read_head(head: bytes, reader: asyncio.StreamReader, method: str) -> Response:
    first, *lines = head.decode("latin-1").split("\r\n")
    pieces = first.split(" ", 2)
    if len(pieces) < 2 or not pieces[0].startswith("HTTP/1.") or not pieces[1].isdigit():
        raise HttpError(f"{first[:80]!r} is not the first line of an HTTP answer.")
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Response(int(pieces[1]), headers, reader, method)


async def server_sent_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data` of each event, as soon as its line is complete. Comments and other fields are passed over."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()
