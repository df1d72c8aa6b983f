"""Streams that say they are alive while the engine has nothing to say."""

import asyncio

import pytest

from octavo.errors import ClientError
from tests.server.fake_engine import FakeEngine
from tests.server.http import RawCall, chat_body, client_of, make_app

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES = {
    CHAT: chat_body(stream=True),
    MESSAGES: chat_body(stream=True, max_tokens=20),
    RESPONSES: {"input": "Hi", "stream": True},
}
SIGNS = {CHAT: ": keep-alive\n\n", MESSAGES: "event: ping\n", RESPONSES: ": keep-alive\n\n"}


async def until(call: RawCall, sign: str, count: int) -> None:
    async with asyncio.timeout(20):
        while call.text.count(sign) < count:
            await asyncio.sleep(0)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("hold_after", [0, 3])
async def test_silence_is_filled(path, hold_after):
    """Before the first token and between two; what is said then is what would have been said anyway."""
    engine = FakeEngine(hold_after=hold_after)
    call = RawCall(make_app(engine, sse_keep_alive_interval=0.01), path, BODIES[path])
    await until(call, SIGNS[path], 3)
    assert call.status == 200
    engine.release.set()
    await call.task
    async with client_of() as client:
        plain = (await client.post(path, json=BODIES[path])).text
    filled = [block for block in call.text.split("\n\n") if "keep-alive" not in block and "ping" not in block]
    assert len(filled) == len([block for block in plain.split("\n\n") if "ping" not in block])


@pytest.mark.parametrize("hold_after", [0, 3])
async def test_hanging_up_in_the_silence_ends_the_request(hold_after):
    engine = FakeEngine(hold_after=hold_after)
    call = RawCall(make_app(engine, sse_keep_alive_interval=0.01), CHAT, BODIES[CHAT])
    await until(call, SIGNS[CHAT], 2)
    call.hang_up()
    await call.task
    assert engine.running == [] and len(engine.aborted) == 1


async def test_an_error_keeps_its_status_when_it_comes_in_time():
    engine = FakeEngine(fail_after=0, failure=ClientError("no."))
    async with client_of(engine, sse_keep_alive_interval=30.0) as client:
        assert (await client.post(CHAT, json=BODIES[CHAT])).status_code == 400


async def test_no_sign_without_the_option():
    engine = FakeEngine(hold_after=0)
    call = RawCall(make_app(engine), CHAT, BODIES[CHAT])
    await engine.reached.wait()
    assert call.status is None
    engine.release.set()
    await call.task
    assert "keep-alive" not in call.text
