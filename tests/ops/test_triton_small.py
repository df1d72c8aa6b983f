"""The streaming Triton kernels: norms, activations, embedding, rotary embedding with cache write; and launching."""
# The kernels can only be imported where they can run.
# ruff: noqa: E402

import pytest
import torch

from octavo.ops import triton_utils
from octavo.ops.triton_support import has_triton, is_interpreting

if not has_triton():
    pytest.skip("needs a GPU, or the child process of test_triton_interpreter.py", allow_module_level=True)

from octavo import ops

ops.load_providers()

from octavo.ops.activation import GATES, gated_activation
from octavo.ops.activation_triton import gated_activation_triton
from octavo.ops.embedding import embedding
from octavo.ops.embedding_triton import embedding_triton
from octavo.ops.norm import rms_norm
from octavo.ops.norm_triton import rms_norm_triton
from octavo.ops.rope import qkv_rope_write, write_kv
from octavo.ops.rope_triton import qkv_rope_write_triton, write_kv_triton

# The interpreter computes with NumPy, which warns where a GPU saturates.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if is_interpreting() else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(actual, expected, dtype):
    torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 4096), (5, 3, 96), (70, 64)], ids=str)
def test_rms_norm(shape, dtype):
    x, weight = make(*shape, dtype=dtype), make(shape[-1], dtype=dtype, seed=1)
    assert_close(rms_norm_triton(x, weight, 1e-5), rms_norm.reference(x.float(), weight.float(), 1e-5), dtype)


