"""Must show: a core killed under open streams, and one that a request crashes, with a real (random) model."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture
def kill_core(monkeypatch):
    """benchmarks/kill_core.py as a module that the core's process finds too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("kill_core")
    sys.modules.pop("kill_core")


def run(kill_core, model: Path, capsys, *options: str) -> str:
    words = ["--model", str(model), "--streams", "8", "--max-tokens", "60", *options]
    status = kill_core.main(words)
    said = capsys.readouterr().out
    assert status == 0, said
    return said


def test_streams_equal_an_undisturbed_run(kill_core, tiny_llama_dir, capsys):
    said = run(kill_core, tiny_llama_dir, capsys, "--kills", "2", "--async-scheduling", "--max-num-seqs", "5")
    assert "killed 2 times, restarted 2 times: 8 of 8 streams equal" in said


def test_a_request_that_crashes_the_core_fails_alone(kill_core, tiny_llama_dir, capsys):
    said = run(kill_core, tiny_llama_dir, capsys, "--kills", "0", "--poison")
    assert "poison: the engine core died twice" in said and "killed by signal 11" in said


def test_differences_are_seen(kill_core):
    stream = kill_core.Stream({0: kill_core.Answer("ab", [1, 2], [], None, ("stop", None))})
    other = kill_core.Stream({0: kill_core.Answer("ab", [1, 3], [], None, ("stop", None))})
    assert kill_core.differences(stream, stream) == []
    assert kill_core.differences(stream, other) == ["token_ids of choice 0"]
    assert kill_core.differences(stream, kill_core.Stream()) == ["choices are missing"]
