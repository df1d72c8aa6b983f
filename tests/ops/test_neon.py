"""The kernels as an ARM machine would run them: cross-compiled for NEON with dot products, and emulated."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.loader.gguf_quants import DECODERS, dequantize
from octavo.ops.cpu.build import SOURCES
from octavo.ops.sampling import sample
from tests.loader.test_gguf_quants import random_blocks

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
pytestmark = pytest.mark.skipif(
    not (COMPILER and EMULATOR), reason="needs g++-aarch64-linux-gnu and qemu-user-static (Debian's packages)"
)
FLAGS = ("-std=c++17", "-O1", "-march=armv8.2-a+dotprod", "-fno-math-errno", "-static", "-pthread", f"-I{SOURCES}")
UNITS = ("pool", "gguf_pack", "linear_s8", "linear_u4", "linear_u5")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the driver; its arguments before the files, what it reads, and the type of what it writes."""
    folder = tmp_path_factory.mktemp("neon")
    units = [str(SOURCES / f"{unit}.cpp") for unit in UNITS]
    driver = Path(__file__).with_name("neon_driver.cpp")
    subprocess.run([COMPILER, *FLAGS, str(driver), *units, "-o", str(folder / "driver")], check=True)

    def run(words, arrays, dtype):
        (folder / "in").write_bytes(b"".join(array.tobytes() for array in arrays))
        command = [EMULATOR, folder / "driver", *map(str, words), folder / "in", folder / "out"]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        assert said.strip() == "neon-dotprod"
        return torch.from_numpy(np.fromfile(folder / "out", dtype))

    return run


@pytest.mark.parametrize("ggml_type", list(DECODERS))
def test_products(run, ggml_type):
    """Of 21 tokens, more than unpack for themselves, and of one; as products of the numbers with rounded activations."""
    rows, tokens = 29, 21
    blocks = random_blocks(ggml_type, rows, 2)
    weight = dequantize(torch.from_numpy(blocks), ggml_type, torch.float32)
    x = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(0))
    got = run(("linear", ggml_type, rows, weight.shape[1], tokens), (blocks, x.numpy()), np.float32).view(-1, rows)
    scales = x.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    rounded = ((x.unflatten(1, (-1, 32)) / scales).round() * scales).flatten(1)
    want = rounded @ weight.T
    torch.testing.assert_close(got[:tokens], want, rtol=0, atol=float(want.abs().max()) * 1e-3)
    torch.testing.assert_close(got[tokens:], got[:1], rtol=1e-5, atol=float(want.abs().max()) * 1e-6)


def test_drawn_tokens(run):
    rows, rng = 12, torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(rows, 3001, generator=rng)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=rng)
    row_ids = torch.arange(rows).int()
    positions = row_ids * 7
    temperature = torch.linspace(0, 2, rows)
    top_p = torch.tensor([1.0, 0.9]).repeat(rows // 2)
    min_p = torch.tensor([0.0, 0.0, 0.05]).repeat(rows // 3)
    top_k = torch.tensor([0, 20, 0, 5], dtype=torch.int32).repeat(rows // 4)
    want, _ = sample.reference(logits, row_ids, positions, temperature, top_k, top_p, min_p, seeds)
    inputs = (seeds, logits, row_ids, positions, temperature, top_p, min_p, top_k)
    got = run(("sample", rows, logits.shape[1]), [each.numpy() for each in inputs], np.int32)
    assert got.tolist() == want.tolist()
