"""lm-eval scores a tiny model alike through transformers, `octavo serve` and compat/vllm."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lm_eval_backends.py"


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval: pip install octavo[lm-eval]")
def test_three_backends_agree():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "\n0 answers differ" in done.stdout
