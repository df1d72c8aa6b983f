"""The server as a process on a socket: addresses, the official client, signals."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import ssl
import stat
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.server.http_protocol import MAX_HEADER_BYTES
from octavo.server.launch import _announce, bound_socket, run_server
from tests.server.certificates import make_certificates
from tests.server.http import chat_body

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def process(args: dict | None = None, **engine: int) -> AsyncIterator[tuple[Process, str]]:
    """The process and its base URL; killed at the end when it still runs."""
    words = (json.dumps({"port": 0, **(args or {})}), json.dumps(engine))
    running = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.server.serve_fake", *words, stdout=PIPE)
    try:
        yield running, f"http://127.0.0.1:{await said(running, 'ready')}"
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def said(running: Process, word: str) -> str:
    """What follows `word` on the next line of the process."""
    assert running.stdout is not None
    line = (await asyncio.wait_for(running.stdout.readline(), 60)).decode()
    assert line.startswith(word), line
    return line.removeprefix(word).strip()


async def ask_async(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=chat_body()["messages"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there"
        assert chunks[-1].usage.completion_tokens > 0
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nope", messages=chat_body()["messages"])


def ask_sync(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
        answer = client.chat.completions.create(
            model="tiny", messages=chat_body()["messages"], logprobs=True, top_logprobs=2, extra_body={"top_k": 5}
        )
        assert answer.choices[0].message.content == "Hello there"
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        text = client.completions.create(model="tiny", prompt=["a", "b"], stream=True, n=2)
        pieces: dict[int, str] = {}
        for chunk in text:
            pieces[chunk.choices[0].index] = pieces.get(chunk.choices[0].index, "") + chunk.choices[0].text
        assert pieces == dict.fromkeys(range(4), "Hello there")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


async def test_official_client_then_sigterm():
    """The openai client, sync, async and streaming; then SIGTERM with nothing running: exit 0 at once."""
    async with process({"api_key": "secret"}) as (running, url):
        await asyncio.to_thread(ask_sync, url)
        await ask_async(url)
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 10) == 0


async def test_sigterm_drains_then_cuts_off():
    """FC-162: new work 503 while an open stream goes on; the second signal ends it with a word, exit 0."""
    async with (
        process({"shutdown_timeout": 600}, hold_after=1) as (running, url),
        httpx.AsyncClient(base_url=url) as client,
    ):
        async with client.stream("POST", CHAT, json=chat_body(stream=True)) as stream:
            await said(running, "reached")
            running.send_signal(signal.SIGTERM)
            response = await client.post(CHAT, json=chat_body())
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            running.send_signal(signal.SIGINT)
            text = (await stream.aread()).decode()
        assert "shutting down" in text and text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(running.wait(), 10) == 0


async def test_hanging_up_over_a_real_socket():
    """FC-122: the server sees the closed connection of a call that is not streamed."""
    async with process(None, hold_after=1) as (running, url):
        async with httpx.AsyncClient(base_url=url) as client:
            call = asyncio.create_task(client.post(CHAT, json=chat_body()))
            await said(running, "reached")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        # With the call gone nothing is running, so even a long grace time ends at once.
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 10) == 0


async def test_sockets_take_no_code(tmp_path):
    """FC-167, and headers without end: the connection is closed, the server goes on, nothing is executed."""
    evidence = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return (open, (str(evidence), "w"))

    async with process() as (_, url):
        port = int(url.rsplit(":", 1)[1])
        for data in (pickle.dumps(Evil()), b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEADER_BYTES + (1 << 20))):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
    assert not evidence.exists()


async def test_unix_socket(tmp_path):
    """Only this user may open it, and it is gone when the server is."""
    path = str(tmp_path / "server.sock")
    async with process({"uds": path}) as (running, _):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://x") as client:
            assert (await client.get("/v1/models")).status_code == 200
        with pytest.raises(ConfigError, match="another server"), bound_socket(ServerArgs(uds=path)):
            pass
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 10) == 0
    assert not os.path.exists(path)


@pytest.mark.parametrize("asks_for_certificate", [False, True])
async def test_tls_with_and_without_client_certificates(tmp_path, asks_for_certificate):
    files = make_certificates(tmp_path)
    options = {"ssl_keyfile": files.key, "ssl_certfile": files.certificate}
    if asks_for_certificate:
        options |= {"ssl_ca_certs": files.authority, "ssl_cert_reqs": 2}
    trusting = ssl.create_default_context(cafile=files.authority)
    known = ssl.create_default_context(cafile=files.authority)
    known.load_cert_chain(files.client_certificate, files.client_key)
    async with process(options) as (_, url):
        url = url.replace("http://127.0.0.1", "https://localhost")
        async with httpx.AsyncClient(verify=known, base_url=url) as client:
            answer = (await client.post(CHAT, json=chat_body())).json()
            assert answer["choices"][0]["message"]["content"] == "Hello there"
        async with httpx.AsyncClient(verify=trusting, base_url=url) as client:
            if asks_for_certificate:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health")
            else:
                assert (await client.get("/health")).status_code == 200
        async with httpx.AsyncClient(base_url=url) as client:
            with pytest.raises(httpx.ConnectError):  # nobody it knows signed this
                await client.get("/health")
        async with httpx.AsyncClient(base_url=url.replace("https", "http")) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/health")


def test_stale_socket_file_is_replaced_and_other_files_are_not(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with bound_socket(ServerArgs(uds=str(path))):
        assert path.is_socket()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"), bound_socket(ServerArgs(uds=str(path))):
        pass
    assert path.read_text() == "mine"


def test_bad_tls_files_are_told_before_the_engine_starts(tmp_path):
    bad = tmp_path / "cert.pem"
    bad.write_text("no certificate")
    args = ServerArgs(ssl_certfile=str(bad), ssl_keyfile=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="TLS"):
        run_server(EngineArgs(model="/nowhere"), args)


def test_a_bad_key_file_is_told_before_the_engine_starts(tmp_path):
    args = ServerArgs(port=0, api_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="api_key_file"):
        run_server(EngineArgs(model="nothing"), args)


def test_busy_port_and_unknown_host():
    """FC-166: one line that says what and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another --port") as caught, bound_socket(ServerArgs(port=port)):
            pass
        assert "\n" not in str(caught.value) and str(port) in str(caught.value)
    with pytest.raises(ConfigError, match="resolved"), bound_socket(ServerArgs(host="no such host")):
        pass


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("127.0.0.1", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "k", False)]
)
def test_warning_when_open_to_others(host, key, warns, caplog):
    """FC-174."""
    args = ServerArgs(host=host, api_key=key, port=0)
    with bound_socket(args) as listener, caplog.at_level("INFO"):
        _announce(args, listener.getsockname())
    assert ("--api-key" in caplog.text) == warns
    assert str(listener.getsockname()[1] if listener.fileno() >= 0 else "") in caplog.text


def test_loopback_is_the_default():
    with bound_socket(ServerArgs(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
