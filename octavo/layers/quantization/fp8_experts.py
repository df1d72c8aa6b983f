"""Experts that a checkpoint keeps in 8-bit floating point: decoded into the model's data type once they are in.

There is no kernel for them yet, so they take twice their size. Their numbers are copied as they are, which every type of 16
bits holds exactly, and multiplied by their scales at the end: a scale may come before its numbers or after.
"""

import functools

import torch
from torch import nn

from octavo.config.fp8 import Fp8Scheme
from octavo.layers.moe.experts import Experts, ExpertStack, UnquantizedExperts
from octavo.ops.linear.fp8 import BLOCK, FP8, dequantize_weight


class DecodedFp8Experts(UnquantizedExperts):
    """Floating point weights, made of E4M3 numbers and scales by tensor, output row or block."""

    def __init__(self, scheme: Fp8Scheme):
        self.scheme = scheme

    def create_weights(self, layer: Experts) -> None:
        super().create_weights(layer)
        for stack in (layer.gate_up_proj, layer.down_proj):
            stack.weight.weight_loader = functools.partial(_load_numbers, stack)  # type: ignore[attr-defined]
            _add_place(stack, self.scheme.scale_name, functools.partial(self._load_scale, stack))
            stack.scales = {}  # type: ignore[assignment]
            if self.scheme.is_static:  # of the activations of 8-bit products, which are not done here
                _add_place(stack, "input_scale", lambda param, loaded, shard: None)

    def _load_scale(
        self, stack: ExpertStack, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None
    ) -> None:
        """Keep the scale of one shard of one expert; ValueError when it is of another shape."""
        if shard is None:
            raise ValueError("expects the scales of one expert at a time, the checkpoint has all stacked")
        rows = stack.out_sizes[shard % len(stack.out_sizes)]
        blocks = (-(-rows // BLOCK), -(-stack.in_features // BLOCK))
        shape = {"tensor": (), "row": (rows,), "block": blocks}[self.scheme.scales]
        if loaded.numel() != torch.Size(shape).numel():
            raise ValueError(f"expects shape {list(shape)}, the checkpoint has {list(loaded.shape)}")
        stack.scales[shard] = loaded.float().reshape(shape)  # type: ignore[operator]

    def process_after_loading(self, layer: Experts) -> None:
        for stack in (layer.gate_up_proj, layer.down_proj):
            for shard, scale in stack.scales.items():  # type: ignore[operator, union-attr]
                rows = stack.rows_of(stack.weight.data, shard)
                rows.copy_(dequantize_weight(rows, scale))
            del stack.scales
            for name in {self.scheme.scale_name, "input_scale"} & set(stack._parameters):
                delattr(stack, name)


def _load_numbers(stack: ExpertStack, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
    if loaded.dtype != FP8:
        raise ValueError(f"expects {FP8}, the checkpoint has {loaded.dtype}: it does not list the layer as unquantised")
    stack.load_rows(param, loaded, shard)


def _add_place(stack: ExpertStack, name: str, load) -> None:
    """An empty parameter that a tensor of the checkpoint finds by its name."""
    place = nn.Parameter(torch.empty(0, dtype=torch.float32), requires_grad=False)
    place.weight_loader = load  # type: ignore[attr-defined]
    stack.register_parameter(name, place)