def test_rms_norm_of_a_column_slice():
    x, weight = make(4, 300)[:, 7:103], make(96, seed=1)
    assert_close(rms_norm_triton(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", GATES)
def test_gated_activation(activation, dtype):
    x = 4 * make(3, 2 * 1100, dtype=dtype)
    expected = gated_activation.reference(x.float(), activation)
    torch.testing.assert_close(
        gated_activation_triton(x, activation).float(),
        expected,
        rtol=TOLERANCE[dtype],
        atol=max(TOLERANCE[dtype], 1e-5),
    )


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_embedding(id_dtype):
    weight, ids = make(50, 1500), torch.tensor([3, 49, 0, 3], dtype=id_dtype, device=DEVICE)
    assert torch.equal(embedding_triton(ids, weight), embedding.reference(ids, weight))
    assert_close(embedding_triton(ids, weight, 2.5), embedding.reference(ids, weight, 2.5), torch.float32)


def test_embedding_of_an_impossible_id_stays_inside_the_table():
    weight = make(50, 96)
    ids = torch.tensor([-1, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    assert torch.equal(embedding_triton(ids, weight), weight[[0, 49]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "rotary", "interleaved", "q_norm", "k_norm"),
    [
        (8, 2, 64, 16, 64, False, True, True),
        (6, 3, 96, 16, 32, True, False, True),
        (9, 3, 64, 8, 0, False, True, False),
        (4, 1, 128, 64, 128, False, False, False),
    ],
)
def test_qkv_rope_write(heads, kv_heads, dim, block_size, rotary, interleaved, q_norm, k_norm, dtype):
    width = (heads + 2 * kv_heads) * dim
    qkv = make(5, width + 8, dtype=dtype)[:, :width]  # rows apart from one another
    slots = torch.tensor([block_size + 1, 3 * block_size + 2, -1, 2 * block_size, 5 * block_size - 1], device=DEVICE)
    positions = torch.tensor([4, 0, 2, 9, 1], device=DEVICE)
    cos_sin = make(10, rotary, seed=1) if rotary else None
    norms = [make(dim, dtype=dtype, seed=2) if q_norm else None, make(dim, dtype=dtype, seed=3) if k_norm else None]
    cache = torch.zeros(6, 2, block_size, kv_heads, dim, dtype=dtype, device=DEVICE)
    expected_cache = cache.float().clone()
    q = qkv_rope_write_triton(qkv, positions, cos_sin, cache, slots, heads, kv_heads, *norms, 1e-6, interleaved)
    wide_norms = [None if n is None else n.float() for n in norms]
    expected = qkv_rope_write.reference(
        qkv.float().contiguous(),
        positions,
        cos_sin,
        expected_cache,
        slots,
        heads,
        kv_heads,
        *wide_norms,
        1e-6,
        interleaved,
    )
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(q.float(), expected, rtol=tolerance, atol=tolerance)
    assert not cache[0].any()  # the reference parks dropped slots in block 0; the kernel writes nothing
    torch.testing.assert_close(cache[1:].float(), expected_cache[1:], rtol=tolerance, atol=tolerance)


def test_write_kv():
    kv = make(3, 2, 2, 96, dtype=torch.float16)
    k, v = kv[:, 0], kv[:, 1]
    slots = torch.tensor([17, -1, 40], device=DEVICE)
    cache = torch.zeros(4, 2, 16, 2, 96, dtype=torch.float16, device=DEVICE)
    expected = cache.clone()
    write_kv_triton(k, v, cache, slots)
    write_kv.reference(k, v, expected, slots)
    assert not cache[0].any() and torch.equal(cache[1:], expected[1:])


FP8 = torch.float8_e4m3fn


def assert_same_e4m3(actual, expected):
    """Equal but for numbers next to a rounding boundary: few, and one step of the format away.

    Triton's interpreter loses the carry of a mantissa that rounds up to the next power of two, which leaves half of it.
    """
    actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(actual, expected, rtol=0.5 if is_interpreting() else 0.15, atol=2**-9)
    assert (actual != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv_in_8_bits(dtype):
    """Divided by its own scale; what is too large saturates."""
    k, v = make(3, 2, 96, dtype=dtype), 5 * make(3, 2, 96, dtype=dtype, seed=1)
    k[0, 0, 0], k[0, 0, 1] = 1000, -1000
    if not is_interpreting():  # whose conversion makes a number of NaN
        v[2, 1, 3] = float("nan")
    slots = torch.tensor([17, 3, 40], device=DEVICE)
    cache = torch.zeros(4, 2, 16, 2, 96, device=DEVICE).to(FP8)
    expected = cache.clone()
    write_kv_triton(k, v, cache, slots, 0.5, 0.05)
    write_kv.reference(k, v, expected, slots, 0.5, 0.05)
    assert cache[1, 0, 1, 0, :2].float().tolist() == [448.0, -448.0]
    assert cache[2, 1, 8].float().isnan().sum() == (not is_interpreting())
    assert_same_e4m3(cache.float().nan_to_num(), expected.float().nan_to_num())
    torch.testing.assert_close(0.05 * expected[0, 1, 3].float(), v[1].float(), rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qkv_rope_write_in_8_bits(dtype):
    heads, kv_heads, dim = 6, 2, 64
    qkv, cos_sin = make(3, (heads + 2 * kv_heads) * dim, dtype=dtype), make(10, dim, seed=1)
    positions, slots = torch.tensor([4, 0, 9], device=DEVICE), torch.tensor([17, 30, -1], device=DEVICE)
    cache = torch.zeros(3, 2, 16, kv_heads, dim, device=DEVICE).to(FP8)
    expected_cache = cache.clone()
    arguments = (slots, heads, kv_heads, None, make(dim, dtype=dtype, seed=2), 1e-6, False, 0.25, 0.03)
    q = qkv_rope_write_triton(qkv, positions, cos_sin, cache, *arguments)
    expected = qkv_rope_write.reference(qkv, positions, cos_sin, expected_cache, *arguments)
    torch.testing.assert_close(q, expected, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    assert not cache[0].float().any()
    assert_same_e4m3(cache[1:], expected_cache[1:])


def test_recorded_launches_run_nothing():
    x = torch.empty(3, 64, device="meta")
    with triton_utils.override_pdl(False), triton_utils.record_launches() as launches:
        rms_norm_triton(x, x[0], 1e-5)
    (launch,) = launches
    assert (
        launch.args[0] == triton_utils.NotedTensor(torch.float32, True)
        and launch.options["WIDTH"] == 64
        and "launch_pdl" not in launch.options
    )


def test_outgrown_scratch_stays_alive():
    """A captured graph may hold the address."""
    device = torch.device(DEVICE)
    small = triton_utils.scratch("test", 10, device)
    assert triton_utils.scratch("test", 20, device) is small
    large = triton_utils.scratch("test", small.numel() + 1, device)
    assert large is not small and any(t is small for t in triton_utils._retired)


def test_counters_are_bounded():
    with pytest.raises(ValueError, match="arrival counters"):
        triton_utils.counters(1 << 20, torch.device(DEVICE))
