"""Normalisation."""

import torch

from octavo.ops.registry import op


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension, computed in float32 (Zhang and Sennrich 2019).

    x [..., hidden] any float dtype, weight [hidden]; returns x's shape and dtype.
    """
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for rows, hidden in ((1, 576), (7, 4096), (3, 96)):
        x = torch.randn(rows, hidden, generator=rng).to(device, dtype)
        yield x, torch.randn(hidden, generator=rng).to(device, dtype), 1e-5


rms_norm.inputs = _inputs


@op
def add_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    """residual + rms_norm(x): what follows a block whose output is normalised before it is added. x as in `rms_norm`."""
    return residual + rms_norm.reference(x, weight, eps)


@add_norm.register("composed")
def _add_norm_composed(x, weight, eps, residual):
    return residual + rms_norm(x, weight, eps)


def _add_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for x, weight, eps in _inputs(rng, dtype, device):
        yield x, weight, eps, torch.randn(*x.shape, generator=rng).to(device, dtype)


add_norm.inputs = _add_inputs


def _bench_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for rows in (1, 32, 1024):
        x = torch.randn(rows, 4096, generator=rng).to(device, dtype)
        yield x, torch.randn(4096, generator=rng).to(device, dtype), 1e-5


rms_norm.bench_inputs = _bench_inputs
