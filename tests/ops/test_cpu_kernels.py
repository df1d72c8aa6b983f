"""The C++ kernels: packing, attention and the ends of a step against their references, with one thread and with several."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from octavo.loader.gguf_quants import DECODERS, dequantize
from octavo.ops.attention import decode_attention, paged_attention
from octavo.ops.cpu import build, runtime
from octavo.ops.cpu import step as _step  # noqa: F401 (registers providers)
from octavo.ops.cpu.attention import _accepts_attention, _accepts_decode
from octavo.ops.cpu.build import library_path
from octavo.ops.cpu.linear import pack_gguf
from octavo.ops.inputs import prepare_inputs, store_sampled
from octavo.ops.linear.gguf_linear import gguf_linear
from octavo.ops.linear.packed import split_rows, unpack
from octavo.ops.sampling import sample
from tests.loader.test_gguf_quants import random_blocks

pytestmark = pytest.mark.skipif(not runtime.is_available(), reason="needs a C++ compiler")


@pytest.fixture(params=[1, 3], autouse=True)
def team(request, monkeypatch):
    """The runtime with one thread, and with more threads than some of the work has pieces."""
    made = runtime.Runtime(runtime.load_library(), request.param)
    monkeypatch.setattr(runtime, "_runtime", made)
    yield made
    made.close()


def provider(op, name="cpu"):
    return next(p for p in op.providers if p.name == name)


@pytest.mark.parametrize("ggml_type", list(DECODERS))
def test_packing_keeps_the_numbers(ggml_type):
    blocks = torch.from_numpy(random_blocks(ggml_type, 21, 3))
    want = dequantize(blocks, ggml_type, torch.float32)
    got = unpack(pack_gguf(blocks, ggml_type))
    if ggml_type.endswith("_K"):  # the product of two scales is rounded to half precision
        torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-10)
    else:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_types_without_a_kernel_are_declined():
    assert pack_gguf(torch.zeros(4, 66, dtype=torch.uint8), "IQ2_XXS") is None


def test_a_packed_matrix_is_cut_between_tiles_only():
    matrix = pack_gguf(torch.from_numpy(random_blocks("Q4_1", 48, 2)), "Q4_1")
    parts = split_rows(matrix, (16, 32))
    assert torch.equal(torch.cat([unpack(part) for part in parts]), unpack(matrix))
    assert split_rows(matrix, (20, 28)) == ()


def attention_case(rng, dtype, query_lens, seq_lens, heads=6, kv_heads=2, dim=64, block_size=16):
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 1
    kv_cache = torch.randn(num_blocks, 2, block_size, kv_heads, dim, generator=rng).to(dtype)
    order = (torch.randperm(num_blocks - 1, generator=rng) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(-(-max(n, 1) // block_size) for n in seq_lens), dtype=torch.int32)
    for r, n in enumerate(seq_lens):
        for b in range(-(-n // block_size)):
            table[r, b] = order.pop()
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    q = 3 * torch.randn(int(starts[-1]), heads, dim, generator=rng)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return q, kv_cache, table, starts, lens, max(query_lens), max(seq_lens), dim**-0.5


EXTRAS = {
    "plain": {},
    "window": {"window": 12},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, 1.0])},
    "alibi": {"distance_bias": torch.tensor([0.5, 0.25, 0.1, 0.05, 0.2, 0.3])},
}
COMBINATIONS = [
    *(("plain", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *((extras, torch.float16) for extras in EXTRAS if extras != "plain"),
]


@pytest.mark.parametrize(("extras", "dtype"), COMBINATIONS)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [((1, 17, 5, 1), (70, 17, 100, 1)), ((90, 2), (150, 130)), ((1, 1), (33, 200))]
)
def test_attention(query_lens, seq_lens, extras, dtype):
    args = attention_case(torch.Generator().manual_seed(0), dtype, query_lens, seq_lens)
    assert _accepts_attention(*args, **EXTRAS[extras])
    want = paged_attention.reference(*args, **EXTRAS[extras])
    torch.testing.assert_close(provider(paged_attention).fn(*args, **EXTRAS[extras]), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("extras", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("seq_lens", [(130,), (5, 64, 0), (20,) * 9])
def test_decode_attention_writes_the_cache_and_attends(seq_lens, norms, extras, dtype):
    rng = torch.Generator().manual_seed(1)
    heads, kv_heads, dim, block_size = 6, 2, 64, 16
    _, kv_cache, table, _, lens, *_ = attention_case(rng, dtype, (1,) * len(seq_lens), seq_lens)
    positions = (lens.long() - 1).clamp(min=0)
    slots = table[torch.arange(len(seq_lens)), positions // block_size].long() * block_size + positions % block_size
    slots[lens == 0] = -1
    qkv = torch.randn(len(seq_lens), (heads + 2 * kv_heads) * dim, generator=rng)
    cos_sin = torch.randn(200, 32, generator=rng)  # half of a head rotates
    gammas = [1 + 0.1 * torch.randn(dim, generator=rng) for _ in range(2)] if norms else [None, None]
    caches = [kv_cache.clone(), kv_cache.clone()]
    results = []
    for fn, cache in zip((decode_attention.reference, provider(decode_attention).fn), caches, strict=True):
        args = (qkv, positions, cos_sin, cache, slots, table, lens, max(seq_lens), heads, kv_heads, dim**-0.5)
        assert _accepts_decode(*args, *gammas, 1e-6, norms, **EXTRAS[extras])
        results.append(fn(*args, *gammas, 1e-6, norms, **EXTRAS[extras])[lens > 0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3 if dtype == torch.bfloat16 else 1e-4)
    one_ulp = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(caches[1][1:], caches[0][1:], rtol=one_ulp, atol=1e-5)  # block 0 takes dropped rows


def test_a_key_too_large_for_half_precision_stays_finite():
    qkv = torch.full((1, 3 * 64), 1e6)
    cache = torch.zeros(2, 2, 16, 1, 64, dtype=torch.float16)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    out = provider(decode_attention).fn(
        qkv, torch.tensor([0]), None, cache, torch.tensor([16]), table, lens, 1, 1, 1, 0.125
    )
    assert torch.equal(out.unique(), torch.tensor([65504.0]))


def test_gathering_a_decode_step():
    max_rows, max_len, size = 5, 40, 4
    rng = torch.Generator().manual_seed(0)
    arange = torch.arange(9, dtype=torch.int32)
    rows = torch.tensor([3, 0, max_rows], dtype=torch.int32)
    outputs = []
    for fn in (prepare_inputs.reference, provider(prepare_inputs).fn):
        rng.manual_seed(0)
        num_computed = torch.tensor([5, 0, 17, 3, 9, 0], dtype=torch.int32)
        token_ids = torch.randint(0, 500, (max_rows + 1, max_len), generator=rng, dtype=torch.int32)
        tables = [torch.randint(1, 99, (max_rows + 1, max_len // size + 1), generator=rng, dtype=torch.int32)]
        ints = [torch.full((3,), -7), torch.full((3,), -7)]
        lens, slots = torch.full((3,), -7, dtype=torch.int32), [torch.full((3,), -7)]
        step = [torch.zeros(3, tables[0].shape[1], dtype=torch.int32)]
        args = (rows, arange[:3], arange[:4], num_computed, token_ids, tables, [size], *ints, lens, slots, step)
        assert provider(prepare_inputs).accepts(*args)
        fn(*args)
        outputs.append((num_computed, *ints, lens, *slots, *step))
    for want, got in zip(*outputs, strict=True):
        assert torch.equal(got, want)


def test_a_mixed_step_is_not_taken_for_a_decode_step():
    request = torch.tensor([0, 0, 1], dtype=torch.int32)
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    rows = torch.tensor([0, 1], dtype=torch.int32)
    assert not provider(prepare_inputs).accepts(rows, request, starts, rows, rows, [], [], rows, rows, rows, [], [])


def test_the_likeliest_token():
    vocab = 5000
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(0))
    logits[1, [400, 3000, 4999]] = 9.0  # the lowest id among equals
    logits[2, 4321] = float("nan")
    logits[3, 10] = float("inf")
    logits[4] = float("-inf")
    logits[5, :-1] = float("-inf")
    unused = torch.zeros(7)
    args = (logits, unused.int(), unused.int(), unused, unused.int(), unused, unused, unused.long(), True, False)
    want, got = sample.reference(*args), provider(sample).fn(*args)
    assert got[0].tolist() == want[0].tolist() and got[1].tolist() == want[1].tolist()


def test_a_whole_vocabulary_is_drawn_from_as_numpy_does():
    """Most tokens are passed over without their noise; none of them may be the winner."""
    rng, num = torch.Generator().manual_seed(3), 24
    logits = torch.randn(num, 49_153, generator=rng) * torch.linspace(0.01, 6, num)[:, None]
    logits[:, ::7] = float("-inf")
    parameters = (
        torch.rand(num, generator=rng) + 0.3,
        torch.randint(0, 3, (num,), generator=rng).int() * 2000,
        torch.where(torch.rand(num, generator=rng) < 0.5, 1.0, 0.9),
        torch.where(torch.rand(num, generator=rng) < 0.7, 0.0, 0.01),
        torch.randint(-(2**63), 2**63 - 1, (num,), generator=rng),
    )
    args = (logits, torch.arange(num).int(), torch.arange(num).int() * 300, *parameters)
    assert torch.equal(provider(sample).fn(*args)[0], provider(sample, "numpy").fn(*args)[0])


def test_sampled_tokens_stay_inside_their_row():
    stored = []
    for fn in (store_sampled.reference, provider(store_sampled).fn):
        token_ids = torch.zeros(4, 6, dtype=torch.int32)
        fn(*(torch.tensor(x, dtype=torch.int32) for x in ([7, 8, 9], [0, 2, 1], [5, 2, 6])), token_ids)
        stored.append(token_ids)
    assert torch.equal(stored[1], stored[0])


def test_a_program_repeats_what_was_recorded(team):
    shards = (pack_gguf(torch.from_numpy(random_blocks("Q4_1", 64, 2)), "Q4_1"),)
    x = torch.randn(2, 64)
    buffers = runtime.BufferPool()
    with runtime.recording(buffers) as made:
        y = x
        for _ in range(6):
            y = gguf_linear(y, shards)
        reopen = buffers.reopener(y)
    program = made.program()
    assert len(program) == 6
    assert len(buffers._storages) == 2  # each result's buffer is free again once the next is computed
    first = y.clone()
    del y
    x.mul_(4.0)  # programs read their inputs where they are
    program.run()
    torch.testing.assert_close(reopen(2), 4.0 * first)


def test_a_program_serves_other_numbers_of_rows_than_it_was_recorded_with(team):
    shards = (pack_gguf(torch.from_numpy(random_blocks("Q4_1", 64, 2)), "Q4_1"),)
    x = torch.randn(50, 64)
    buffers = runtime.BufferPool()
    with runtime.recording(buffers, runtime.Count(3, 50), runtime.Count(2, 8)) as made:
        y = gguf_linear(gguf_linear(x[:3], shards), shards, residual=x[:3])
    again = buffers.reopener(y)
    program = made.program()
    for rows in (50, 1, 17):
        program.run(rows, 1)
        want = gguf_linear(gguf_linear(x[:rows], shards), shards, residual=x[:rows])
        torch.testing.assert_close(again(rows), want)
    with pytest.raises(AssertionError):
        program.run(51, 1)


def test_rows_that_are_no_count_of_the_program_are_not_recorded(team):
    shards = (pack_gguf(torch.from_numpy(random_blocks("Q4_1", 64, 2)), "Q4_1"),)
    with (
        runtime.recording(runtime.BufferPool(), runtime.Count(3, 50)),
        pytest.raises(runtime.NotRecordableError, match="4 rows"),
    ):
        gguf_linear(torch.randn(4, 64), shards)


def test_a_child_of_fork_gets_threads_of_its_own():
    code = """
