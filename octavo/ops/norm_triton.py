"""Provider "triton" of the normalisations."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.norm import rms_norm
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,  # [num_rows, WIDTH], rows row_stride apart
    weight,  # [WIDTH]
    out,  # [num_rows, WIDTH]
    num_rows,
    row_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program normalises ROWS whole rows. Grid (cdiv(num_rows, ROWS),)."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside_columns = columns < WIDTH
    w = tl.load(weight + columns, mask=inside_columns, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    inside = (rows < num_rows)[:, None] & inside_columns[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    v = tl.load(x + wide_rows * row_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(v * v, axis=1) / WIDTH + eps)
    y = v * rstd[:, None] * w[None, :]
    tl.store(out + wide_rows * WIDTH + columns[None, :], y.to(out.dtype.element_ty), mask=inside)


# One program holds a row in registers: 32 Ki values are 64 a thread of 16 warps.
_MAX_WIDTH = 1 << 15


def _accepts(x, weight, eps) -> bool:
    return (
        runs_on_triton(x)
        and x.dtype == weight.dtype
        and x.shape[-1] <= _MAX_WIDTH
        and x.numel() > 0
        and weight.is_contiguous()
        and (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1))
    )


@rms_norm.register("triton", supported=has_triton, accepts=_accepts)
def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One pass, rows in registers."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    row_stride = width if x.is_contiguous() else x.stride(0)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(width)
    # Narrow rows (head norms) share a program, so that it has about 2 Ki values to load. However many there are: how a row is
    # summed up must not depend on its neighbours.
    rows = max(1, 2048 // block)
    # Eight values, one load of 16 bytes, a thread while there are at most 8 warps of them.
    num_warps = min(16 if block > 8192 else 8, max(1, block * rows // 256))
    launch(
        _rms_norm_kernel,
        (triton.cdiv(num_rows, rows),),
        x,
        weight,
        out,
        num_rows,
        row_stride,
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        num_warps=num_warps,
    )
    return out
