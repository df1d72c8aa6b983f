"""Weights rounded to 8 or 4 bits while they load, for CPUs: the kernels and layout of GGUF's blocks, with our own rounding.

Groups of 32 inputs share a scale (with 4 bits, a minimum as well), and activations are rounded to int8 in the same groups.
Each tensor is rounded when it arrives, so the model never exists in floating point. Embeddings and the head have 8 bits in
any case: a token's scores suffer most from fewer, and a step reads one row of the one and all of the other.
"""

from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import Linear, LinearMethod, UnquantizedMethod
from octavo.layers.moe.experts import Experts
from octavo.layers.quantization.gguf import BlockParameter, GGUFMethod
from octavo.logger import get_logger
from octavo.ops.cpu.linear import pack_rounded

logger = get_logger(__name__)

GROUP = 32


class OnlineIntMethod(GGUFMethod):
    """Linears of `bits` bits."""

    def __init__(self, bits: int):
        if not self.is_supported():
            raise ConfigError(
                f"quantization=int{bits} needs the CPU kernels, and there is no C++ compiler to build them; install one or "
                "leave quantization out.",
                param="quantization",
            )
        self.bits = bits

    def for_layer(self, path: str, layer: Linear | Embedding | Experts) -> LinearMethod:
        if isinstance(layer, Experts):
            logger.warning("%s keeps its data type: experts are not rounded to int%d", path, self.bits)
            return UnquantizedMethod()
        width = layer.in_features if isinstance(layer, Linear) else layer.weight.shape[1]
        if width % GROUP:
            logger.warning("%s keeps its data type: %d columns do not fit groups of %d", path, width, GROUP)
            return UnquantizedMethod()
        return self

    def create_weights(self, layer: Linear) -> None:
        super().create_weights(layer)
        _round_when_loaded(layer.weight, 8 if isinstance(layer, LMHead) else self.bits)

    def create_table(self, table: Embedding) -> None:
        super().create_table(table)
        _round_when_loaded(table.weight, 8)


def _round_when_loaded(place: Any, bits: int) -> None:
    """`place` is a BlockParameter."""

    def load(place: BlockParameter, loaded: torch.Tensor, shard: int | None = None) -> None:
        place.keep(pack_rounded(loaded, bits), shard)

    place.weight_loader = load
