"""Clients that send or read too slowly, and more of them than there is room for, over real sockets."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.server.app import Application, build_app
from octavo.server.launch import bound_socket, make_server
from tests.server.fake_engine import FakeEngine, make_config, say
from tests.server.http import chat_body, client_of, error_of, make_app

CHAT = "/v1/chat/completions"
PATIENCE = 30.0
SOON = 0.3


@asynccontextmanager
async def served(engine: FakeEngine | None = None, **options) -> AsyncIterator[tuple[int, Application]]:
    """The application on a real socket of this process; its port."""
    args = ServerArgs(port=0, **options)
    with bound_socket(args) as listener:
        app = build_app(engine or FakeEngine(), args)
        listening = asyncio.Event()
        server = make_server(app, args, listening.set)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait_for(listening.wait(), PATIENCE)
        try:
            yield listener.getsockname()[1], app
        finally:
            server.should_exit = server.force_exit = True
            await task


async def answer_to(port: int, *pieces: bytes) -> bytes:
    """Everything the server says before it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def is_well(port: int) -> bool:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        return (await client.post(CHAT, json=chat_body())).status_code == 200


@pytest.mark.parametrize(
    "pieces", [[], [b"GET /v1/mo"], [b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"]]
)
async def test_headers_that_do_not_come(pieces):
    async with served(client_stall_timeout=SOON) as (port, _):
        assert await answer_to(port, *pieces) == b""
        assert await is_well(port)


async def test_a_body_that_does_not_come():
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{".encode()
    async with served(client_stall_timeout=SOON) as (port, app):
        answer = await answer_to(port, head)
        assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer
        assert app.context.activity.num_active == 0
        assert await is_well(port)


async def test_a_reader_that_stops_reading_is_cut_off():
    """FC-122's relative: the request ends in the engine, and nothing piles up for its reader."""
    engine = FakeEngine(script=say("word " * 20), ends=False, config=make_config(max_model_len=1_000_000))
    body = json.dumps(chat_body(stream=True, max_tokens=60_000, ignore_eos=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with served(engine, client_stall_timeout=SOON) as (port, app):
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(lazy, ("127.0.0.1", port))
        await loop.sock_sendall(lazy, head.encode() + body)
        await asyncio.wait_for(engine.idle.wait(), PATIENCE)
        assert len(engine.aborted) == 1 and engine.running == []
        async with asyncio.timeout(PATIENCE):
            while app.context.activity.num_active:
                await asyncio.sleep(0)
        lazy.close()


async def test_a_reader_that_is_merely_slow_gets_everything():
    engine = FakeEngine(script=say("word " * 20), ends=False, config=make_config(max_model_len=1_000_000))
    async with (
        served(engine, client_stall_timeout=5.0) as (port, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        body = chat_body(stream=True, max_tokens=3000, ignore_eos=True)
        async with client.stream("POST", CHAT, json=body) as answer:
            text = ""
            async for piece in answer.aiter_text(100):
                text += piece
                await asyncio.sleep(0)
        assert text.count("data: ") > 3000 and text.endswith("[DONE]\n\n")


async def test_connections_are_bounded():
    async with served(max_connections=2) as (port, _):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in held:
            writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await writer.drain()
        for reader, _ in held:
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        answer = await answer_to(port)
        assert answer.startswith(b"HTTP/1.1 503") and b"too_many_connections" in answer
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["type"] == "service_unavailable_error"
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(PATIENCE):
            while b" 200 " not in await answer_to(port, b"GET /version HTTP/1.0\r\n\r\n"):
                pass


async def test_concurrency_of_a_key():
    engine = FakeEngine(hold_after=1)
    app = make_app(engine, api_key=["one", "two"], max_concurrency_per_key=2)

    async with client_of(app=app) as client:

        async def ask(key: str) -> httpx.Response:
            return await client.post(CHAT, json=chat_body(), headers={"authorization": f"Bearer {key}"})

        running = [asyncio.create_task(ask("one")) for _ in range(2)]
        while len(engine.running) < 2:
            await asyncio.sleep(0)
        refused = await ask("one")
        assert error_of(refused, 429)["code"] == "too_many_requests" and refused.headers["retry-after"] == "1"
        other = asyncio.create_task(ask("two"))
        while len(engine.running) < 3:
            await asyncio.sleep(0)
        engine.release.set()
        assert {r.status_code for r in await asyncio.gather(*running, other)} == {200}
        assert (await ask("one")).status_code == 200


def test_concurrency_by_key_needs_keys():
    with pytest.raises(ConfigError, match="set api_key"):
        make_app(max_concurrency_per_key=1)
