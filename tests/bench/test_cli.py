"""`octavo bench`: its benchmarks, their options, errors in one line."""

import subprocess
import sys

import pytest

from octavo import cli
from octavo.cli.bench import BENCHMARKS


def test_usage_and_unknown_benchmarks(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in BENCHMARKS)
    assert cli.main(["bench", "mm-processor"]) == 2
    assert "mm-processor is not a benchmark; there are latency" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", name, "--help"])
    assert stop.value.code == 0
    assert f"octavo bench {name}" in (text := capsys.readouterr().out)
    assert ("--max-num-seqs" in text) == (name in ("latency", "throughput", "startup"))


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "serve", "--request-rate", "-1"]) == 1
    assert capsys.readouterr().err == (
        "octavo: request_rate='-1' is not allowed; it must be a number above 0, or inf.\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["bench", "throughput", "--num-promts", "3"])
    assert "did you mean num_prompts" in capsys.readouterr().err


def test_the_load_generator_loads_no_engine():
    code = "import octavo.bench.serve, sys; print([m for m in ('torch', 'matplotlib', 'fastapi') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
