"""Linear layers: shapes, packing and sharding. How the weight is kept is the *method*'s business.

    layer    knows its widths and which checkpoint shards its rows hold
    method   creates the weights, finishes them after loading, computes (`LinearMethod`)
    adapter  adds its term around the layer (later)

A layer makes no weights by itself: `layers.build.materialise` walks the finished tree, attaches a method to every linear by
path and lets it create the weights, so neither a prefix nor a quantisation config travels through constructors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from octavo.distributed import get_group
from octavo.errors import ConfigError
from octavo.layers.moe.experts import Experts, ExpertsMethod, UnquantizedExperts
from octavo.layers.norm import RMSNorm
from octavo.ops.linear import linear

if TYPE_CHECKING:
    from octavo.layers.embedding import Embedding


class LinearMethod:
    """A weight format. One instance may serve many layers; what belongs to a layer is stored on the layer."""

    def for_layer(self, path: str, layer: "Linear | Embedding | Experts") -> "LinearMethod":
        """The method of the layer at `path`: this one, unless the format leaves that layer out."""
        return self

    def create_weights(self, layer: "Linear") -> None:
        """Register the layer's parameters, empty, on the current device in the current default dtype."""
        raise NotImplementedError

    def process_after_loading(self, layer: "Linear") -> None:
        """Repack or requantise once the checkpoint is in."""

    def apply(
        self,
        layer: "Linear",
        x: torch.Tensor,
        norm: RMSNorm | None,
        activation: str | None,
        residual: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """residual + scale * activation(norm(x) @ W.T + b), see `ops.linear`."""
        raise NotImplementedError

    def for_experts(self) -> ExpertsMethod:
        """The same format for the experts of a mixture."""
        raise ConfigError(f"{type(self).__name__} has no form for mixture-of-experts models yet.")

    def for_numbers(self) -> "LinearMethod":
        """The same format for a linear whose weight is read as numbers: it must end as an `UnquantizedMethod`'s."""
        return UnquantizedMethod()

    def create_table(self, table: "Embedding") -> None:
        """Take an embedding's table over before it is loaded. Most formats leave it as it is: floating point."""

    def process_table_after_loading(self, table: "Embedding") -> None:
        """Finish a table that was taken over."""

    def embed(self, table: "Embedding", input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table that was taken over, times its scale."""
        raise NotImplementedError


class UnquantizedMethod(LinearMethod):
    """Weights as floating point numbers, [out, in]."""

    def create_weights(self, layer: "Linear") -> None:
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features), requires_grad=False)
        layer.weight.weight_loader = layer.load_rows  # type: ignore[attr-defined]
        layer.create_bias()

    def apply(self, layer, x, norm, activation, residual, scale):
        if norm is None:
            return linear(x, layer.weight, layer.bias, None, 0.0, activation, residual, scale)
        return linear(x, layer.weight, layer.bias, norm.weight, norm.eps, activation, residual, scale)

    def for_experts(self) -> ExpertsMethod:
        return UnquantizedExperts()


class Linear(nn.Module):
    """y = residual + scale * activation(norm(x) @ W.T + b), W's rows cut into the shards that checkpoints hold.

    `out_sizes` are the heights of the shards, in order; a plain linear has one. Shard i of the checkpoint fills the rows
    after those of shards 0 … i - 1.
    """

    method: LinearMethod
    reads_numbers = False  # whether the model reads the weight besides multiplying by it

    def __init__(self, in_features: int, out_sizes: int | Sequence[int], bias: bool = False):
        super().__init__()
        self.in_features = in_features
        self.out_sizes = (out_sizes,) if isinstance(out_sizes, int) else tuple(out_sizes)
        self.out_features = sum(self.out_sizes)
        self.has_bias = bias
        self.bias: nn.Parameter | None = None

    def create_bias(self) -> None:
        """Register the bias, if there is one, as floating point numbers."""
        if self.has_bias:
            self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False)
            self.bias.weight_loader = self.load_rows  # type: ignore[attr-defined]

    def load_rows(self, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
        """Copy a checkpoint tensor into the rows of `shard` (None: all of them); ValueError when the shape differs."""
        rows = param.data
        if shard is not None:
            rows = rows.narrow(0, sum(self.out_sizes[:shard]), self.out_sizes[shard])
        if rows.shape != loaded.shape:
            raise ValueError(f"expects shape {list(rows.shape)}, the checkpoint has {list(loaded.shape)}")
        rows.copy_(loaded)

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        activation: str | None = None,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return self.method.apply(self, x, norm, activation, residual, scale)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_sizes}, bias={self.has_bias}"


class QKVLinear(Linear):
    """The fused projection to queries, keys and values: rows [q heads | k heads | v heads]."""

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False):
        kv_width = num_kv_heads * head_dim
        super().__init__(hidden_size, (num_heads * head_dim, kv_width, kv_width), bias)


class RowLinear(Linear):
    """A projection whose input is spread over the tensor-parallel ranks: its partial sums are reduced before the residual."""

    def forward(self, x, norm=None, activation=None, residual=None, scale=1.0):
        tp = get_group("tp")
        if tp.size == 1:
            return self.method.apply(self, x, norm, activation, residual, scale)
        y = tp.all_reduce(self.method.apply(self, x, norm, activation, None, 1.0))
        return y if residual is None else torch.add(residual, y, alpha=scale)
