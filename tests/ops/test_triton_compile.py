"""Kernels compiled ahead by another process: no GPU needed, only Triton's compiler."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from octavo.ops.triton_support import is_interpreting

if find_spec("triton") is None:
    pytest.skip("needs triton: pip install octavo[triton]", allow_module_level=True)
if is_interpreting():
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from octavo.ops.norm_triton import rms_norm_triton
from octavo.ops.triton_compile import KernelCompiler, encode
from octavo.ops.triton_utils import Launch, NotedTensor, override_pdl, record_launches

HOPPER = 90


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def norm_launches(width: int) -> list[Launch]:
    x = torch.empty(3, width, dtype=torch.bfloat16, device="meta")
    with override_pdl(True), record_launches() as launches:
        rms_norm_triton(x, x[0], 1e-5)
        rms_norm_triton(x, x[0], 1e-5)
    return launches


def test_equal_launches_are_compiled_once():
    assert len(encode(norm_launches(64))) == 1
    assert len(encode(norm_launches(64) + norm_launches(128))) == 2


def test_an_unaligned_tensor_is_another_kernel(cache):
    aligned = norm_launches(64)[0]
    first = NotedTensor(torch.bfloat16, False)
    launches = [aligned, replace(aligned, args=(first, *aligned.args[1:]))]
    KernelCompiler(HOPPER, jobs=1).compile(launches)
    assert len(list(cache.rglob("*.cubin"))) == 2


def test_compiles_for_the_device_and_knows_it_next_time(cache):
    launches = norm_launches(64) + norm_launches(128)
    KernelCompiler(HOPPER, jobs=2).compile(launches)
    assert len(list(cache.rglob("*.cubin"))) == 2
    again = KernelCompiler(HOPPER, jobs=2)
    assert again._process is None, "a process was started though everything is compiled"
    again.compile(launches)
    assert again._process is None


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(cache, capfd, caplog):
    good = norm_launches(64)[0]
    bad = Launch(good.kernel, good.args, {**good.options, "num_warps": 3})
    KernelCompiler(HOPPER, jobs=1).compile([good, bad])
    assert "does not compile" in capfd.readouterr().err and "when it is first launched" in caplog.text
    assert len(list(cache.rglob("*.cubin"))) == 1 and not list(cache.glob(".octavo-*"))
