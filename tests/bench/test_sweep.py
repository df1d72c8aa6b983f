"""Sweeps: combinations, commands, servers that come and go, resuming, the summary. Servers and benchmarks are tiny scripts."""

import csv
import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import sweep
from octavo.bench.sweep import Combination, SweepArgs, read_params, run_sweep
from octavo.errors import ClientError, ConfigError, ServerError

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
if "--broken" in sys.argv:
    sys.exit(3)
print("serving", *sys.argv[2:], flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BENCH = """
import json, pathlib, sys
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
with open("calls.txt", "a") as calls:
    calls.write(" ".join(words) + chr(10))
if value("--max-concurrency") == "13":
    sys.exit(1)
result = {"max_concurrency": int(value("--max-concurrency")), "output_throughput": 2.5, "errors": ["x"]}
pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(result))
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "serve_cmd": shlex.join([sys.executable, "-c", SERVER, str(port)]),
        "bench_cmd": shlex.join([sys.executable, "-c", BENCH]),
        "health_url": f"http://127.0.0.1:{port}/health",
        "experiment_name": "try",
        "num_runs": 2,
    }


def params(name: str, content: Any) -> str:
    Path(name).write_text(json.dumps(content))
    return name


def calls() -> int:
    return len(Path("calls.txt").read_text().splitlines())


def test_options_become_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    options = {"max_num_seqs": 4, "enforce_eager": True, "async_scheduling": False, "hf_overrides": {"a": 1}}
    options |= {"hf_overrides.b_c": 2, "goodput": ["ttft:1", "tpot:2"], "label": None}
    assert Combination("x", options).words() == [
        *("--max-num-seqs", "4", "--enforce-eager", "--no-async-scheduling", "--hf-overrides", '{"a": 1}'),
        *("--hf-overrides.b_c", "2", "--goodput", "ttft:1", "tpot:2"),
    ]
    named = read_params(params("a.json", {"one": {"x": 1}, "two words": {}}))
    assert [(c.name, c.options) for c in named] == [("one", {"x": 1}), ("two_words", {})]
    listed = read_params(params("b.json", [{"x": 1, "y": "p/q"}, {"_benchmark_name": "n", "x": 2}]))
    assert [(c.name, c.options) for c in listed] == [("x=1,y=p_q", {"x": 1, "y": "p/q"}), ("n", {"x": 2})]
    for wrong, message in ((3, "must hold a list"), ([], "must hold a list"), ([{"x": 1}, {"x": 1}], "several sets")):
        with pytest.raises(ClientError, match=message):
            read_params(params("c.json", wrong))
    with pytest.raises(ClientError, match="cannot be read"):
        read_params("missing.json")


def test_a_sweep_and_its_resuming(options: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    options["serve_params"] = params("serve.json", {"small": {"max_num_seqs": 2}, "large": {"max_num_seqs": 64}})
    options["bench_params"] = params("bench.json", [{"max_concurrency": 1}, {"max_concurrency": 8}])
    assert run_sweep(SweepArgs(**options, dry_run=True)) == 0
    assert capsys.readouterr().out.count("--result-filename run=") == 8 and not Path("results").exists()

    assert run_sweep(SweepArgs(**options, plot=True)) == 0
    folder = Path("results/try")
    assert calls() == 8
    assert "serving --max-num-seqs 64" in (folder / "large.log").read_text()
    run = json.loads((folder / "small--max_concurrency=8" / "run=1.json").read_text())
    assert run["serve_params"] == {"max_num_seqs": 2} and run["bench_params"] == {"max_concurrency": 8}
    with open(folder / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert rows[0] == {
        "serve": "small",
        "bench": "max_concurrency=1",
        "run": "0",
        "max_concurrency": "1",
        "output_throughput": "2.5",
    }
    assert (folder / "summary.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(ClientError, match="exists; go on with it"):
        run_sweep(SweepArgs(**options))
    (folder / "large--max_concurrency=1" / "run=0.json").write_text('{"cut')
    assert run_sweep(SweepArgs(**options, resume=True)) == 0
    assert calls() == 9
    assert run_sweep(SweepArgs(**options, resume=True)) == 0
    assert calls() == 9


def test_failures_end_the_sweep_or_are_counted(options: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    options["serve_params"] = params("serve.json", {"bad": {"broken": True}, "good": {}})
    options["bench_params"] = params("bench.json", [{"max_concurrency": 13}, {"max_concurrency": 1}])
    with pytest.raises(ServerError, match=r"ended with 3 before it was ready; see .*bad\.log"):
        run_sweep(SweepArgs(**options))
    assert run_sweep(SweepArgs(**options, resume=True, continue_on_error=True)) == 1
    assert "2 results in" in (output := capsys.readouterr().out) and "6 runs failed" in output
    options["serve_params"] = params("serve.json", {"good": {}})
    with pytest.raises(ServerError, match="left no usable result"):
        run_sweep(SweepArgs(**options, resume=True))


def test_a_server_that_is_there_already_is_not_measured(options: dict[str, Any]):
    with sweep.running_server(SweepArgs(**options), Path("logs"), Combination("first", {})):  # noqa: SIM117
        with pytest.raises(ClientError, match="a server answers"):
            run_sweep(SweepArgs(**options))
    assert not sweep._is_healthy(options["health_url"])
    with pytest.raises(ConfigError, match="resume needs experiment_name"):
        SweepArgs(resume=True)
