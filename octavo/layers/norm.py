"""Normalisation layers."""

import torch
from torch import nn

from octavo.ops.norm import add_norm, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm. Passed to a linear as its `norm`, it is computed there instead of here."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """norm(x), on top of `residual` where there is one."""
        if residual is not None:
            return add_norm(x, self.weight, self.eps, residual)
        return rms_norm(x, self.weight, self.eps)


class UnitNorm(RMSNorm):
    """A norm whose weights are ones, in no checkpoint."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        del self.weight
        self.register_buffer("weight", torch.ones(size), persistent=False)


class LayerNorm(nn.Module):
    """Normalisation to mean 0 and variance 1, then a weight and a bias (Ba et al. 2016), unless they are off."""

    def __init__(self, size: int, eps: float = 1e-5, bias: bool = True, weight: bool = True):
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False) if weight else None
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
