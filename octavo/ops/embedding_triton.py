"""Provider "triton" of the token embedding."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.embedding import embedding
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit
def _embedding_kernel(
    ids,  # [tokens] int32 or int64
    weight,  # [vocab, WIDTH]
    out,  # [tokens, WIDTH]
    vocab,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program copies BLOCK columns of one token's row. Grid (tokens, cdiv(WIDTH, BLOCK)).

    It waits before it lets its successors start: then they, and theirs, may read the step's metadata without waiting for it.
    An id outside the vocabulary, which only a fault elsewhere can produce, reads the nearest row instead of foreign memory.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.minimum(tl.maximum(tl.load(ids + token), 0), vocab - 1).to(tl.int64)
    v = tl.load(weight + row * WIDTH + columns, mask=inside, other=0.0)
    if SCALED:
        v = (v.to(tl.float32) * scale).to(v.dtype)
    tl.store(out + token * WIDTH + columns, v, mask=inside)


def _accepts(input_ids, weight, scale=1.0) -> bool:
    return (
        runs_on_triton(weight)
        and input_ids.dim() == 1
        and input_ids.numel() > 0
        and input_ids.is_contiguous()
        and weight.is_contiguous()
    )


@embedding.register("triton", supported=has_triton, accepts=_accepts)
def embedding_triton(input_ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A gather of rows."""
    tokens, (vocab, width) = input_ids.shape[0], weight.shape
    out = torch.empty(tokens, width, dtype=weight.dtype, device=weight.device)
    block = min(1024, next_power_of_2(width))
    launch(
        _embedding_kernel,
        (tokens, triton.cdiv(width, block)),
        input_ids,
        weight,
        out,
        vocab,
        scale,
        WIDTH=width,
        BLOCK=block,
        SCALED=scale != 1.0,
        num_warps=4,
    )
    return out
