"""What happens when things break or people leave: faults, hang-ups, shutdown (FC-019, FC-122, FC-156, FC-161, FC-162)."""

import asyncio

import httpx
import openai
import pytest

from octavo.errors import EngineDeadError, QueueFullError, RequestFailedError
from octavo.server.launch import drain
from tests.server.fake_engine import FakeEngine
from tests.server.http import RawCall, chat_body, client_of, error_of, make_app, strict_json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALLS = [(CHAT, chat_body()), (CHAT, chat_body(n=3)), (TEXT, {"prompt": "a"}), (TEXT, {"prompt": ["a", "b"], "n": 2})]


def blocks(response: httpx.Response) -> list[str]:
    return [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("fail_after", [0, 2])
@pytest.mark.parametrize(
    "failure", [RequestFailedError("the step failed."), EngineDeadError("the engine core is gone.")]
)
async def test_fault_in_the_engine(path, body, fail_after, failure):
    """Whole: the status says it. Streamed: an error event, then the end."""
    engine = FakeEngine(fail_after=fail_after, failure=failure)
    status = 503 if isinstance(failure, EngineDeadError) else 500
    async with client_of(engine) as client:
        whole = error_of(await client.post(path, json=body), status)
        streamed = await client.post(path, json={**body, "stream": True})
    assert streamed.status_code == 200
    *_, error, done = blocks(streamed)
    assert strict_json(error) == {"error": whole}
    assert done == "[DONE]"
    assert whole["message"] == str(failure)
    assert engine.running == []


async def test_the_official_client_raises_in_the_stream():
    """FC-019."""
    app = make_app(FakeEngine(fail_after=2))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
    async with openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="x", http_client=http, max_retries=0
    ) as client:
        stream = await client.chat.completions.create(model="tiny", messages=chat_body()["messages"], stream=True)
        with pytest.raises(openai.APIError, match="core is gone"):
            async for _ in stream:
                pass


async def test_unforeseen_faults_keep_their_words_to_themselves(caplog):
    """The trace is logged; the client learns neither path nor address."""
    engine = FakeEngine(fail_after=0, failure=OSError(2, "No such file", "/secret/place"))
    async with client_of(engine) as client:
        whole = error_of(await client.post(CHAT, json=chat_body()), 500)
        streamed = error_of(await client.post(CHAT, json=chat_body(stream=True)), 500)
    assert whole == streamed
    assert "secret" not in whole["message"]


async def test_full_queue():
    engine = FakeEngine(fail_after=0, failure=QueueFullError("500 requests are waiting."))
    async with client_of(engine) as client:
        for stream in (False, True):
            response = await client.post(CHAT, json=chat_body(stream=stream))
            assert error_of(response, 429)["code"] == "queue_full"
            assert response.headers["retry-after"] == "1"
        assert 'vllm:admission_rejections_total{reason="queue_full"} 2.0' in (await client.get("/metrics")).text


async def test_dead_engine():
    """FC-161."""
    engine = FakeEngine()
    engine.dead = True
    async with client_of(engine) as client:
        for path in ("/health", "/ping"):
            assert error_of(await client.get(path), 503)["code"] == "engine_dead"
        error_of(await client.post(CHAT, json=chat_body()), 503)
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 2])
async def test_hanging_up_aborts(path, body, stream, hold_after):
    """FC-122: whole and streamed, before the first token and after it, with several choices and prompts."""
    engine = FakeEngine(hold_after=hold_after)
    app = make_app(engine)
    call = RawCall(app, path, {**body, "stream": stream})
    await engine.reached.wait()
    assert app.context.activity.num_active == 1
    call.hang_up()
    await call.task
    assert engine.running == []
    assert len(engine.aborted) == (2 if isinstance(body.get("prompt"), list) else 1)
    assert app.context.activity.num_active == 0
    assert "[DONE]" not in call.text


async def test_stop_ends_what_runs_with_a_word():
    """FC-162: after the grace time a stream gets an error event, a whole answer 503, and new work 503."""
    engine = FakeEngine(hold_after=1)
    app = make_app(engine)
    stream = RawCall(app, CHAT, chat_body(stream=True))
    whole = RawCall(app, CHAT, chat_body())
    while len(engine.running) < 2:
        await asyncio.sleep(0)
    await engine.reached.wait()
    await drain(app.context.activity, 0.0, asyncio.Event())
    await asyncio.gather(stream.task, whole.task)
    assert stream.status == 200 and "shutting down" in stream.text and stream.text.endswith("data: [DONE]\n\n")
    assert whole.status == 503 and "shutting down" in whole.text
    assert len(engine.aborted) == 2


async def test_drain_lets_running_requests_end():
    """FC-162: new work is refused, running work ends, health goes on answering."""
    engine = FakeEngine(hold_after=1)
    app = make_app(engine)
    async with client_of(app=app) as client:
        running = asyncio.create_task(client.post(CHAT, json=chat_body()))
        await engine.reached.wait()
        draining = asyncio.create_task(drain(app.context.activity, 60, asyncio.Event()))
        while not app.context.activity.draining:
            await asyncio.sleep(0)
        refused = await client.post(CHAT, json=chat_body())
        assert error_of(refused, 503)["code"] == "shutting_down"
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        assert (await client.get("/health")).status_code == (await client.get("/health/live")).status_code == 200
        assert error_of(await client.get("/health/ready"), 503)["code"] == "shutting_down"
        engine.release.set()
        await draining
        assert (await running).json()["choices"][0]["message"]["content"] == "Hello there"
    assert engine.aborted == []


async def test_second_signal_skips_the_grace_time():
    engine = FakeEngine(hold_after=1)
    app = make_app(engine)
    call = RawCall(app, CHAT, chat_body())
    await engine.reached.wait()
    hurried = asyncio.Event()
    draining = asyncio.create_task(drain(app.context.activity, 3600, hurried))
    hurried.set()
    await asyncio.wait_for(draining, 10)
    await call.task
    assert call.status == 503


async def test_a_neighbours_mistakes_do_not_disturb_a_stream():
    """FC-009: a stream runs while bad requests are refused; it is the same as a quiet one."""
    engine = FakeEngine(hold_after=2)
    async with client_of(engine) as client:
        call = asyncio.create_task(client.post(TEXT, json={"prompt": "a", "stream": True}))
        await engine.reached.wait()
        for prompt in ([5, 999999], [-1], [1.5], [[5], [9999]]):
            error_of(await client.post(TEXT, json={"prompt": prompt}), 400)
        engine.release.set()
        disturbed = blocks(await call)
        quiet = blocks(await client.post(TEXT, json={"prompt": "a", "stream": True}))
    texts = [[strict_json(block)["choices"][0] for block in run[:-1]] for run in (disturbed, quiet)]
    assert texts[0] == texts[1]
