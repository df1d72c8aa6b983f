"""The Triton kernels of latent attention against the reference."""
# The kernels can only be imported where they can run.
# ruff: noqa: E402

import pytest
import torch

from octavo.ops.attention.mla import latent_decode, latent_rope_write
from octavo.ops.triton_support import has_triton, is_interpreting
from octavo.ops.triton_utils import counters

if not has_triton():
    pytest.skip("needs a GPU, or the child process of test_triton_interpreter.py", allow_module_level=True)

from octavo import ops

ops.load_providers()

from octavo.ops.attention.triton_mla import latent_decode_triton, latent_rope_write_triton

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


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 260), (torch.float16, 4096)])
def test_decode(dtype, bound):
    for q_latent, q_rope, cache, table, seq_lens, _, scale in latent_decode.inputs(
        torch.Generator().manual_seed(0), dtype, DEVICE
    ):
        seq_lens[1] = 0  # graph padding
        # Queries come out of a batched product, head by head.
        q_latent = q_latent.transpose(0, 1).contiguous().transpose(0, 1)
        actual = latent_decode_triton(q_latent, q_rope, cache, table, seq_lens, bound, scale)
        expected = latent_decode.reference(q_latent, q_rope, cache, table, seq_lens, bound, scale)
        assert not actual[1].any()
        live = [0, 2, 3]
        torch.testing.assert_close(actual[live], expected[live], rtol=4e-3, atol=4e-3)
        assert not counters(1, cache.device)[:64].any()
