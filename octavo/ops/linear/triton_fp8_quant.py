"""Provider "triton" of `quantize_fp8`: norm or activation, largest value and rounding in one pass over a token."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.linear.fp8 import FP8, FP8_MAX, MIN_SCALE, quantize_fp8
from octavo.ops.triton_device import apply_gate
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2

# One program holds a token in registers: 32 Ki values are 64 a thread of 16 warps.
_MAX_WIDTH = 1 << 15


@triton.jit
def _quantize_fp8_kernel(
    x,  # [tokens, WIDTH], or [tokens, 2 * WIDTH] with an activation: gate | up
    norm_weight,  # [WIDTH]
    given_scale,  # []
    out,  # [tokens, WIDTH] E4M3
    scales,  # [tokens, WIDTH / GROUP] float32
    eps,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program rounds one token. Grid (tokens,)."""
    if PDL:
        gdc_launch_dependents()
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, PADDED_GROUPS)
    member = tl.arange(0, PADDED_GROUP)
    columns = group[:, None] * GROUP + member[None, :]
    inside = (group < NUM_GROUPS)[:, None] & (member < GROUP)[None, :]
    if HAS_NORM:
        gamma = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        fixed = tl.load(given_scale)
    if PDL:
        gdc_wait()
    if ACTIVATION == "":
        v = tl.load(x + token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        gate = tl.load(x + token * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + token * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        v = apply_gate(gate, ACTIVATION) * up
    if HAS_NORM:
        v = v * tl.rsqrt(tl.sum(tl.sum(v * v, axis=1), axis=0) / WIDTH + eps) * gamma
    if HAS_SCALE:
        scale = tl.full([PADDED_GROUPS], 1.0, tl.float32) * fixed
    else:
        scale = tl.maximum(tl.max(tl.abs(v), axis=1) / LARGEST, LEAST_SCALE)
    v = tl.minimum(tl.maximum(v / scale[:, None], -LARGEST), LARGEST)
    tl.store(scales + token * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)
    tl.store(out + token * WIDTH + columns, v.to(out.dtype.element_ty), mask=inside)


def _accepts(x, norm_weight=None, eps=0.0, activation=None, group=None, given_scale=None) -> bool:
    width = x.shape[-1] // (1 if activation is None else 2)
    return (
        x.dim() == 2
        and x.numel() > 0
        and x.is_contiguous()
        and runs_on_triton(x)
        and width <= _MAX_WIDTH
        and (group is None or (width % group == 0 and next_power_of_2(group) == group))
        and (norm_weight is None or norm_weight.is_contiguous())
        and (given_scale is None or (given_scale.numel() == 1 and given_scale.dtype == torch.float32))
    )


@quantize_fp8.register("triton", supported=has_triton, accepts=_accepts)
def quantize_fp8_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    group: int | None = None,
    given_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One program a token."""
    tokens = x.shape[0]
    width = x.shape[1] // (1 if activation is None else 2)
    group = group or width
    padded_group, padded_groups = next_power_of_2(group), next_power_of_2(width // group)
    out = torch.empty(tokens, width, dtype=FP8, device=x.device)
    scales = torch.empty(tokens, width // group, dtype=torch.float32, device=x.device)
    launch(
        _quantize_fp8_kernel,
        (tokens,),
        x,
        x if norm_weight is None else norm_weight,
        scales if given_scale is None else given_scale,
        out,
        scales,
        eps,
        WIDTH=width,
        GROUP=group,
        PADDED_GROUPS=padded_groups,
        PADDED_GROUP=padded_group,
        LARGEST=FP8_MAX,
        LEAST_SCALE=MIN_SCALE,
        ACTIVATION=activation or "",
        HAS_NORM=norm_weight is not None,
        HAS_SCALE=given_scale is not None,
        # Sixteen values, one store of 16 bytes, a thread while there are at most 8 warps of them.
        num_warps=min(16 if padded_group * padded_groups > 16384 else 8, max(1, padded_group * padded_groups // 512)),
    )
    return out, scales
