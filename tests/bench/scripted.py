"""Clocks and servers that do what a test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octavo.bench.http_client import HttpClient
from octavo.config.server_args import ServerArgs
from octavo.server.app import build_app
from octavo.server.launch import bound_socket, make_server
from tests.server.fake_engine import FakeEngine


class Clock:
    """Stands in for a module's `time.perf_counter`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any):
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@asynccontextmanager
async def scripted_server(*answers: bytes | list[bytes]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """(base URL, requests so far). Connection i gets answer i to its first request and is closed after it."""
    requests: list[bytes] = []
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
        requests.append(head + body)
        answer = left.pop(0)
        for piece in [answer] if isinstance(answer, bytes) else answer:
            writer.write(piece)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


@asynccontextmanager
async def client_of(url: str, **options: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient(url, **options)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def fake_engine_server(engine: FakeEngine | None = None, **args: Any) -> AsyncIterator[str]:
    """The real server on a socket, around the scripted engine; its URL."""
    server_args = ServerArgs(port=0, disable_uvicorn_access_log=True, uvicorn_log_level="error", **args)
    started = asyncio.Event()
    with bound_socket(server_args) as listener:
        app = build_app(engine or FakeEngine(), server_args)
        server = make_server(app, server_args, started.set)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await started.wait()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task
