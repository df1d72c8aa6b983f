"""Linear layers with what surrounds them: an RMSNorm before, an activation, a scaled residual after.

One operator covers the five products of a transformer layer's step, so that a provider may fuse the small work around a
product into it: at small batch the time goes into the number of kernels, not into arithmetic.
"""

import torch
import torch.nn.functional as F

from octavo.ops.activation import gated_activation
from octavo.ops.norm import rms_norm
from octavo.ops.registry import op


@op
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """residual + scale * activation(norm(x) @ weight.T + bias).

    x [tokens, in], weight [out, in], bias [out]. `norm_weight` [in] applies an RMSNorm to x first; `activation` names a
    gate of `ops.activation` and halves the width (weight holds the gate's rows, then the gated ones); `residual` has the
    result's shape and is consumed: the result may take its memory. Returns [tokens, out or out / 2] in x's dtype.
    """
    if norm_weight is not None:
        x = rms_norm.reference(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if activation is not None:
        y = gated_activation.reference(y, activation)
    if residual is not None:
        y = torch.add(residual, y, alpha=scale)
    return y


@linear.register("composed")
def _linear_composed(x, weight, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0):
    """The same out of operators: vendor matrix product between the fastest norm and activation."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if residual is not None and activation is None and bias is None and x.is_cuda:
        # The product's own epilogue adds the residual where it lies: no copy, no second pass over the output.
        return residual.addmm_(x, weight.t(), alpha=scale)
    y = F.linear(x, weight, bias)
    if activation is not None:
        y = gated_activation(y, activation)
    if residual is not None:
        y = torch.add(residual, y, alpha=scale)
    return y


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    def make(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) / shape[-1] ** 0.5).to(device, dtype)

    for tokens, width, out in ((1, 576, 960), (3, 256, 512), (8, 1536, 576), (40, 128, 256)):
        x = torch.randn(tokens, width, generator=rng).to(device, dtype)
        gamma = (1 + 0.1 * torch.randn(width, generator=rng)).to(device, dtype)
        residual = torch.randn(tokens, out, generator=rng).to(device, dtype)
        yield x, make(out, width)
        yield x, make(out, width), make(1, out)[0], gamma, 1e-5
        yield x, make(2 * out, width), None, gamma, 1e-5, "silu"
        yield x, make(out, width), None, None, 0.0, None, residual, 1.0
        yield x, make(out, width), None, None, 0.0, None, residual, 0.22


linear.inputs = _inputs


def _bench_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    weight = (torch.randn(4096, 4096, generator=rng) / 64).to(device, dtype)
    for tokens in (1, 8, 64, 512):
        yield torch.randn(tokens, 4096, generator=rng).to(device, dtype), weight


def _bytes_and_flops(x, weight, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0):
    """Each operand and the result once; of the arithmetic, the product."""
    tokens, out = x.numel() // x.shape[-1], weight.shape[0]
    width = out if activation is None else out // 2
    operands = [t for t in (x, weight, bias, norm_weight, residual) if t is not None]
    num_bytes = sum(t.numel() * t.element_size() for t in operands) + tokens * width * x.element_size()
    return num_bytes, 2 * tokens * out * weight.shape[1]


linear.bench_inputs = _bench_inputs
linear.bytes_and_flops = _bytes_and_flops
