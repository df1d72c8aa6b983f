"""RWKV-4's mixers (Peng et al. 2023): what they read are mixes of each token with the one before it.

Parameters have the names of the published checkpoints.
"""

import torch
from torch import nn

from octavo.layers.linear import Linear, RowLinear
from octavo.layers.ssm.state import RowState, step_requests
from octavo.ops.activation import GATES
from octavo.ops.ssm.conv import short_conv
from octavo.ops.ssm.wkv import wkv


class TokenShift(nn.Module):
    """Each token's predecessor, of zeros before the first: a convolution over two tokens that takes the older one."""

    kernel: torch.Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("kernel", torch.tensor([1.0, 0.0]).repeat(size, 1), persistent=False)
        self.state = RowState([((1, size), torch.get_default_dtype())])

    def forward(self, x: torch.Tensor, *shares: torch.Tensor) -> list[torch.Tensor]:
        """x [tokens, size] → share * x + (1 - share) * its predecessor for each of `shares` [1, 1, size]."""
        (states,) = self.state.states
        previous = short_conv(x, self.kernel, None, states, step_requests())
        return [torch.lerp(previous, x, share[0]) for share in shares]


def _share(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, 1, size), requires_grad=False)


class TimeMix(nn.Module):
    """residual + scale * output(sigmoid(receptance) * wkv(key, value))."""

    def __init__(self, size: int, inner: int):
        super().__init__()
        self.shift = TokenShift(size)
        self.time_mix_key, self.time_mix_value, self.time_mix_receptance = (_share(size) for _ in range(3))
        self.key, self.value, self.receptance = (Linear(size, inner) for _ in range(3))
        self.time_decay, self.time_first = (
            nn.Parameter(torch.empty(inner, dtype=torch.float32), requires_grad=False) for _ in range(2)
        )
        self.output = RowLinear(inner, size)
        self.state = RowState([((3, inner), torch.float32)])

    def forward(self, x, residual, scale):
        key, value, receptance = self.shift(x, self.time_mix_key, self.time_mix_value, self.time_mix_receptance)
        (states,) = self.state.states
        y = wkv(self.key(key), self.value(value), self.time_decay, self.time_first, states, step_requests())
        return self.output(self.receptance(receptance).sigmoid() * y, residual=residual, scale=scale)


class ChannelMix(nn.Module):
    """residual + scale * sigmoid(receptance) * value(relu(key)²), of what `mix` gives."""

    def __init__(self, size: int, inner: int):
        super().__init__()
        self.shift = TokenShift(size)
        self.time_mix_key, self.time_mix_receptance = _share(size), _share(size)
        self.key, self.value = Linear(size, inner), RowLinear(inner, size)
        self.receptance = Linear(size, size)

    def mix(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self.shift(x, self.time_mix_key, self.time_mix_receptance)

    def forward(self, key, receptance, residual, scale):
        y = self.value(GATES["relu2"](self.key(key)))
        return torch.addcmul(residual, self.receptance(receptance).sigmoid(), y, value=scale)
