"""`octavo bench serve` against the real server around a scripted engine: what it sends, prints and writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import serve
from octavo.bench.serve import (
    DETAIL_KEYS,
    ServeBench,
    ServerUnreachableError,
    _draft_summary,
    _result_path,
    read_draft_counts,
    render,
)
from octavo.bench.serve_args import ServeBenchArgs
from octavo.errors import ClientError, ConfigError
from octavo.types.sampling_params import SamplingParams
from tests.bench.scripted import fake_engine_server
from tests.server.fake_engine import FakeEngine

SUMMARY_KEYS = {
    *("date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}


@pytest.fixture
def options(tiny_llama_dir: Path) -> dict[str, Any]:
    return {
        "tokenizer": str(tiny_llama_dir),
        "num_prompts": 12,
        "random_input_len": 10,
        "random_output_len": 5,
        "disable_tqdm": True,
    }


async def bench(url: str, **args: Any) -> dict[str, Any]:
    return await ServeBench(ServeBenchArgs(base_url=url, **args)).run()


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_a_run(options: dict[str, Any], backend: str):
    engine = FakeEngine()
    async with fake_engine_server(engine, api_key="secret") as url:
        result = await bench(
            url,
            **options,
            backend=backend,
            api_key="secret",
            max_concurrency=3,
            goodput=["e2el:100000"],
            metadata=["commit=abc"],
            num_warmups=2,
            ready_check_timeout_sec=5,
            temperature=0.5,
            extra_body={"seed": 7},
        )
    assert set(result) == SUMMARY_KEYS | DETAIL_KEYS | {"commit"}
    assert (result["completed"], result["failed"], result["model_id"]) == (12, 0, "tiny")
    assert result["total_output_tokens"] == sum(result["output_lens"]) == 12 * 5
    assert result["request_goodput"] == result["request_throughput"] == 12 / result["duration"]
    assert result["max_concurrent_requests"] <= 3
    assert all(len(result[key]) == 12 for key in DETAIL_KEYS)
    assert len(engine.params) == 12 + 2 + 1  # warm-ups and the ready check are not in the result
    assert {(p.temperature, p.seed, p.max_tokens) for p in engine.params} == {(0.5, 7, 5)}
    table = render(result, ["ttft", "e2el"])
    assert "Successful requests:                     12" in table
    assert "P99 TTFT (ms):" in table and "Mean E2EL (ms):" in table and "ITL" not in table


async def test_failures_are_counted_and_the_rest_measured(options: dict[str, Any]):
    def script(prompt: list[int], params: SamplingParams, index: int) -> str:
        if prompt[-1] % 2:
            raise ClientError("an odd prompt.")
        return "even"

    async with fake_engine_server(FakeEngine(script=script)) as url:
        result = await bench(url, **options | {"num_prompts": 40})
    failed = [error for error in result["errors"] if error]
    assert 0 < len(failed) < 40 and all("an odd prompt" in error for error in failed)
    assert (result["completed"], result["failed"]) == (40 - len(failed), len(failed))
    assert result["total_output_tokens"] == sum(
        tokens for tokens, error in zip(result["output_lens"], result["errors"], strict=True) if not error
    )


async def test_no_stream_leaves_token_times_unknown(options: dict[str, Any]):
    async with fake_engine_server() as url:
        result = await bench(url, **options, no_stream=True)
    assert result["completed"] == 12 and result["mean_ttft_ms"] is None and result["mean_e2el_ms"] > 0


async def test_a_server_that_is_not_one(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "READY_CHECK_SECONDS", 100.0)
    async with fake_engine_server() as url:
        with pytest.raises(ServerUnreachableError, match="was not ready within 5 s; the last answer was: status 404"):
            await bench(url, **options, model="nope", ready_check_timeout_sec=5)
        with pytest.raises(ServerUnreachableError, match="/other/v1/models answers 404"):
            await bench(url + "/other", **options)
    with pytest.raises(ServerUnreachableError, match="no server answers"):
        await bench(url, **options)


async def test_adapters_take_turns(options: dict[str, Any]):
    async with fake_engine_server() as url:
        result = await bench(url, **options, lora_modules=["tiny", "nope"], lora_assignment="round-robin")
    assert [bool(error) for error in result["errors"]] == [False, True] * 6


def test_what_is_written(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    content: dict[str, Any] = {
        **dict.fromkeys(SUMMARY_KEYS),
        **{key: [1] for key in DETAIL_KEYS},
        "completed": 1,
        "errors": ["", "status 500: no"],
        "model_id": "org/tiny",
        "request_rate": 2.5,
        "date": "20260102-030405",
    }

    async def run(self: ServeBench) -> dict[str, Any]:
        return content

    monkeypatch.setattr(ServeBench, "run", run)
    common = {"result_dir": str(tmp_path / "new"), "max_concurrency": 4}
    assert serve.run_serve(ServeBenchArgs(**common, save_result=True)) == 0
    path = tmp_path / "new" / "openai-2.5qps-concurrency4-tiny-20260102-030405.json"
    assert set(json.loads(path.read_text())) == SUMMARY_KEYS
    assert str(path) in capsys.readouterr().out
    serve.run_serve(ServeBenchArgs(**common, save_detailed=True, result_filename="all.json"))
    assert set(json.loads((tmp_path / "new" / "all.json").read_text())) == SUMMARY_KEYS | DETAIL_KEYS
    for _ in range(2):
        serve.run_serve(ServeBenchArgs(**common, append_result=True, result_filename="lines.jsonl"))
    lines = (tmp_path / "new" / "lines.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(json.loads(line)["model_id"] == "org/tiny" for line in lines)
    content["completed"] = 0
    assert serve.run_serve(ServeBenchArgs(**common)) == 1
    ramp = ServeBenchArgs(label="x", ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=2)
    assert _result_path(ramp, content).name == "x-ramp-up-linearqps-tiny-20260102-030405.json"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"request_rate": "0"}, "request_rate='0'"),
        ({"request_rate": "fast"}, "request_rate='fast'"),
        ({"burstiness": 0.0}, "burstiness=0.0"),
        ({"percentile_metrics": "ttft,speed"}, "names speed; there are ttft, tpot, itl, e2el"),
        ({"metric_percentiles": "99,101"}, "metric_percentiles"),
        ({"goodput": ["itl:3"]}, "goodput='itl:3'"),
        ({"header": ["X"]}, "header='X'"),
        ({"metadata": ["=3"]}, "metadata='=3'"),
        ({"ramp_up_start_rps": 1}, "need ramp_up_strategy"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1}, "needs ramp_up_start_rps and ramp_up_end_rps"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2, "request_rate": "3"},
            "replaces request_rate",
        ),
        ({"timeline_itl_thresholds": "50,25"}, "two numbers, rising"),
        ({"backend": "openai-embeddings"}, "must be one of"),
        ({"custom_output_len": 0}, "custom_output_len=0"),
    ],
)
def test_wrong_options_are_named(args: dict[str, Any], message: str):
    with pytest.raises((ClientError, ConfigError), match=message):
        ServeBenchArgs(**args)


def test_request_options():
    args = ServeBenchArgs(ignore_eos=True, top_k=0, logprobs=2, extra_body={"ignore_eos": False})
    assert args.request_options() == {"ignore_eos": False, "top_k": 0, "logprobs": 2}
    chat = ServeBenchArgs(backend="openai-chat", logprobs=2, chat_template_kwargs={"a": 1})
    assert chat.request_options() == {"logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"a": 1}}
    assert ServeBenchArgs(host="::1", port=9).url() == "http://[::1]:9"


def test_speculative_decoding_from_the_metrics():
    page = """# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0
"""
    after = read_draft_counts(page)
    assert after == {"drafts": 20.0, "draft_tokens": 60.0, "accepted_tokens": 30.0}
    before = {"drafts": 10.0, "draft_tokens": 20.0, "accepted_tokens": 10.0}
    summary = _draft_summary(before, after)
    assert summary["spec_decode_acceptance_rate"] == 50.0
    assert summary["spec_decode_acceptance_length"] == 1 + 20 / 10
    assert _draft_summary(after, after) == {} and read_draft_counts("vllm:other 1\n") == {}
