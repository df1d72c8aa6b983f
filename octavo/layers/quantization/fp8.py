"""8-bit floating point (E4M3) weights: stored ones as they are, others rounded row by row while they load.

Whatever shares a scale in the checkpoint, a layer ends with one scale for each output row, or for each block of 128 x 128:
shards of a packed layer keep their own scales that way, exactly. Rounding needs no neighbours, so each tensor is rounded
when it arrives and the model never exists in floating point.
"""

import functools
from collections.abc import Mapping

import torch
from torch import nn

from octavo.config.fp8 import Fp8Scheme
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import Linear, LinearMethod, UnquantizedMethod
from octavo.layers.moe.experts import Experts, ExpertsMethod, UnquantizedExperts
from octavo.layers.quantization.fp8_experts import DecodedFp8Experts
from octavo.logger import get_logger
from octavo.ops.linear.fp8 import BLOCK, FP8, dequantize_weight, linear_fp8, quantize_fp8

logger = get_logger(__name__)

# The kernels read a row in pieces of 32 numbers.
_WIDTH_MULTIPLE = 32


class Fp8Method(LinearMethod):
    """E4M3 weights and activations (`ops.linear_fp8`). Heads and embeddings stay in floating point."""

    def __init__(self, scheme: Fp8Scheme, packing: Mapping[str, tuple[str, ...]]):
        self.scheme = scheme
        self.packing = packing
        self.plain_dtype = torch.get_default_dtype()

    def for_layer(self, path: str, layer: Linear | Embedding | Experts) -> LinearMethod:
        if isinstance(layer, LMHead):
            return UnquantizedMethod()
        if isinstance(layer, Experts):
            return UnquantizedMethod() if self.scheme.ignores([path]) else self
        if isinstance(layer, Linear):
            parent, _, name = path.rpartition(".")
            shards = [f"{parent}.{shard}" for shard in self.packing.get(name, (name,))]
            if self.scheme.ignores([shard.removeprefix(".") for shard in shards]):
                return UnquantizedMethod()
            if not self.scheme.is_stored and layer.in_features % _WIDTH_MULTIPLE:
                logger.warning("%s keeps its data type: %d inputs do not fit FP8 kernels", path, layer.in_features)
                return UnquantizedMethod()
        return self

    def for_numbers(self) -> LinearMethod:
        return self if self.scheme.is_stored else UnquantizedMethod()

    def for_experts(self) -> ExpertsMethod:
        return DecodedFp8Experts(self.scheme) if self.scheme.is_stored else UnquantizedExperts()

    def create_weights(self, layer: Linear) -> None:
        out, width, sizes = layer.out_features, layer.in_features, layer.out_sizes
        self.plain_dtype = torch.get_default_dtype()
        layer.register_parameter("input_scale", None)
        layer.weight = _parameter(torch.empty(out, width, dtype=FP8))
        layer.create_bias()
        if not self.scheme.is_stored:
            # Ones are right for random weights, which nobody rounds.
            layer.register_buffer("weight_scale", torch.ones(out, dtype=torch.float32), persistent=False)
            layer.weight.weight_loader = functools.partial(_round_rows, layer)  # type: ignore[attr-defined]
            return
        layer.weight.weight_loader = functools.partial(_load_rounded, layer)  # type: ignore[attr-defined]
        heights = {"tensor": (1,) * len(sizes), "row": sizes, "block": tuple(-(-size // BLOCK) for size in sizes)}
        rows = heights[self.scheme.scales]
        shape = (sum(rows), -(-width // BLOCK)) if self.scheme.scales == "block" else (sum(rows),)
        _add_scales(layer, self.scheme.scale_name, shape, rows)
        if self.scheme.is_static:
            _add_scales(layer, "input_scale", (len(sizes),), (1,) * len(sizes))

    def process_after_loading(self, layer: Linear) -> None:
        if not self.scheme.is_stored:
            return
        scale = _take_scales(layer, self.scheme.scale_name)
        if self.scheme.is_static:
            # One product has one input: the largest scale holds what each shard was calibrated for.
            layer.input_scale = _parameter(_take_scales(layer, "input_scale").max())
        if self.scheme.scales == "tensor":
            scale = scale.repeat_interleave(torch.tensor(layer.out_sizes, device=scale.device))
        layer.weight_scale = _parameter(scale)
        blocks_fit = self.scheme.scales != "block" or not any(
            size % BLOCK for size in (*layer.out_sizes[:-1], layer.in_features)
        )
        if layer.in_features % _WIDTH_MULTIPLE or not blocks_fit or layer.reads_numbers:
            self._decode(layer)

    def _decode(self, layer: Linear) -> None:
        """Go on in floating point where the weight is read as numbers or its shape fits no FP8 kernel: shards that do not
        end with a block, odd widths."""
        logger.warning("a linear of %s outputs and %d inputs is decoded", layer.out_sizes, layer.in_features)
        scale = layer.get_parameter("weight_scale")
        if scale.dim() == 2:
            scales = scale.split([-(-size // BLOCK) for size in layer.out_sizes])
        else:
            scales = scale.split(layer.out_sizes)
        parts = zip(layer.get_parameter("weight").split(layer.out_sizes), scales, strict=True)
        layer.weight = _parameter(torch.cat([dequantize_weight(*part).to(self.plain_dtype) for part in parts]))
        del layer.weight_scale
        layer.register_parameter("input_scale", None)
        layer.method = UnquantizedMethod()

    def apply(self, layer, x, norm, activation, residual, scale):
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return linear_fp8(
            x, layer.weight, layer.weight_scale, layer.bias, norm_weight, eps, activation, residual, scale, layer.input_scale
        )  # fmt: skip


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _rows(tensor: torch.Tensor, sizes: tuple[int, ...], shard: int | None) -> torch.Tensor:
    """The rows of a shard, `sizes` rows a shard; None: all."""
    return tensor if shard is None else tensor.narrow(0, sum(sizes[:shard]), sizes[shard])


def _round_rows(layer: Linear, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
    """Round floating point rows as they arrive."""
    rows = _rows(param.data, layer.out_sizes, shard)
    scales = _rows(layer.get_buffer("weight_scale"), layer.out_sizes, shard)
    if rows.shape != loaded.shape:
        raise ValueError(f"expects shape {list(rows.shape)}, the checkpoint has {list(loaded.shape)}")
    if loaded.dtype.itemsize < 2:
        raise ValueError(f"expects floating point numbers to round, the checkpoint has {loaded.dtype}")
    quants, row_scales = quantize_fp8.reference(loaded.to(param.device))
    rows.copy_(quants)
    scales.copy_(row_scales[:, 0])


def _load_rounded(layer: Linear, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
    """Copy E4M3 rows; other numbers would have no scale."""
    if loaded.dtype != FP8:
        raise ValueError(f"expects {FP8}, the checkpoint has {loaded.dtype}: it does not list the layer as unquantised")
    layer.load_rows(param, loaded, shard)


def _add_scales(layer: Linear, name: str, shape: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """Make a place for scales, `rows` of them a shard."""
    param = _parameter(torch.empty(shape, dtype=torch.float32))
    param.weight_loader = functools.partial(_load_scales, rows)  # type: ignore[attr-defined]
    setattr(layer, name, param)


def _load_scales(rows: tuple[int, ...], param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
    """Copy scales, which checkpoints keep as [], [1], [rows], [rows, 1] or [blocks, blocks]; one may stand for all."""
    place = _rows(param.data, rows, shard)
    if loaded.numel() == 1 and place.dim() == 1:
        loaded = loaded.reshape(1).expand(place.shape)
    elif loaded.dim() == 2 and place.dim() == 1 and loaded.shape[1] == 1:
        loaded = loaded[:, 0]
    if place.shape != loaded.shape:
        raise ValueError(f"expects shape {list(place.shape)}, the checkpoint has {list(loaded.shape)}")
    place.copy_(loaded)
    param.is_loaded = True  # type: ignore[attr-defined]


def _take_scales(layer: Linear, name: str) -> torch.Tensor:
    """The loaded scales, removed from the layer; ones where random weights were asked for."""
    param = getattr(layer, name)
    delattr(layer, name)
    return param.data if getattr(param, "is_loaded", False) else torch.ones_like(param.data)
