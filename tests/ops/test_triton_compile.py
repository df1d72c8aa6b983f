"""Kernels compiled ahead by another process: no GPU needed, only Triton's compiler."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from octavo.ops.triton_support import is_interpreting

if find_spec("triton") is None:
    pytest.skip("needs triton: pip install octavo[triton]", allow_module_level=True)
if is_interpreting():
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from octavo.ops.attention.triton_prefill import paged_attention_triton
from octavo.ops.norm_triton import rms_norm_triton
from octavo.ops.triton_compile import KernelCompiler, encode
from octavo.ops.triton_utils import Launch, NotedTensor, override_pdl, record_launches, settle_hashes

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


@pytest.mark.parametrize("max_query_len", [1, 9])
def test_attention_compiles_for_heads_narrower_than_a_matrix_product(max_query_len, cache):
    """The interpreter takes products of any size, a GPU none of fewer than 16 columns."""

    def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    starts, lens, table = (on_meta(*shape, dtype=torch.int32) for shape in ((3,), (2,), (2, 4)))
    with override_pdl(True), record_launches() as launches:
        paged_attention_triton(on_meta(18, 4, 8), on_meta(9, 2, 16, 2, 8), table, starts, lens, max_query_len, 60, 0.3)
    KernelCompiler(HOPPER, jobs=1).compile(launches)
    assert len(list(cache.rglob("*.cubin"))) == len(encode(launches)) >= 1


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(cache, capfd, caplog):
    good = norm_launches(64)[0]
    bad = Launch(good.kernel, good.args, {**good.options, "num_warps": 3})
    KernelCompiler(HOPPER, jobs=1).compile([good, bad])
    assert "does not compile" in capfd.readouterr().err and "when it is first launched" in caplog.text
    assert len(list(cache.rglob("*.cubin"))) == 1 and not list(cache.glob(".octavo-*"))


class Function:
    """Hashed as Triton 3.6 does it: a helper's globals count where it was hashed before its caller asks for them."""

    def __init__(self, module: str, own_globals: str, *helpers: "Function"):
        self.fn = SimpleNamespace(__module__=module)
        self.used_global_vals, self.own_globals, self.helpers = "", own_globals, helpers

    @property
    def cache_key(self) -> str:
        if not self.used_global_vals:
            helpers = [helper.used_global_vals + helper.cache_key for helper in self.helpers]
            self.used_global_vals = "".join([self.own_globals, *helpers])
        return self.used_global_vals


def make_modules(monkeypatch) -> tuple[Function, Function]:
    helper = Function("helpers", "a")
    caller = Function("callers", "b", helper)
    top = Function("callers", "c", caller, helper)
    monkeypatch.setitem(sys.modules, "helpers", SimpleNamespace(helper=helper))
    monkeypatch.setitem(sys.modules, "callers", SimpleNamespace(helper=helper, caller=caller, top=top, other="text"))
    settle_hashes.cache_clear()
    return caller, top


def test_a_kernel_has_the_same_hash_whatever_was_launched_before_it(monkeypatch):
    hashes = []
    for first in (0, 1):
        kernels = make_modules(monkeypatch)
        for kernel in (kernels[first], kernels[1 - first]):
            settle_hashes(kernel.fn.__module__)
        hashes.append([kernel.cache_key for kernel in kernels])
        unsettled = make_modules(monkeypatch)[1]
        assert unsettled.cache_key != hashes[-1][1]
    assert hashes[0] == hashes[1]
