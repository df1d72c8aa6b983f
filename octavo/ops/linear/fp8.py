"""Linear layers on 8-bit floating point (E4M3) weights, activations rounded to the same format as they come.

A number is its 8 bits times a float32 scale. Weights share a scale by output row [out], by tensor [], or by block of 128 x
128 [out / 128, in / 128]; activations share one by token, or by 128 neighbours of a token when the weight's scales are by
block. Rounding the activations is part of the operator's meaning, and costs about 2.6 % of the result's size; a provider may
leave it out where exact activations are as cheap (one token: the time goes into reading the weight).
"""

import torch
import torch.nn.functional as F

from octavo.ops.activation import gated_activation
from octavo.ops.norm import rms_norm
from octavo.ops.registry import op

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_SCALE = 1e-12  # of a row of zeros
BLOCK = 128  # rows and columns of a weight block, columns of an activation group


@op
def quantize_fp8(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    group: int | None = None,
    given_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, k] as E4M3 numbers and float32 scales, after an RMSNorm or a gated activation.

    `norm_weight` [k] normalises first; `activation` names a gate of `ops.activation`, and x is then [tokens, 2 * k]. The
    scale makes the largest of a token 448, or of each `group` neighbours; `given_scale` [] is taken instead, and what it
    cannot hold saturates. Returns ([tokens, k] float8_e4m3fn, [tokens, 1 or k / group] float32).
    """
    if norm_weight is not None:
        x = rms_norm.reference(x.float(), norm_weight.float(), eps)
    if activation is not None:
        x = gated_activation.reference(x.float(), activation)
    groups = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    if given_scale is None:
        scale = (groups.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(MIN_SCALE)
    else:
        scale = given_scale.float().expand(*groups.shape[:-1], 1)
    quants = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return quants.flatten(-2), scale.squeeze(-1).contiguous()


def dequantize_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers [out, in] in float32; scale [], [out] or, by block, [out / 128, in / 128] rounded up."""
    if scale.dim() == 2:
        out, width = weight.shape
        scale = scale.repeat_interleave(BLOCK, 0)[:out].repeat_interleave(BLOCK, 1)[:, :width]
    elif scale.dim() == 1:
        scale = scale[:, None]
    return weight.float() * scale.float()


def activation_group(weight_scale: torch.Tensor) -> int | None:
    """Neighbours that share an activation scale; None: a whole token."""
    return BLOCK if weight_scale.dim() == 2 else None


@op
def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + scale * activation(round(norm(x)) @ weight.T + bias), see `ops.linear`; computed in float32.

    x [tokens, in], weight [out, in] float8_e4m3fn, weight_scale [], [out] or [out / 128, in / 128] float32, `input_scale` []
    float32 the activations' scale if it is fixed. Returns [tokens, out or out / 2] in x's dtype.
    """
    quants, x_scale = quantize_fp8.reference(x, norm_weight, eps, None, activation_group(weight_scale), input_scale)
    rounded = (quants.float().unflatten(-1, (x_scale.shape[-1], -1)) * x_scale[..., None]).flatten(-2)
    y = F.linear(rounded, dequantize_weight(weight, weight_scale), None if bias is None else bias.float())
    if activation is not None:
        y = gated_activation.reference(y, activation)
    if residual is not None:
        y = torch.add(residual.float(), y, alpha=scale)
    return y.to(x.dtype)


def _has_scaled_mm() -> bool:
    """Whether torch multiplies E4M3 matrices with scales by row here."""
    if not torch.cuda.is_available() or torch.version.cuda is None or not hasattr(torch, "_scaled_mm"):
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


def _scaled_mm_accepts(
    x, weight, weight_scale, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0,
    input_scale=None,
) -> bool:  # fmt: skip
    return (
        x.is_cuda
        and x.dim() == 2
        and x.shape[0] > 0
        # float32 callers want more than the product's bfloat16 result.
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight_scale.dim() == 1
        and weight.is_contiguous()
        and all(size % 16 == 0 for size in weight.shape)
    )


@linear_fp8.register("scaled_mm", supported=_has_scaled_mm, accepts=_scaled_mm_accepts)
def linear_fp8_scaled_mm(
    x, weight, weight_scale, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0,
    input_scale=None,
):  # fmt: skip
    """The vendor's product with scales by row, the rest as operators around it: for many tokens."""
    quants, x_scale = quantize_fp8(x, norm_weight, eps, None, None, input_scale)
    # The product takes the weight as [in, out] with its columns contiguous, and its results are bfloat16 only.
    y = torch._scaled_mm(
        quants, weight.t(), x_scale, weight_scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
    ).to(x.dtype)
    if bias is not None:
        y += bias
    if activation is not None:
        y = gated_activation(y, activation)
    return y if residual is None else torch.add(residual, y, alpha=scale)


def _quantize_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for tokens, width in ((1, 576), (5, 1536), (3, 4096)):
        x = torch.randn(tokens, width, generator=rng).to(device, dtype)
        yield (x,)
        yield x, (1 + 0.1 * torch.randn(width, generator=rng)).to(device, dtype), 1e-5
        yield x, None, 0.0, None, None, torch.tensor(0.005, device=device)
        if width % BLOCK == 0:
            yield x, None, 0.0, "silu"
            yield x, None, 0.0, None, BLOCK


def _linear_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(device, dtype)

    def weight(out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        quants, scale = quantize_fp8.reference(torch.randn(out, width, generator=rng) / width**0.5)
        return quants.to(device), scale[:, 0].to(device)

    for tokens, width, out in ((1, 576, 960), (3, 256, 512), (17, 1536, 576)):
        x, gamma, residual = normal(tokens, width), 1 + 0.1 * normal(width), normal(tokens, out)
        yield x, *weight(out, width)
        yield x, *weight(out, width), normal(out), gamma, 1e-5
        yield x, *weight(2 * out, width), None, gamma, 1e-5, "silu"
        yield x, *weight(out, width), None, None, 0.0, None, residual, 0.22
        yield x, *weight(out, width), None, None, 0.0, None, residual, 1.0, torch.tensor(0.01, device=device)


def _bench_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    quants, scale = quantize_fp8.reference(torch.randn(4096, 4096, generator=rng) / 64)
    weight = quants.to(device), scale[:, 0].to(device)
    for tokens in (1, 8, 64, 512):
        yield torch.randn(tokens, 4096, generator=rng).to(device, dtype), *weight


def _bytes_and_flops(
    x, weight, weight_scale, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0,
    input_scale=None,
):  # fmt: skip
    """Each operand and the result once; of the arithmetic, the product."""
    tokens, out = x.numel() // x.shape[-1], weight.shape[0]
    width = out if activation is None else out // 2
    operands = [t for t in (x, weight, weight_scale, bias, norm_weight, residual) if t is not None]
    num_bytes = sum(t.numel() * t.element_size() for t in operands) + tokens * width * x.element_size()
    return num_bytes, 2 * tokens * out * weight.shape[1]


linear_fp8.bench_inputs = _bench_inputs
linear_fp8.bytes_and_flops = _bytes_and_flops
quantize_fp8.inputs = _quantize_inputs
linear_fp8.inputs = _linear_inputs
# Two roundings of nearly equal numbers may fall on neighbouring E4M3 values, which are up to 1/8 apart.
quantize_fp8.tolerance = dict.fromkeys(quantize_fp8.tolerance, (0.13, 0.02))
# One token is multiplied unrounded: 2.6 % of results of size 1, up to four times as much for the worst of thousands.
linear_fp8.tolerance = dict.fromkeys(linear_fp8.tolerance, (0.1, 0.15))
