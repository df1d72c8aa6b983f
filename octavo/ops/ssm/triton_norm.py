"""Provider "triton" of the gated norm."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.ssm.norm import gated_norm
from octavo.ops.triton_device import apply_gate
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit
def _gated_norm_kernel(
    x,  # [tokens, groups * SIZE], tokens x_stride apart
    gate,  # the same, tokens gate_stride apart
    weight,  # [groups * SIZE], or [SIZE] if SHARED
    out,  # [tokens, groups * SIZE]
    eps,
    x_stride,
    gate_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes one group of one token. Grid (tokens, groups)."""
    if PDL:
        gdc_launch_dependents()
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    at = group * SIZE + i
    w = tl.load(weight + (i if SHARED else at), mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    v = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    factor = apply_gate(tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32), "silu")
    if GATE_FIRST:
        v *= factor
    y = v * tl.rsqrt(tl.sum(v * v) / SIZE + eps) * w
    if not GATE_FIRST:
        y *= factor
    tl.store(out + token * tl.num_programs(1) * SIZE + at, y.to(out.dtype.element_ty), mask=inside)


def _accepts(x, gate, weight, eps, group_size, gate_first) -> bool:
    dense = x.stride(1) == gate.stride(1) == 1 and weight.is_contiguous()
    return runs_on_triton(x) and x.shape[0] > 0 and dense and group_size <= 1 << 15


@gated_norm.register("triton", supported=has_triton, accepts=_accepts)
def _gated_norm_triton(x, gate, weight, eps, group_size, gate_first):
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    block = next_power_of_2(group_size)
    launch(
        _gated_norm_kernel, (tokens, channels // group_size),
        x, gate, weight, out, eps, x.stride(0), gate.stride(0),
        SIZE=group_size, BLOCK=block, SHARED=weight.shape[0] == group_size, GATE_FIRST=gate_first,
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return out
