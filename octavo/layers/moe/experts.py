"""The experts of a block: their weights stacked, and the method that keeps and computes them.

As with linears, the layer knows shapes and which checkpoint tensors its rows hold, the method the weight format. Checkpoints
have a tensor for each expert (`expert_packing` says where it goes) or all of them stacked.
"""

from collections.abc import Sequence

import torch
from torch import nn

from octavo.distributed import get_group
from octavo.ops.moe import UNGATED, experts


class ExpertsMethod:
    """A weight format of experts. What belongs to a layer is stored on the layer."""

    def create_weights(self, layer: "Experts") -> None:
        """Register the parameters of both stacks, empty, on the current device in the current default dtype."""
        raise NotImplementedError

    def process_after_loading(self, layer: "Experts") -> None:
        """Repack once the checkpoint is in."""

    def apply(
        self,
        layer: "Experts",
        hidden: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        residual: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """residual + scale * the weighted sum of each token's experts, see `ops.moe.experts`."""
        raise NotImplementedError


class UnquantizedExperts(ExpertsMethod):
    """Weights as floating point numbers, [experts, out, in]."""

    def create_weights(self, layer: "Experts") -> None:
        for stack in (layer.gate_up_proj, layer.down_proj):
            shape = (stack.num_experts, stack.out_features, stack.in_features)
            stack.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
            stack.weight.weight_loader = stack.load_rows  # type: ignore[attr-defined]
            stack.create_bias()

    def apply(self, layer, hidden, weights, chosen, residual, scale):
        gate_up, down = layer.gate_up_proj, layer.down_proj
        return experts(
            hidden,
            weights,
            chosen,
            gate_up.weight,
            down.weight,
            layer.activation,
            residual,
            scale,
            gate_up.bias,
            down.bias,
        )


class ExpertStack(nn.Module):
    """One projection of all experts. `out_sizes` are the heights of an expert's shards, in order.

    Shard i of a packed checkpoint is shard i % len(out_sizes) of expert i // len(out_sizes).
    """

    weight: nn.Parameter

    def __init__(self, num_experts: int, in_features: int, out_sizes: Sequence[int], bias: bool):
        super().__init__()
        self.num_experts, self.in_features, self.out_sizes = num_experts, in_features, tuple(out_sizes)
        self.out_features = sum(out_sizes)
        self.has_bias = bias
        self.bias: nn.Parameter | None = None

    def create_bias(self) -> None:
        """Register the bias, if there is one, as floating point numbers [experts, out]."""
        if self.has_bias:
            self.bias = nn.Parameter(torch.empty(self.num_experts, self.out_features), requires_grad=False)
            self.bias.weight_loader = self.load_rows  # type: ignore[attr-defined]

    def rows_of(self, stacked: torch.Tensor, shard: int) -> torch.Tensor:
        """The rows of one shard of one expert."""
        expert, part = divmod(shard, len(self.out_sizes))
        return stacked[expert].narrow(0, sum(self.out_sizes[:part]), self.out_sizes[part])

    def load_rows(self, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
        """Copy a checkpoint tensor: one shard of one expert, or all stacked; ValueError when the shape differs."""
        place = param.data if shard is None else self.rows_of(param.data, shard)
        if place.shape != loaded.shape:
            raise ValueError(f"expects shape {list(place.shape)}, the checkpoint has {list(loaded.shape)}")
        place.copy_(loaded)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x {self.in_features} -> {self.out_sizes}, bias={self.has_bias}"


class Experts(nn.Module):
    """All experts of a block: `activation` names a gate of `ops.activation`, or an activation without a gate."""

    method: ExpertsMethod

    def __init__(self, num_experts: int, hidden_size: int, width: int, activation: str, bias: bool = False):
        super().__init__()
        shards = (width,) if activation in UNGATED else (width, width)
        self.gate_up_proj = ExpertStack(num_experts, hidden_size, shards, bias)
        self.down_proj = ExpertStack(num_experts, width, (hidden_size,), bias)
        self.activation = activation

    def forward(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        tp = get_group("tp")
        if tp.size == 1:
            return self.method.apply(self, hidden, weights, chosen, residual, scale)
        y = tp.all_reduce(self.method.apply(self, hidden, weights, chosen, None, 1.0))
        return y if residual is None else torch.add(residual, y, alpha=scale)


def expert_packing(
    num_experts: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, tuple[str, ...]]:
    """The loader's packing table of checkpoints that keep each expert's tensors apart, as `experts.<i>.<name>`."""
    indices = range(num_experts)
    return {
        "experts.gate_up_proj": tuple(f"experts.{i}.{name}" for i in indices for name in (gate, up)),
        "experts.down_proj": tuple(f"experts.{i}.{down}" for i in indices),
    }


# Stacked checkpoints have no `.weight` at the end of these names.
STACKED_RENAMES = {r"experts\.(gate_up_proj|down_proj)$": r"experts.\1.weight"}
