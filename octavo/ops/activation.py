"""Gated activations: the first half of the last dimension is the gate, the second what it gates."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from octavo.ops.registry import op

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@op
def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up for x = [gate | up] of shape [tokens, 2 * n]; returns [tokens, n] (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return GATES[activation](gate) * up


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for activation in ("silu", "gelu", "gelu_tanh"):
        for rows, n in ((1, 1536), (5, 14336 // 8)):
            yield torch.randn(rows, 2 * n, generator=rng).to(device, dtype), activation


gated_activation.inputs = _inputs
