"""What a request's result says of its answer: times on a scripted clock, tokens, failures."""

import json
from typing import Any

import pytest

from octavo.bench import backends
from octavo.bench.backends import BACKENDS, RequestResult, _Answer, send_request
from octavo.bench.datasets import Sample
from octavo.bench.serving_metrics import tpot
from tests.bench.scripted import Clock, client_of, fake_engine_server, scripted_server
from tests.server.fake_engine import FakeEngine, say


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


DONE = b"[DONE]"


async def follow(monkeypatch: pytest.MonkeyPatch, *script: tuple[float, Any]) -> RequestResult:
    """The result of a stream whose events come at these seconds after the start."""
    clock = Clock(monkeypatch, backends)
    result = RequestResult(prompt_len=7, start=clock.now)

    async def pieces():
        for moment, content in script:
            clock.now = 100.0 + moment
            yield event(content)

    await _Answer(result).follow_stream(pieces())
    return result


async def test_times_of_a_completion(monkeypatch: pytest.MonkeyPatch):
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
    result = await follow(
        monkeypatch, (0.5, text("a")), (0.75, text("b")), (1.5, text("c", "length")), (2.0, usage), (3.0, DONE)
    )
    assert (result.ttft, result.itls, result.latency) == (0.5, [0.25, 0.75], 1.5)
    assert (result.text, result.output_len, result.prompt_len, result.error) == ("abc", 5, 9, "")
    assert tpot(result) == (1.5 - 0.5) / (5 - 1)


async def test_times_of_a_chat_leave_out_the_role_and_count_reasoning(monkeypatch: pytest.MonkeyPatch):
    result = await follow(
        monkeypatch,
        (0.1, delta(role="assistant", content="")),
        (1.0, delta(reasoning_content="hm")),
        (1.5, delta(content="yes")),
        (2.0, delta("stop")),
        (2.5, DONE),
    )
    assert (result.ttft, result.itls, result.latency) == (1.0, [0.5], 2.0)
    assert result.text == "hmyes"
    assert result.output_len == 2  # without a usage, pieces are counted


async def test_an_answer_without_text_is_an_answer(monkeypatch: pytest.MonkeyPatch):
    result = await follow(monkeypatch, (0.5, text("", "stop")), (0.6, DONE))
    assert (result.ttft, result.latency, result.itls, result.error) == (0.5, 0.5, [], "")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([(0.5, text("a"))], "the stream ended before the answer did"),
        ([(0.5, DONE)], "the stream held no choice"),
        ([(0.5, text("a")), (1.0, {"error": {"message": "out of luck"}})], "in the stream: out of luck"),
    ],
)
async def test_streams_that_fail(monkeypatch: pytest.MonkeyPatch, script: list, error: str):
    assert (await follow(monkeypatch, *script)).error == error


def body_of(backend: str, stream: bool = True, **options: Any) -> dict[str, Any]:
    return BACKENDS[backend].body(Sample("Hi", 2, 30), "tiny", stream, options)


def test_bodies():
    assert body_of("openai", top_k=3) == {
        "model": "tiny",
        "prompt": "Hi",
        "max_tokens": 30,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }
    assert body_of("openai-chat", stream=False) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 30,
    }


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@pytest.mark.parametrize("stream", [True, False])
async def test_against_the_server(backend: str, stream: bool):
    engine = FakeEngine(script=say("Hello there"))
    async with fake_engine_server(engine) as url, client_of(url) as client:
        result = await send_request(client, BACKENDS[backend].endpoint, body_of(backend, stream), 2)
    assert result.success, result.error
    assert result.text == "Hello there"
    tokens = len(engine.tokenizer.encode("Hello there", add_special_tokens=False)) + 1  # and the end token
    assert result.output_len == tokens
    assert result.prompt_len == len(engine.prompts[0])
    if stream:
        assert result.ttft is not None and len(result.itls) == tokens - 2
        assert result.latency is not None and result.latency >= result.ttft + sum(result.itls) - 1e-9
    else:
        assert result.ttft is None and result.itls == []


async def test_failures_are_results():
    async with fake_engine_server() as url, client_of(url) as client:
        result = await send_request(client, "/v1/completions", body_of("openai") | {"model": "nope"}, 2)
        assert not result.success and result.error.startswith("status 404: ") and "nope" in result.error
    result = await send_request(client, "/v1/completions", body_of("openai"), 2)  # nobody listens any more
    assert not result.success and "refused" in result.error.lower()
    broken = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 12\r\n\r\ndata: {oh no"
    async with scripted_server(broken) as (url, _), client_of(url) as client:
        result = await send_request(client, "/v1/completions", body_of("openai"), 2)
        assert not result.success and result.error.startswith("DecodeError")
