"""Benchmarks that run an engine: `latency`, `throughput`, `startup`, on a random model of two layers."""

import json
import os
from pathlib import Path

import pytest

from octavo import cli
from octavo.bench import startup
from octavo.bench.startup import drop_from_page_cache, measure_start, phases_of, summarize_starts
from octavo.bench.throughput import summarize_throughput
from octavo.errors import ServerError
from octavo.types.outputs import CompletionOutput, RequestOutput


def test_latency(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "latency.json"
    words = [
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--num-iters",
        "5",
        "--num-iters-warmup",
        "1",
    ]
    assert cli.main(["bench", "latency", str(tiny_llama_dir), *words, "--output-json", str(path)]) == 0
    result = json.loads(path.read_text())
    latencies = result["latencies"]
    assert len(latencies) == 5 and result["avg_latency"] == pytest.approx(sum(latencies) / 5)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert result["percentiles"]["50"] == sorted(latencies)[2]
    for total, first, step in zip(
        latencies, result["first_token_latencies"], result["decode_step_latencies"], strict=True
    ):
        assert 0 < first < total and step == pytest.approx((total - first) / 3)
    assert f"Avg latency: {result['avg_latency']} seconds" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [[], ["--skip-tokenizer-init"], ["--backend", "vllm-chat", "--n", "2"]])
def test_throughput(tiny_llama_dir: Path, tmp_path: Path, extra: list[str], capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "throughput.json"
    words = ["--input-len", "8", "--output-len", "3", "--num-prompts", "5", "--num-warmups", "1"]
    assert cli.main(["bench", "throughput", str(tiny_llama_dir), *words, *extra, "--output-json", str(path)]) == 0
    result = json.loads(path.read_text())
    answers = 2 if "--n" in extra else 1
    assert result["num_requests"] == 5 and result["num_output_tokens"] == 5 * 3 * answers
    assert result["total_num_tokens"] == result["num_prompt_tokens"] + result["num_output_tokens"]
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert capsys.readouterr().out.startswith("Throughput: ")


def test_throughput_through_the_asynchronous_engine(tiny_llama_dir: Path, tmp_path: Path):
    path = tmp_path / "throughput.json"
    words = ["--input-len", "8", "--output-len", "3", "--num-prompts", "5", "--num-warmups", "2", "--async-engine"]
    assert cli.main(["bench", "throughput", str(tiny_llama_dir), *words, "--output-json", str(path)]) == 0
    assert json.loads(path.read_text())["num_output_tokens"] == 15


def test_a_failed_request_ends_the_benchmark():
    output = RequestOutput("7", None, [1], [CompletionOutput(0, "", [])], True, error="out of luck")
    with pytest.raises(ServerError, match="request 7 of the benchmark failed: out of luck"):
        summarize_throughput([output], 1.0)


def test_a_real_start(tiny_llama_dir: Path, tmp_path: Path):
    phases = measure_start({"model": str(tiny_llama_dir), "enforce_eager": True}, str(tmp_path))
    total = phases.pop("total")
    assert sum(phases.values()) == pytest.approx(total)
    assert min(phases["interpreter"], phases["imports"], phases["first token"]) > 0


def test_cold_starts_have_empty_caches_and_warm_ones_share_theirs(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folders, dropped = [], []

    def fake_start(options: dict, folder: str) -> dict[str, float]:
        assert options == {"model": str(tiny_llama_dir), "enforce_eager": True}
        folders.append((folder, os.listdir(folder)))
        Path(folder, "kernel").touch()
        return {"imports": 1.0, "total": float(len(folders))}

    monkeypatch.setattr(startup, "measure_start", fake_start)
    monkeypatch.setattr(startup, "drop_from_page_cache", dropped.append)
    path = tmp_path / "startup.json"
    words = ["--num-iters-cold", "2", "--num-iters-warmup", "1", "--num-iters-warm", "2", "--output-json", str(path)]
    assert cli.main(["bench", "startup", str(tiny_llama_dir), "--enforce-eager", *words]) == 0
    assert [files for _, files in folders] == [[], [], [], ["kernel"], ["kernel"]]
    assert len({folder for folder, _ in folders}) == 3
    assert dropped == [tiny_llama_dir.resolve()] * 2
    result = json.loads(path.read_text())
    assert (result["cold_startup_times"], result["avg_cold_startup_time"]) == ([1.0, 2.0], 1.5)
    assert (result["warm_startup_times"], result["warm_phases"]) == ([4.0, 5.0], {"imports": 1.0, "total": 4.5})
    assert "Cold start, median of 2 (s)" in capsys.readouterr().out


def test_a_start_that_fails_says_why(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--num-iters-cold", "1", "--max-model-len", "9999999"]
    assert cli.main(["bench", "startup", str(tiny_llama_dir), *words]) == 1
    assert "the engine did not start: " in (text := capsys.readouterr().err) and "max_model_len" in text


def test_phases_of_scripted_stamps():
    stamps = {"entered": 10.5, "imported": 12.0, "started": 15.0, "answered": 15.25}
    phases = phases_of(10.0, {"stamps": stamps, "engine": {"load_model": 1.0, "kv_cache": 0.5}})
    assert phases == {
        "interpreter": 0.5,
        "imports": 1.5,
        "load_model": 1.0,
        "kv_cache": 0.5,
        "other": 1.5,
        "first token": 0.25,
        "total": 5.25,
    }
    summary = summarize_starts("warm", [phases, {**phases, "total": 7.25}])
    assert summary["avg_warm_startup_time"] == 6.25 and summary["warm_startup_percentiles"]["50"] == 6.25
    assert summary["warm_phases"]["imports"] == 1.5


def test_dropping_from_the_page_cache_changes_no_file(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights").write_bytes(b"abc")
    drop_from_page_cache(tmp_path)
    assert (tmp_path / "sub" / "weights").read_bytes() == b"abc"
