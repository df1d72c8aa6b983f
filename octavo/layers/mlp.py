"""The feed-forward networks of decoders."""

from collections.abc import Callable

import torch
from torch import nn

from octavo.layers.linear import Linear, RowLinear
from octavo.layers.norm import RMSNorm
from octavo.ops.activation import GATES, gated_activation

# Names in checkpoints' `hidden_act` and the gate of `ops.activation` they mean.
GATED_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class GatedMLP(nn.Module):
    """residual + scale * down(act(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, (intermediate_size, intermediate_size), bias)
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias)
        self.activation = GATED_ACTIVATIONS[activation]

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x, norm, self.activation), residual=residual, scale=scale)

    def adapted(self, x: torch.Tensor, adapter: nn.Module) -> torch.Tensor:
        """down(act(gate(x)) * up(x)), for which `adapter(x)` is added to [gate(x) | up(x)]."""
        return self.down_proj(gated_activation(self.gate_up_proj(x) + adapter(x), self.activation))


class MLP(nn.Module):
    """residual + scale * down(act(up(norm(x)))); `activation` names a gate of `ops.activation`."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False):
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = GATES[activation]

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return self.down_proj(self.activation(self.up_proj(x, norm)), residual=residual, scale=scale)
