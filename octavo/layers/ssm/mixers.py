"""Recurrent mixers: what stands where a layer of a transformer has its attention, called the same way.

Parameters have the names of the published checkpoints. Each mixer ends in a projection that adds the residual.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.linear import Linear, RowLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.ssm.state import RowState, step_requests
from octavo.ops.ssm.conv import short_conv
from octavo.ops.ssm.delta import gated_delta_rule
from octavo.ops.ssm.mamba import selective_scan, state_space_dual
from octavo.ops.ssm.norm import gated_norm


def _float32(*shape: int) -> nn.Parameter:
    """Parameters of a recurrence, which is computed in float32."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)


def _load_kernel(param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
    """A convolution's weight, [channels, 1, width] in checkpoints."""
    if loaded.numel() != param.numel():
        raise ValueError(f"expects shape {list(param.shape)}, the checkpoint has {list(loaded.shape)}")
    param.copy_(loaded.view(param.shape))


class ShortConv(nn.Module):
    """A causal convolution over `width` tokens, each channel by itself; `activation` names a gate of `ops.activation`."""

    def __init__(self, channels: int, width: int, bias: bool, activation: str | None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width), requires_grad=False)
        self.weight.weight_loader = _load_kernel  # type: ignore[attr-defined]
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None
        self.activation = activation
        self.state = RowState([((width - 1, channels), torch.get_default_dtype())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, channels] → the same."""
        (states,) = self.state.states
        return short_conv(x, self.weight, self.bias, states, step_requests(), self.activation)


class GatedNorm(nn.Module):
    """See `ops.ssm.norm`. A weight of `size` = `group_size` is shared by all groups."""

    def __init__(self, size: int, eps: float, group_size: int, gate_first: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.group_size, self.gate_first = eps, group_size, gate_first

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(x, gate, self.weight, self.eps, self.group_size, self.gate_first)


class ConvMixer(nn.Module):
    """LFM2's gated short convolution: [b | c | x] = in(h), c * conv(b * x)."""

    def __init__(self, hidden_size: int, width: int, bias: bool):
        super().__init__()
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias)
        self.conv = ShortConv(hidden_size, width, bias, None)
        self.out_proj = RowLinear(hidden_size, hidden_size, bias)

    def forward(self, positions, hidden_states, norm, residual, scale):
        b, c, x = self.in_proj(hidden_states, norm).chunk(3, -1)
        return self.out_proj(c * self.conv(b * x), residual=residual, scale=scale)


class Mamba(nn.Module):
    """Mamba (Gu and Dao 2023)."""

    def __init__(
        self, hidden_size: int, inner: int, state_size: int, dt_rank: int, conv_width: int, bias: bool, conv_bias: bool
    ):
        super().__init__()
        self.parts = (dt_rank, state_size, state_size)
        self.in_proj = Linear(hidden_size, 2 * inner, bias)
        self.conv1d = ShortConv(inner, conv_width, conv_bias, "silu")
        self.x_proj = Linear(inner, sum(self.parts))
        self.dt_proj = Linear(dt_rank, inner)
        self.dt_bias, self.D, self.A_log = _float32(inner), _float32(inner), _float32(inner, state_size)
        self.out_proj = RowLinear(inner, hidden_size, bias)
        self.state = RowState([((inner, state_size), torch.float32)])

    def normalise(self, *parts: torch.Tensor) -> Sequence[torch.Tensor]:
        """dt, b and c on their way to the scan: some models have norms there."""
        return parts

    def forward(self, positions, hidden_states, norm, residual, scale):
        x, gate = self.in_proj(hidden_states, norm).chunk(2, -1)
        x = self.conv1d(x)
        dt, b, c = self.normalise(*self.x_proj(x).split(self.parts, -1))
        (states,) = self.state.states
        y = selective_scan(x, self.dt_proj(dt), b, c, gate, self.A_log, self.D, self.dt_bias, states, step_requests())
        return self.out_proj(y, residual=residual, scale=scale)


