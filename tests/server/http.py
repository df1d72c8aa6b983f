"""Talking to the application in process: a client, and readers of what comes back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from octavo.config.server_args import ServerArgs
from octavo.metrics import StatCollector
from octavo.server.app import Application, build_app
from tests.server.fake_engine import FakeEngine


def make_app(engine: FakeEngine | None = None, stats: StatCollector | None = None, **args: Any) -> Application:
    return build_app(engine or FakeEngine(), ServerArgs(**args), stats)


@asynccontextmanager
async def client_of(
    engine: FakeEngine | None = None,
    *,
    app: Application | None = None,
    headers: dict[str, str] | None = None,
    **args: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app or make_app(engine, **args))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


def strict_json(text: str | bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


def events(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; the last is "[DONE]"."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = []
    for block in blocks:
        assert block.startswith("data: ") and "\n" not in block
        word = block.removeprefix("data: ")
        data.append(word if word == "[DONE]" else strict_json(word))
    assert data.pop() == "[DONE]"
    return data


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer that must have this status and the OpenAI error body."""
    assert response.status_code == status, response.text
    body = strict_json(response.content)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def chat_body(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


class RawCall:
    """One request below HTTP, to hang up in the middle of it."""

    def __init__(self, app: Application, path: str, body: dict[str, Any]):
        data = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
            "scheme": "http",
        }
        self.sent: list[dict[str, Any]] = []
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": data, "more_body": False})
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()
