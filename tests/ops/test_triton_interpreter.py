"""Runs the Triton kernel tests in Triton's interpreter where there is no GPU.

The interpreter must be chosen before Triton is imported, so it gets a process of its own.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from octavo.ops.triton_support import is_interpreting

FILES = (
    "test_triton_attention.py",
    "test_triton_invariant.py",
    "test_triton_linear.py",
    "test_triton_mla.py",
    "test_triton_moe.py",
    "test_triton_small.py",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels ran on the GPU")
@pytest.mark.skipif(is_interpreting(), reason="this is the child process")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install octavo[triton]")
@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(name):
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            str(Path(__file__).parent / name),
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-m",
            "not gpu",
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert re.search(r"\d+ passed", child.stdout) and "skipped" not in child.stdout, child.stdout