class Mamba2(nn.Module):
    """Mamba 2 (Dao and Gu 2024). `norm_eps` None: a plain gate in place of the gated norm."""

    norm: GatedNorm | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        conv_width: int,
        *,
        bias: bool,
        conv_bias: bool,
        norm_eps: float | None,
        gate_first: bool = True,
        out_bias: bool | None = None,
        dt_limit: Sequence[float] = (0.0, float("inf")),
    ):
        super().__init__()
        inner = num_heads * head_dim
        channels = inner + 2 * num_groups * state_size
        self.parts = (inner, channels, num_heads)  # gate | x, b and c | dt
        self.dt_limit = (float(dt_limit[0]), float(dt_limit[1]))
        self.in_proj = Linear(hidden_size, sum(self.parts), bias)
        self.conv1d = ShortConv(channels, conv_width, conv_bias, "silu")
        self.dt_bias, self.D, self.A_log = _float32(num_heads), _float32(num_heads), _float32(num_heads)
        self.norm = None if norm_eps is None else GatedNorm(inner, norm_eps, inner // num_groups, gate_first)
        self.out_proj = RowLinear(inner, hidden_size, bias if out_bias is None else out_bias)
        self.state = RowState([((num_heads, head_dim, state_size), torch.float32)])

    def forward(self, positions, hidden_states, norm, residual, scale):
        gate, xbc, dt = self.in_proj(hidden_states, norm).split(self.parts, -1)
        (states,) = self.state.states
        y = state_space_dual(
            self.conv1d(xbc), dt, self.A_log, self.D, self.dt_bias, states, step_requests(), self.dt_limit
        )
        y = y * F.silu(gate) if self.norm is None else self.norm(y, gate)
        return self.out_proj(y, residual=residual, scale=scale)


class GatedDeltaNet(nn.Module):
    """Gated delta rule (Yang et al. 2024) between a short convolution of [q | k | v] and a gated norm of every head."""

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        eps: float,
    ):
        super().__init__()
        channels, inner = 2 * num_key_heads * key_dim + num_heads * value_dim, num_heads * value_dim
        self.num_key_heads = num_key_heads
        self.parts = (channels, inner)
        self.in_proj_qkvz = Linear(hidden_size, self.parts)
        self.in_proj_ba = Linear(hidden_size, (num_heads, num_heads))
        self.conv1d = ShortConv(channels, conv_width, False, "silu")
        self.dt_bias, self.A_log = _float32(num_heads), _float32(num_heads)
        self.norm = GatedNorm(value_dim, eps, value_dim, gate_first=False)
        self.out_proj = RowLinear(inner, hidden_size)
        self.state = RowState([((num_heads, key_dim, value_dim), torch.float32)])

    def forward(self, positions, hidden_states, norm, residual, scale):
        qkv, z = self.in_proj_qkvz(hidden_states, norm).split(self.parts, -1)
        b, a = self.in_proj_ba(hidden_states, norm).chunk(2, -1)
        (states,) = self.state.states
        y = gated_delta_rule(
            self.conv1d(qkv), b, a, self.A_log, self.dt_bias, states, step_requests(), self.num_key_heads
        )
        return self.out_proj(self.norm(y, z), residual=residual, scale=scale)


class LightningAttention(nn.Module):
    """Linear attention (Qin et al. 2024) with a decay for each head that does not depend on the token: Mamba 2 with values,
    keys and queries for x, b and c, steps of one, and -`decays` [heads] for A. A norm and a gate follow.
    """

    a_log: torch.Tensor
    zeros: torch.Tensor

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, decays: torch.Tensor):
        super().__init__()
        inner = num_heads * head_dim
        self.vkq_proj = Linear(hidden_size, 3 * inner)
        self.norm = RMSNorm(inner)
        self.output_gate = Linear(hidden_size, inner)
        self.out_proj = RowLinear(inner, hidden_size)
        self.register_buffer("a_log", decays.log().float(), persistent=False)
        self.register_buffer("zeros", torch.zeros_like(self.a_log), persistent=False)
        self.state = RowState([((num_heads, head_dim, head_dim), torch.float32)])

    def forward(self, positions, hidden_states, norm, residual, scale):
        vkq = F.silu(self.vkq_proj(hidden_states, norm))
        steps = self.zeros.expand(len(vkq), -1)
        (states,) = self.state.states
        y = state_space_dual(
            vkq, steps, self.a_log, self.zeros, self.zeros, states, step_requests(), dt_limit=(1.0, 1.0)
        )
        y = self.norm(y) * self.output_gate(hidden_states, norm).sigmoid()
        return self.out_proj(y, residual=residual, scale=scale)
