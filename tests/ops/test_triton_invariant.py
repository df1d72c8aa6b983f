"""The batch-invariant Triton kernels: right, and the same bits for a token however it is computed.

Triton's interpreter multiplies by NumPy, whose sums depend on shapes: there, only spreads with equal tiles are compared.
"""
# The kernels can only be imported where they can run.
# ruff: noqa: E402

import pytest
import torch

from octavo.ops.attention import paged_attention
from octavo.ops.linear import linear
from octavo.ops.triton_support import has_triton, is_interpreting

if not has_triton():
    pytest.skip("needs a GPU, or the child process of test_triton_interpreter.py", allow_module_level=True)

from octavo import ops

ops.load_providers()

from octavo.ops.attention.triton_invariant import SPAN, launch_attention, paged_attention_triton_invariant
from octavo.ops.linear.triton_invariant import Spread, linear_triton_invariant, num_parts, spread_for

# The interpreter computes with NumPy, which warns where a GPU saturates.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if is_interpreting() else "cuda"
# The interpreter multiplies the raw bits of bfloat16.
DTYPES = [torch.float16, torch.float32] if is_interpreting() else [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-5}


def make(*shape, dtype, std=1.0, seed=0):
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


LINEARS = [
    # n, k, features
    (64, 512, {}),
    (19, 576, {"bias": True, "norm": True}),
    (96, 1024, {"residual": True, "scale": 0.22, "bias": True}),
    (32, 96, {"norm": True, "activation": "silu"}),
    (70, 2048, {"activation": "gelu_tanh", "residual": True, "scale": 0.5}),
]


def linear_arguments(tokens, n, k, dtype, *, bias=False, norm=False, activation=None, residual=False, scale=1.0):
    rows = n * (2 if activation else 1)
    return (
        make(tokens, k, dtype=dtype),
        make(rows, k, dtype=dtype, std=k**-0.5, seed=1),
        make(rows, dtype=dtype, seed=2) if bias else None,
        make(k, dtype=dtype, std=0.1, seed=3) + 1 if norm else None,
        1e-5,
        activation,
        make(tokens, n, dtype=dtype, seed=4) if residual else None,
        scale,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(("n", "k", "features"), LINEARS)
def test_linear_equals_the_reference(n, k, features, tokens, dtype):
    arguments = linear_arguments(tokens, n, k, dtype, **features)
    wide = [a.float() if isinstance(a, torch.Tensor) else a for a in arguments]
    actual = linear_triton_invariant(*arguments)
    torch.testing.assert_close(actual.float(), linear.reference(*wide), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 2048), (70, 1056)])
def test_parts_side_by_side_or_in_turn(n, k, dtype):
    arguments = linear_arguments(40, n, k, dtype, bias=True, residual=True, scale=0.3)
    assert num_parts(n, k, 64) > 1
    one, other = (
        linear_triton_invariant(*arguments, spread=Spread(16, 32, 2, 4, side_by_side)) for side_by_side in (True, False)
    )
    assert torch.equal(one, other)


def test_parts_follow_the_shape_alone():
    """And small products are cut up, so that they fill a device."""
    assert num_parts(4096, 4096, 64) == 4 and num_parts(6144, 4096, 64) == 2
    assert num_parts(4096, 14336, 64) == 4 and num_parts(128256, 4096, 64) == 1
    assert num_parts(64, 128, 64) == 1