import os, torch
from octavo.ops.cpu.runtime import runtime
from octavo.ops.linear.packed import QuantKind, random_matrix
from octavo.ops.linear.gguf_linear import gguf_linear
import octavo.ops.cpu.linear
matrix = random_matrix(torch.Generator(), 64, 64, QuantKind.U4, 32, True, runtime().lanes)
want = gguf_linear(torch.ones(3, 64), (matrix,))
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(gguf_linear(torch.ones(3, 64), (matrix,)), want) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _hide_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)


def test_without_a_compiler_there_are_no_kernels(monkeypatch, caplog, tmp_path):
    _hide_compiler(monkeypatch)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        library_path()
    assert runtime.load_library.__wrapped__() is None
    assert "torch's operators serve" in caplog.text


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
def test_without_a_compiler_the_best_prebuilt_library_of_the_same_sources_serves(monkeypatch, tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "cpu_flags", lambda: build.LEVELS["x86-64-v3"])
    build.build_levels()
    assert len(list(build.PREBUILT.iterdir())) == len(build.LEVELS)
    _hide_compiler(monkeypatch)
    assert library_path() == build.prebuilt_path("x86-64-v3")
    monkeypatch.setattr(build, "cpu_flags", lambda: build.LEVELS["x86-64-v4"] | {"amx"})
    assert library_path() == build.prebuilt_path("x86-64-v4")
    monkeypatch.setattr(build, "cpu_flags", frozenset)
    with pytest.raises(build.BuildError):
        library_path()
    monkeypatch.setattr(build, "cpu_flags", lambda: build.LEVELS["x86-64-v4"])
    (sources / "one.cpp").write_text("changed since")
    with pytest.raises(build.BuildError):
        library_path()


def test_the_build_is_cached_and_a_failed_one_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    made = library_path()
    assert made.parent == tmp_path / "kernels"
    before = os.stat(made).st_mtime_ns
    assert library_path() == made and os.stat(made).st_mtime_ns == before
    (sources / "one.cpp").write_text("nonsense")
    with pytest.raises(build.BuildError, match="nonsense"):
        library_path()
