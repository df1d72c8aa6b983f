"""Slices of benchmarks/fuzz_http.py and benchmarks/mixed_load.py against a tiny real engine, and what they would notice."""

import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from octavo.server.docs import openapi

SCRIPTS = ("live_server", "fuzz_http", "mixed_load")


@pytest.fixture
def scripts(monkeypatch):
    """The scripts as modules, which import each other from their folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield {name: importlib.import_module(name) for name in SCRIPTS}
    for name in SCRIPTS:
        sys.modules.pop(name)


@pytest.fixture
def fuzz_http(scripts) -> ModuleType:
    return scripts["fuzz_http"]


def test_mutated_bodies(fuzz_http, tiny_llama_dir, capsys):
    """No 5xx, no hang, no leak, and the known good request answers after each batch."""
    words = ["--model", str(tiny_llama_dir), "--bodies", "200", "--batch", "100", "--seed", "1"]
    status = fuzz_http.main(words)
    said = capsys.readouterr().out
    assert status == 0, said
    assert "200 bodies" in said and "0 failures" in said


def test_mixed_load(scripts, tiny_llama_dir, capsys):
    """Everything clients do at once, hanging up included, leaves nothing behind."""
    words = ["--model", str(tiny_llama_dir), "--duration", "4", "--concurrency", "8", "--every", "4"]
    status = scripts["mixed_load"].main(words)
    said = capsys.readouterr().out
    assert status == 0, said
    assert "free blocks: 100%" in said and "0 promises broken" in said


def test_a_shot_is_the_same_every_time(fuzz_http):
    fields = {path: ["model", "prompt"] for path in openapi()["paths"] if path in fuzz_http.GOOD}
    first, second = fuzz_http.Mutator(3, fields), fuzz_http.Mutator(3, fields)
    later = [second.shot(number).message() for number in reversed(range(60))]
    assert [first.shot(number).message() for number in range(60)] == later[::-1]
    assert len(set(later)) > 50


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((500, "application/json", b"{}"), "status 500"),
        ((503, "application/json", b'{"error": {"message": "m", "type": "t"}}'), None),
        ((400, "application/json", b'{"error": {"message": "m", "type": "t"}}'), None),
        ((400, "application/json", b'{"error": {"message": "", "type": "t"}}'), "without words"),
        ((404, "text/plain", b"no"), "not right"),
        ((200, "application/json", b'{"x": NaN}'), "not right"),
        ((200, "text/event-stream", b'data: {"choices": []}\n\ndata: [DONE]\n\n'), None),
        ((200, "text/event-stream", b'data: {"choices": []}\n\n'), "a stream that ends with"),
        ((200, "text/event-stream", b'data: {"error": {"type": "server_error"}}\n\ndata: [DONE]\n\n'), "in the stream"),
        ((200, "text/event-stream", b'event: x\ndata: {"type": "message_stop"}\n\n'), None),
        ((200, "text/event-stream", b'data: {"type": "error", "error": {"type": "api_error"}}\n\n'), "in the stream"),
        (None, "closed"),
    ],
)
def test_what_the_fuzzer_notices(fuzz_http, answer, problem):
    found = fuzz_http.judge(fuzz_http.Shot("/v1/completions", "/v1/completions", {"prompt": "a"}), answer)
    assert (found is None) if problem is None else (problem in found)


def test_what_the_load_notices(scripts):
    mix = scripts["mixed_load"].Mix(None, "m", 256, seed=0)
    body = {"n": 2}
    good = {"choices": [{"index": i, "finish_reason": "stop", "token_ids": [1, 2]} for i in (0, 1)]}
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    mix.check(body, [good | {"usage": usage}])
    assert mix.broken == [] and mix.used == {"prompt": 3, "generation": 4}
    mix.check(body, [good | {"usage": usage | {"completion_tokens": 5}}])
    mix.check(body, [{"choices": good["choices"][:1], "usage": usage | {"completion_tokens": 2}}])
    mix.check(body, [{"error": {"message": "it broke"}}])
    assert [word in message for word, message in zip(("usage says", "ended", "failed"), mix.broken, strict=True)] == [
        True
    ] * 3


def test_mixed_bodies_are_right(scripts):
    """Every body that the load calls right has only fields of its route."""
    mixed_load = scripts["mixed_load"]
    described = openapi()
    mix = mixed_load.Mix(None, "m", 256, seed=0)
    mix.rng = random.Random(0)
    for _ in range(50):
        path, body = mix.body()
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        known = described["components"]["schemas"][schema.rsplit("/", 1)[-1]]["properties"]
        assert body.keys() <= known.keys(), json.dumps(body)
