"""The Triton kernels of latent attention against the reference."""
# The kernels can only be imported where they can run.
# ruff: noqa: E402

import itertools

import pytest
import torch

from octavo.ops.attention.mla import latent_attention, latent_decode, latent_decode_attention, latent_rope_write
from octavo.ops.triton_support import has_triton, is_interpreting
from octavo.ops.triton_utils import counters

if not has_triton():
    pytest.skip("needs a GPU, or the child process of test_triton_interpreter.py", allow_module_level=True)

from octavo import ops

ops.load_providers()

from octavo.ops.attention import triton_mla_prefill
from octavo.ops.attention.triton_mla import LatentDecodeConfig, latent_decode_triton, latent_rope_write_triton
from octavo.ops.attention.triton_mla_step import latent_decode_attention_triton

DEVICE = "cpu" if is_interpreting() else "cuda"
# The interpreter multiplies the raw bits of bfloat16.
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_write(dtype):
    for *args, cache, slots, interleaved in latent_rope_write.inputs(torch.Generator().manual_seed(0), dtype, DEVICE):
        slots[1] = -1
        expected_cache = cache.clone()
        expected = latent_rope_write.reference(*args, expected_cache, slots, interleaved)
        actual = latent_rope_write_triton(*args, cache, slots, interleaved)
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)
        # Block 0 takes what the reference drops.
        torch.testing.assert_close(cache[1:], expected_cache[1:], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "bound", "value_blocks"), [(torch.float32, 260, 1), (torch.float16, 4096, 1), (torch.float16, 260, 4)]
)
def test_decode(dtype, bound, value_blocks):
    config = LatentDecodeConfig(16, 2, 4, value_blocks, 40)
    for q_latent, q_rope, cache, table, seq_lens, _, scale, *starts in latent_decode.inputs(
        torch.Generator().manual_seed(0), dtype, DEVICE
    ):
        live = [0, 1, 2, 3]
        if not starts:
            seq_lens = seq_lens * torch.tensor([1, 0, 1, 1], device=DEVICE, dtype=torch.int32)  # graph padding
            live.remove(1)
        # Queries come out of a batched product, head by head.
        q_latent = q_latent.transpose(0, 1).contiguous().transpose(0, 1)
        args = (q_latent, q_rope, cache, table, seq_lens, bound, scale, *starts)
        actual = latent_decode_triton(*args, config=config)
        expected = latent_decode.reference(*args)
        assert starts or not actual[1].any()
        torch.testing.assert_close(actual[live], expected[live], rtol=4e-3, atol=4e-3)
        assert not counters(1, cache.device)[:64].any()


def test_step():
    """A whole decode step, its last request graph padding."""
    for q, latent, positions, *rest in latent_decode_attention.inputs(
        torch.Generator().manual_seed(0), torch.float16, DEVICE
    ):
        table, norm, eps, up, cache, slots, block_table, seq_lens, *tail = rest
        slots[2], seq_lens[2] = -1, 0
        wide = torch.cat((q.flatten(1), latent), -1)  # one product makes both
        q, latent = wide[:, : q[0].numel()].unflatten(1, q.shape[1:]), wide[:, q[0].numel() :]
        expected_cache = cache.clone()
        args = (q, latent, positions, table, norm, eps, up)
        expected = latent_decode_attention.reference(*args, expected_cache, slots, block_table, seq_lens, *tail)
        actual = latent_decode_attention_triton(*args, cache, slots, block_table, seq_lens, *tail)
        torch.testing.assert_close(actual[:2], expected[:2], rtol=4e-3, atol=4e-3)
        assert actual.isfinite().all()
        # Block 0 takes what the reference drops.
        torch.testing.assert_close(cache[1:], expected_cache[1:], rtol=2e-3, atol=2e-3)


def prompts(dtype, query_lens, contexts):
    """Arguments of `latent_attention` for chunks of `query_lens` tokens behind `contexts`; keys 24 + 16 wide, values 40."""
    rng = torch.Generator().manual_seed(0)
    heads, rank, rope_dim, block_size = 3, 64, 16, 16
    seq_lens = [n + c for n, c in zip(query_lens, contexts, strict=True)]
    width = -(-max(seq_lens) // block_size)
    table = (torch.randperm(len(seq_lens) * width, generator=rng) + 1).int().view(-1, width)
    cache = torch.randn(table.numel() + 1, block_size, rank + rope_dim, generator=rng)
    up = torch.randn(heads, 24 + 40, rank, generator=rng) / rank**0.5
    # Queries wide enough that the softmax is far from uniform; a part of a wider projection, as the model hands them over.
    q = 2 * torch.randn(sum(query_lens), heads * (24 + rope_dim) + 8, generator=rng)
    q = q.to(DEVICE, dtype)[:, :-8].unflatten(1, (heads, -1))
    starts = [0, *itertools.accumulate(query_lens)]
    tensors = (table, torch.tensor(starts, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32))
    return (
        q[..., :24], q[..., 24:], up.to(DEVICE, dtype), cache.to(DEVICE, dtype), *(t.to(DEVICE) for t in tensors),
        max(query_lens), max(seq_lens), 40**-0.5, starts, seq_lens,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("query_lens", "contexts", "num_absorbed"),
    [
        ((40, 33, 1), (0, 0, 0), 0),
        # Decodes and a short chunk before prompts; then single tokens behind them, which are short chunks.
        ((1, 3, 1, 35, 50, 1, 17), (70, 5, 0, 21, 0, 90, 0), 3),
        ((2, 1, 32), (3, 47, 100), 3),
    ],
)
def test_prompts(dtype, query_lens, contexts, num_absorbed):
    args = prompts(dtype, query_lens, contexts)
    assert triton_mla_prefill.num_absorbed(*args[-2:]) == num_absorbed
    expected = latent_attention.reference(*args)
    actual = triton_mla_prefill.latent_attention_triton(*args)
    torch.testing.assert_close(actual, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("window", [16, 60])
def test_windows(window):
    """Windows end within a request, at its end, and hold several."""
    args = prompts(torch.float32, (20, 40, 3, 6), (60, 7, 0, 100))
    *head, _, lens = args
    q_nope, q_rope, up, cache, table, start_loc, seq_lens, _, _, scale = head
    expected = latent_attention.reference(*args)
    out = torch.full_like(expected, float("nan"))
    # The first request is somebody else's.
    triton_mla_prefill.attend_expanded(
        q_nope, q_rope, up, cache, table[1:], start_loc[1:], seq_lens[1:], scale, out, sum(lens[1:]), 49, window,
    )  # fmt: skip
    torch.testing.assert_close(out[20:], expected[20:], rtol=1e-4, atol=1e-4)
    assert out[:20].isnan().all()
