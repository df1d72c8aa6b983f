"""The Triton attention kernels: ragged lengths, every feature, splits and their merge, graph padding."""
# The kernels can only be imported where they can run.
# ruff: noqa: E402

import pytest
import torch

from octavo.ops.attention import decode_attention, paged_attention
from octavo.ops.rope import qkv_rope_write
from octavo.ops.triton_support import has_triton, is_interpreting

if not has_triton():
    pytest.skip("needs a GPU, or the child process of test_triton_interpreter.py", allow_module_level=True)

from octavo import ops

ops.load_providers()

from octavo.ops.attention.triton_decode import DecodeConfig, choose, decode_attention_triton, launch_decode
from octavo.ops.attention.triton_prefill import launch_prefill, paged_attention_triton

# The interpreter computes with NumPy, which warns where a GPU saturates.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if is_interpreting() else "cuda"
TOLERANCE = {torch.float16: 6e-3, torch.float32: 2e-5}


FP8 = torch.float8_e4m3fn
# Scales that neither vanish in the result nor stand for each other.
SCALES = {"k_scale": 0.5, "v_scale": 3.0}


def in_float32(value):
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Case:
    """Requests of given lengths in a cache whose blocks lie in random order."""

    def __init__(
        self, heads, kv_heads, dim, block_size, lens, dtype=torch.float16, padding=0, seed=1, cache_dtype=None
    ):
        self.rng = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.dim, self.dtype, self.lens = heads, kv_heads, dim, dtype, lens
        num_blocks = sum(-(-n // block_size) for n in lens) + 1
        self.cache = self.make(num_blocks, 2, block_size, kv_heads, dim).to(cache_dtype or dtype)
        order = (torch.randperm(num_blocks - 1, generator=self.rng) + 1).tolist()
        table = torch.zeros(len(lens) + padding, max(-(-n // block_size) for n in lens), dtype=torch.int32)
        slots = []
        for r, n in enumerate(lens):
            for b in range(-(-n // block_size)):
                table[r, b] = order.pop()
            slots.append(int(table[r, (n - 1) // block_size]) * block_size + (n - 1) % block_size)
        self.table = table.to(DEVICE)
        self.slots = torch.tensor(slots + [-1] * padding, device=DEVICE)
        self.seq_lens = torch.tensor(list(lens) + [0] * padding, dtype=torch.int32, device=DEVICE)
        self.positions = (self.seq_lens - 1).clamp(min=0).long()

    def make(self, *shape, std=1.0, dtype=None):
        return (std * torch.randn(*shape, generator=self.rng)).to(DEVICE, dtype or self.dtype)

    def features(self, *, sinks=False, alibi=False, norm=False, **kwargs):
        """Keyword arguments of `decode_attention`."""
        if sinks:
            kwargs["sinks"] = self.make(self.heads, dtype=torch.float32)
        if alibi:
            kwargs["distance_bias"] = torch.rand(self.heads, generator=self.rng).to(DEVICE)
        if norm:
            kwargs |= {"q_norm": self.make(self.dim, std=0.1) + 1, "k_norm": self.make(self.dim, std=0.1) + 1}
        return kwargs


FUSED_CASES = [
    # heads, kv heads, head dim, block size, lengths, rotary dim, features, cut
    pytest.param(4, 2, 64, 16, (1, 5, 128), 64, {}, None, id="default"),
    pytest.param(4, 2, 128, 64, (200, 1), 128, {}, DecodeConfig(64, 3, 8, 64, 128, True), id="splits"),
    pytest.param(6, 2, 64, 16, (9, 40, 64), 64, {"window": 12, "norm": True}, None, id="window"),
    pytest.param(6, 2, 64, 16, (50, 200), 64, {"softcap": 20.0}, DecodeConfig(32, 2, 2, 32, 64), id="softcap"),
    pytest.param(8, 1, 64, 16, (50, 400), 64, {"sinks": True}, DecodeConfig(32, 2, 20, 32, 4096, True), id="sinks"),
    pytest.param(3, 3, 64, 32, (20, 31), 64, {"alibi": True}, None, id="alibi"),
    pytest.param(
        8, 2, 96, 16, (131,), 32, {"interleaved": True, "norm": True}, DecodeConfig(32, 2, 4, 32, 4096), id="partial"
    ),
    pytest.param(7, 1, 128, 16, (20, 131), 64, {"window": 100}, DecodeConfig(64, 2, 4, 64, 4096, True), id="odd-group"),
    pytest.param(40, 2, 64, 128, (331,), 0, {}, DecodeConfig(64, 2, 4, 64, 4096), id="nope-wide-group"),
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "lens", "rotary", "features", "config"), FUSED_CASES
)
def test_fused_decode(heads, kv_heads, dim, block_size, lens, rotary, features, config):
    check_fused_decode(heads, kv_heads, dim, block_size, lens, rotary, features, config, torch.float16)


def test_fused_decode_in_float32():
    config = DecodeConfig(32, 2, 4, 32, 64, True)
    check_fused_decode(6, 2, 64, 16, (40, 150), 64, {"window": 130, "sinks": True, "norm": True}, config, torch.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "lens", "rotary", "features", "config"), FUSED_CASES
)
def test_fused_decode_from_8_bits(heads, kv_heads, dim, block_size, lens, rotary, features, config):
    check_fused_decode_from_8_bits(heads, kv_heads, dim, block_size, lens, rotary, features, config, torch.float16)


def test_fused_decode_from_8_bits_in_float32():
    features = {"window": 130, "sinks": True, "norm": True}
    config = DecodeConfig(32, 2, 4, 32, 64, True)
    check_fused_decode_from_8_bits(6, 2, 64, 16, (40, 150), 64, features, config, torch.float32)


def check_fused_decode_from_8_bits(heads, kv_heads, dim, block_size, lens, rotary, features, config, dtype):
    """Against the reference on what the kernel has written, since a number next to a rounding boundary may go either way.

    What it writes is `qkv_rope_write`'s business; Triton's interpreter loses a carry there, which leaves half of a number.
    """
    case = Case(heads, kv_heads, dim, block_size, lens, dtype, cache_dtype=FP8)
    qkv = case.make(len(lens), (heads + 2 * kv_heads) * dim)
    qkv[:, : heads * dim] *= 3
    cos_sin = case.make(max(lens), rotary, dtype=torch.float32) if rotary else None
    options = case.features(**features)
    tail = (case.slots, case.table, case.seq_lens, max(lens), heads, kv_heads, dim**-0.5)
    actual = decode_attention_triton(
        qkv, case.positions, cos_sin, case.cache, *tail, **options, **SCALES, config=config
    )
    expected_cache = case.cache.clone()
    rope = {k: in_float32(options.pop(k)) for k in ("q_norm", "k_norm", "interleaved") if k in options}
    q = qkv_rope_write.reference(
        qkv.float(), case.positions, cos_sin, expected_cache, case.slots, heads, kv_heads, **rope, **SCALES
    )
    torch.testing.assert_close(
        case.cache.float(), expected_cache.float(), rtol=0.5 if is_interpreting() else 0.13, atol=2**-9
    )
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=DEVICE)
    expected = paged_attention.reference(
        q, case.cache, case.table, starts, case.seq_lens, 1, max(lens), dim**-0.5, **options, **SCALES
    )
    tolerance = SCALES["v_scale"] * TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCE[dtype], atol=tolerance)


def check_fused_decode(heads, kv_heads, dim, block_size, lens, rotary, features, config, dtype):
    case = Case(heads, kv_heads, dim, block_size, lens, dtype)
    qkv = case.make(len(lens), (heads + 2 * kv_heads) * dim)
    qkv[:, : heads * dim] *= 3  # far from a uniform softmax: a wrong mask or block then shows
    cos_sin = case.make(max(lens), rotary, dtype=torch.float32) if rotary else None
    options = case.features(**features)
    expected_cache = case.cache.float().clone()
    tail = (case.slots, case.table, case.seq_lens, max(lens), heads, kv_heads, dim**-0.5)
    expected = decode_attention.reference(
        qkv.float(), case.positions, cos_sin, expected_cache, *tail, **{k: in_float32(v) for k, v in options.items()}
    )
    # Twice: the second call finds the new token in the cache, and the counters must be back at zero.
    for _ in range(2):
        actual = decode_attention_triton(qkv, case.positions, cos_sin, case.cache, *tail, **options, config=config)
        torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(case.cache.float(), expected_cache, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_padded_rows_write_nothing_and_stay_finite():
    case = Case(4, 2, 64, 16, (40, 70), padding=2)
    qkv = case.make(4, 8 * 64)
    qkv[2:] = float("nan")
    before = case.cache.clone()
    cos_sin = case.make(70, 64, dtype=torch.float32)
    out = decode_attention_triton(
        qkv, case.positions, cos_sin, case.cache, case.slots, case.table, case.seq_lens, 1024, 4, 2, 0.1
    )
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert (case.cache != before).flatten(3).any(-1).sum() == 4  # one key and one value for each real request


def test_a_request_does_not_depend_on_its_neighbours():
    """The cut follows from the batch's size and the request's own length, not from who else is there."""
    results = []
    for other in (3, 300):
        case = Case(4, 2, 64, 16, (150, 300))
        case.seq_lens[1], case.positions[1] = other, other - 1
        case.slots[1] = case.table[1, (other - 1) // 16] * 16 + (other - 1) % 16
        qkv = torch.randn(2, 8 * 64, generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.float16)
        cos_sin = torch.ones(300, 64, device=DEVICE)
        results.append(
            decode_attention_triton(
                qkv, case.positions, cos_sin, case.cache, case.slots, case.table, case.seq_lens, 300, 4, 2, 0.1
            )[0]
        )
    assert torch.equal(*results)


def test_plain_decode_skips_requests_with_other_query_lengths():
    case = Case(4, 2, 64, 16, (40, 70, 9))
    starts = torch.tensor([0, 1, 4, 4], dtype=torch.int32, device=DEVICE)  # one token, three, none
    q = case.make(4, 4, 64)
    out = torch.full((4, 4, 64), 7.0, dtype=case.dtype, device=DEVICE)
    launch_decode(
        q.flatten(1), case.cache, case.table, case.seq_lens, 70, 4, 0.1, 0, 0.0, None, None, out, query_start_loc=starts
    )
    args = (case.table, starts, case.seq_lens, 3, 70, 0.1)
    expected = paged_attention.reference(q.float(), case.cache.float(), *args)
    torch.testing.assert_close(out[0].float(), expected[0], rtol=6e-3, atol=6e-3)
    assert (out[1:] == 7).all()


MIXED = [
    pytest.param(8, 2, 64, 16, (1, 17, 5, 1), (70, 17, 100, 1), {}, id="mixed"),
    pytest.param(4, 4, 128, 64, (33, 0, 9), (200, 5, 9), {}, id="empty-request"),
    pytest.param(6, 2, 64, 16, (19, 1), (140, 64), {"window": 12}, id="window"),
    pytest.param(9, 3, 96, 16, (1, 16), (50, 60), {"softcap": 20.0}, id="softcap"),
    pytest.param(8, 1, 64, 32, (7, 3), (150, 20), {"sinks": True}, id="sinks"),
    pytest.param(8, 8, 64, 16, (12, 1), (20, 31), {"alibi": True}, id="alibi"),
]


@pytest.mark.parametrize("shape", [None, (32, 64, 2, 4)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "query_lens", "lens", "features"), MIXED)
def test_mixed_batches(heads, kv_heads, dim, block_size, query_lens, lens, features, shape):
    check_mixed_batch(heads, kv_heads, dim, block_size, query_lens, lens, features, shape)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "query_lens", "lens", "features"), MIXED)
def test_mixed_batches_from_8_bits(heads, kv_heads, dim, block_size, query_lens, lens, features):
    check_mixed_batch(heads, kv_heads, dim, block_size, query_lens, lens, features | SCALES, None, FP8)


def check_mixed_batch(heads, kv_heads, dim, block_size, query_lens, lens, features, shape, cache_dtype=None):
    case = Case(heads, kv_heads, dim, block_size, lens, cache_dtype=cache_dtype)
    starts = [0]
    for n in query_lens:
        starts.append(starts[-1] + n)
    start_loc = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    q = case.make(starts[-1], heads, dim, std=3.0)
    options = {"window": 0, "softcap": 0.0, "sinks": None, "distance_bias": None} | case.features(**features)
    args = (case.table, start_loc, case.seq_lens, max(query_lens), max(lens), dim**-0.5)
    expected = paged_attention.reference(q.float(), case.cache.float(), *args, **options)
    tolerance = 6e-3 * features.get("v_scale", 1.0)
    if shape is None:
        actual = paged_attention_triton(q, case.cache, *args, **options, query_start_loc_cpu=starts)
        rows = slice(None)
    else:
        actual = torch.zeros_like(q)
        launch_prefill(
            q, case.cache, case.table, start_loc, case.seq_lens, dim**-0.5, *options.values(), actual, shape=shape
        )
        rows = [t for r, n in enumerate(query_lens) if n > 1 for t in range(starts[r], starts[r + 1])]
    torch.testing.assert_close(actual[rows].float(), expected[rows], rtol=6e-3, atol=tolerance)


def test_rows_after_the_last_request_are_zero():
    case = Case(4, 2, 64, 16, (40,))
    starts = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    q = case.make(8, 4, 64)
    out = paged_attention_triton(q, case.cache, case.table, starts, case.seq_lens, 5, 40, 0.1)
    assert (out[5:] == 0).all() and (out[:5] != 0).any()


def test_choice_fits_any_batch():
    for batch in (1, 3, 8, 40, 1000):
        for element_size in (2, 4):
            config = choose(batch, 32, 8, 256, element_size)
            assert config.wanted_splits >= 1 and config.min_tokens >= config.tile
