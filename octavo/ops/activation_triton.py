"""Provider "triton" of the gated activations."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.activation import gated_activation
from octavo.ops.triton_device import apply_gate
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit
def _gated_activation_kernel(
    x,  # [tokens, 2 * width]: gate | up
    out,  # [tokens, width]
    width,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK results of one token. Grid (tokens, cdiv(width, BLOCK))."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    y = apply_gate(gate, ACTIVATION) * up
    tl.store(out + token * width + columns, y.to(out.dtype.element_ty), mask=inside)


def _accepts(x, activation) -> bool:
    return runs_on_triton(x) and x.dim() == 2 and x.is_contiguous() and x.numel() > 0


@gated_activation.register("triton", supported=has_triton, accepts=_accepts)
def gated_activation_triton(x: torch.Tensor, activation: str) -> torch.Tensor:
    """One pass over both halves."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    # Eight values, one load of 16 bytes, a thread of 4 warps.
    block = min(1024, next_power_of_2(width))
    launch(
        _gated_activation_kernel,
        (tokens, triton.cdiv(width, block)),
        x,
        out,
        width,
        BLOCK=block,
        ACTIVATION=activation,
        num_warps=4,
    )
    return out