class Sequences:
    """A cache with sequences of the given lengths, their blocks in random order, and a query for every token."""

    def __init__(self, lens, heads=4, kv_heads=2, dim=64, block_size=16, dtype=torch.float16, cache_dtype=None):
        self.lens, self.heads = lens, heads
        blocks = [-(-n // block_size) for n in lens]
        shape = (sum(blocks) + 1, 2, block_size, kv_heads, dim)
        self.cache = make(*shape, dtype=dtype).to(cache_dtype or dtype)
        order = (torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
        for r, n in enumerate(blocks):
            for b in range(n):
                self.table[r, b] = order.pop()
        self.queries = [make(n, heads, dim, dtype=dtype, std=3.0, seed=2 + r) for r, n in enumerate(lens)]
        self.scale = dim**-0.5

    def attend(self, chunks, run=paged_attention_triton_invariant, with_host=True, **features):
        """One call for [(sequence, first token, end)]; a list of results, one a chunk."""
        starts = [0]
        for _, first, end in chunks:
            starts.append(starts[-1] + end - first)
        ends = [end for *_, end in chunks]
        arguments = (
            torch.cat([self.queries[r][first:end] for r, first, end in chunks]),
            self.cache,
            self.table[[r for r, *_ in chunks]].to(DEVICE),
            torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(ends, dtype=torch.int32, device=DEVICE),
            max(end - first for _, first, end in chunks),
            max(ends),
            self.scale,
        )
        host = {"query_start_loc_cpu": starts, "seq_lens_cpu": ends} if with_host else {}
        return list(run(*arguments, **features, **host).split([end - first for _, first, end in chunks]))


FEATURES = [
    pytest.param({}, id="plain"),
    pytest.param({"window": 20}, id="window"),
    pytest.param({"window": 300, "sinks": True}, id="wide-window-sinks"),
    pytest.param({"softcap": 20.0}, id="softcap"),
    pytest.param({"distance_bias": True}, id="alibi"),
]


def with_tensors(features, heads=4):
    made = dict(features)
    if "sinks" in made:
        made["sinks"] = make(heads, dtype=torch.float32)
    if "distance_bias" in made:
        made["distance_bias"] = torch.rand(heads, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    return made


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("features", FEATURES)
def test_attention_equals_the_reference(features, cache_dtype):
    lens = (SPAN + 70, 40)
    sequences = Sequences(lens, cache_dtype=cache_dtype)
    chunks = [(0, SPAN + 50, SPAN + 70), (1, 39, 40), (0, SPAN + 30, SPAN + 31)]
    features = with_tensors(features)
    if cache_dtype is not None:
        features |= {"k_scale": 0.5, "v_scale": 2.0}
    expected = sequences.attend(chunks, paged_attention.reference, **features)
    for with_host in (True, False):
        for actual, want in zip(sequences.attend(chunks, with_host=with_host, **features), expected, strict=True):
            torch.testing.assert_close(actual.float(), want.float(), rtol=6e-3, atol=2e-2)


def test_attention_in_float32():
    sequences = Sequences((90,), dtype=torch.float32)
    chunks = [(0, 60, 63), (0, 89, 90)]
    expected = sequences.attend(chunks, paged_attention.reference)
    torch.testing.assert_close(torch.cat(sequences.attend(chunks)), torch.cat(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("features", FEATURES)
def test_programs_that_share_a_request_change_no_bit(features):
    sequences = Sequences((3 * SPAN - 5,))
    features = {"window": 0, "softcap": 0.0, "sinks": None, "distance_bias": None} | with_tensors(features)
    results = []
    for programs in (1, 2, 3):
        q = sequences.queries[0][-1:]
        seq_lens = torch.tensor(sequences.lens, dtype=torch.int32, device=DEVICE)
        out = torch.full_like(q, 7.0)
        launch_attention(
            q, sequences.cache, sequences.table.to(DEVICE), None, seq_lens, 4 * SPAN, sequences.scale,
            *features.values(), out, 1.0, 1.0, single=True, programs=programs,
        )  # fmt: skip
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_padded_requests_get_zeros():
    sequences = Sequences((40, 40))
    seq_lens = torch.tensor([40, 0], dtype=torch.int32, device=DEVICE)
    q = torch.cat([sequences.queries[0][-1:], sequences.queries[1][-1:] * float("nan")])
    out = torch.full_like(q, 7.0)
    launch_attention(
        q, sequences.cache, sequences.table.to(DEVICE), None, seq_lens, 1024, 0.1, 0, 0.0, None, None, out, 1.0, 1.0,
        single=True,
    )  # fmt: skip
    assert (out[1] == 0).all() and (out[0] != 0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["own", "8 bits"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(32, 8, 128, 64), (9, 3, 64, 16)], ids=str)
def test_a_token_has_the_same_bits_in_any_chunk(heads, kv_heads, dim, block_size, features, dtype, cache_dtype):
    length, token = 1000, 700
    lens = (length, *(17 + 61 * i % 900 for i in range(80)))
    sequences = Sequences(lens, heads, kv_heads, dim, block_size, dtype, cache_dtype)
    features = with_tensors(features, heads)
    (alone,) = sequences.attend([(0, token, token + 1)], **features)
    others = [(r, n - 1, n) for r, n in enumerate(lens) if r]
    for first, end in ((token, token + 2), (token - 1, token + 1), (690, 777), (0, length), (256, 768)):
        for crowd in ([], others):
            chunk, *_ = sequences.attend([(0, first, end), *crowd], **features)
            assert torch.equal(chunk[token - first], alone[0]), (first, end, len(crowd))
    for count in (1, 7, 80):
        *_, decoded = sequences.attend([*others[:count], (0, token, token + 1)], **features)
        assert torch.equal(decoded[0], alone[0]), count


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576), (49152, 576)]
)
def test_a_token_has_the_same_bits_among_any_number(n, k, dtype):
    if dtype == torch.float32 and n * k > 20_000_000:
        pytest.skip("slow, and its kernel has one tile for all")
    weight, crowd = make(n, k, dtype=dtype, std=k**-0.5), make(700, k, dtype=dtype, seed=1)
    expected = linear_triton_invariant(crowd[123:124].contiguous(), weight)
    seen = set()
    for tokens in (2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 577):
        actual = linear_triton_invariant(crowd[123 - min(tokens - 1, 100) :][:tokens].contiguous(), weight)
        assert torch.equal(actual[min(tokens - 1, 100)], expected[0]), (tokens, spread_for(tokens, n, dtype))
        seen.add(spread_for(tokens, n, dtype))
    assert dtype == torch.float32 or len(seen) >= 5
