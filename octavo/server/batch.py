"""A file of requests, one a line, through the routes of a server that listens nowhere.

Each line goes through the very application that `octavo serve` shows, so its body is checked and answered the same. Lines
are read as there is room for them and answers written as they are due: the file may be larger than memory.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Message

from octavo.errors import ClientError
from octavo.server.answers import encode
from octavo.server.app import Application

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    *(f"{prefix}/score" for prefix in ("", "/v1")),
    *(f"{prefix}/rerank" for prefix in ("", "/v1", "/v2")),
)
# Answers may wait for an earlier line's; this many times the lines that run.
ROOM = 8


class Line(msgspec.Struct):
    """One request of the file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


@dataclass
class Counts:
    """Lines that were answered with 200, and the others."""

    num_answered: int = 0
    num_failed: int = 0


class BatchRunner:
    """Runs lines through `app`, `max_concurrency` at a time; `write` gets each answer as one line of JSON."""

    def __init__(
        self,
        app: Application,
        write: Callable[[bytes], object],
        *,
        max_concurrency: int,
        keeps_order: bool,
        key: str | None,
    ):
        self.app = app
        self.write = write
        self.keeps_order = keeps_order
        self.key = key
        self.counts = Counts()
        self._running = asyncio.Semaphore(max_concurrency)
        self._room = asyncio.Semaphore(max_concurrency * ROOM)
        self._urls = {getattr(route, "path", "") for route in app.routes} & set(URLS)
        self._seen: set[str] = set()
        self._waiting: dict[int, bytes] = {}  # answers whose turn has not come
        self._next = 0

    async def run(self, lines: Iterable[bytes]) -> Counts:
        """Answer every line that is not blank."""
        async with asyncio.TaskGroup() as tasks:
            for number, line in enumerate(line for line in lines if line.strip()):
                await self._room.acquire()
                tasks.create_task(self._run_line(number, line))
        return self.counts

    async def _run_line(self, number: int, line: bytes) -> None:
        async with self._running:
            answer = encode(await self._answer(number, line)) + b"\n"
        if not self.keeps_order:
            self.write(answer)
            self._room.release()
            return
        self._waiting[number] = answer
        while self._next in self._waiting:
            self.write(self._waiting.pop(self._next))
            self._next += 1
            self._room.release()

    async def _answer(self, number: int, text: bytes) -> dict[str, Any]:
        """The output line: the route's response, or the error of a line that no route can take."""
        answer: dict[str, Any] = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": None,
            "response": None,
            "error": None,
        }
        try:
            line = self._read(text, answer)
        except ClientError as error:
            self.counts.num_failed += 1
            return answer | {"error": {"code": "invalid_line", "message": f"line {number + 1}: {error}"}}
        status, body = await self._post(line.url, encode(line.body), answer["id"])
        if status == 200:
            self.counts.num_answered += 1
        else:
            self.counts.num_failed += 1
        return answer | {"response": {"status_code": status, "request_id": answer["id"], "body": msgspec.Raw(body)}}

    def _read(self, text: bytes, answer: dict[str, Any]) -> Line:
        try:
            fields = msgspec.json.decode(text)
            if isinstance(fields, dict) and isinstance(fields.get("custom_id"), str):
                answer["custom_id"] = fields["custom_id"]
            line = msgspec.convert(fields, Line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ClientError(f"{error}.") from None
        if line.custom_id in self._seen:
            raise ClientError(f"custom_id {line.custom_id!r} was used before.")
        self._seen.add(line.custom_id)
        if line.method != "POST":
            raise ClientError(f"method {line.method!r} is not POST.")
        if line.url not in self._urls:
            raise ClientError(f"url {line.url!r} is not one of {', '.join(sorted(self._urls))}.")
        if line.body.get("stream"):
            raise ClientError("the answer cannot be streamed; leave stream out of the body.")
        return line

    async def _post(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """Call the application as its HTTP server would."""
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        if self.key is not None:
            headers.append((b"authorization", b"Bearer " + self.key.encode()))
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": headers,
            "query_string": b"",
            "root_path": "",
        }
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, pieces = 500, []

        async def receive() -> Message:
            if not request:
                await asyncio.Event().wait()  # nobody hangs up
            return request.pop()

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                pieces.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return status, b"".join(pieces)
