"""Linear layers and embeddings on GGUF's quantised weights, kept packed in a few bits.

Activations are rounded to int8 in blocks of 32, each with its own scale, and the products are integer dot products. The
rounding is part of the operators' meaning: the references do it too. They exist to be compared with; a machine without a
provider is better served by weights that were decoded when they were loaded.
"""

import torch

from octavo.ops.embedding import embedding
from octavo.ops.linear import linear
from octavo.ops.linear.packed import PackedMatrix, QuantKind, random_matrix, unpack
from octavo.ops.norm import rms_norm
from octavo.ops.registry import op

ACTIVATION_BLOCK = 32


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, width] rounded to integers in ±127 times a scale for each block of 32, as float32."""
    blocks = x.float().unflatten(-1, (-1, ACTIVATION_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    quants = (blocks * torch.where(largest > 0, 127 / largest, 0)).round()
    return (quants * (largest / 127)).flatten(-2)


@op
def gguf_linear(
    x: torch.Tensor,
    shards: tuple[PackedMatrix, ...],
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    fine: bool = False,
) -> torch.Tensor:
    """`ops.linear` with rounded activations on a weight whose rows are those of `shards`, one below the other.

    x [tokens, in] float32; with an activation the first shard is the gate and the second what it gates. `fine` rounds what
    rounding leaves once more and multiplies both: twice the arithmetic for activations of about 15 bits. Returns float32.
    """
    if norm_weight is not None:
        x = rms_norm.reference(x, norm_weight, eps)
    weight = torch.cat([unpack(shard) for shard in shards])
    rounded = round_activations(x)
    if fine:
        rounded = rounded + round_activations(x - rounded)
    return linear.reference(rounded, weight, bias, None, 0.0, activation, residual, scale)


@op
def gguf_embedding(input_ids: torch.Tensor, table: PackedMatrix, scale: float = 1.0) -> torch.Tensor:
    """Rows of a packed table [vocab, hidden] for input_ids [tokens], times scale; float32 [tokens, hidden]."""
    return embedding.reference(input_ids, unpack(table), scale)


# Rows of a tile and what is added to signed quants, on different instruction sets; a provider takes its own.
_LAYOUTS = ((8, 0), (8, 128), (16, 128))
_FORMATS = (
    (QuantKind.U4, 32, True),
    (QuantKind.U4, 32, False),
    (QuantKind.U4, 16, True),
    (QuantKind.U4, 16, False),
    (QuantKind.U5, 32, True),
    (QuantKind.U5, 32, False),
    (QuantKind.U6, 16, False),
    (QuantKind.S8, 32, False),
    (QuantKind.S8, 16, False),
    (QuantKind.N4, 32, False),
)


def _linear_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for layout in _LAYOUTS:
        for index, one in enumerate(_FORMATS):
            other = _FORMATS[(index + 3) % len(_FORMATS)]
            for tokens in (1, 2, 7, 100):
                cols, rows = 96, 33  # rows end inside a tile
                x = torch.randn(tokens, cols, generator=rng).to(dtype)
                gamma = 1 + 0.1 * torch.randn(cols, generator=rng)
                first, second = (random_matrix(rng, rows, cols, *form, *layout) for form in (one, other))
                bias = torch.randn(2 * rows, generator=rng)
                residual = torch.randn(tokens, rows, generator=rng)
                yield x, (first, second), bias, gamma, 1e-5
                yield x, (first, second), bias, gamma, 1e-5, "silu"
                yield x, (first,), None, None, 0.0, None, residual, 0.5
                yield x, (first, second), bias, gamma, 1e-5, None, None, 1.0, True


def _embedding_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    ids = torch.tensor([0, 36, 7, 7])
    for layout in _LAYOUTS:
        for form in _FORMATS:
            yield ids, random_matrix(rng, 37, 64, *form, *layout), 1.0
            yield ids[:1], random_matrix(rng, 37, 64, *form, *layout), 3.0


gguf_linear.inputs = _linear_inputs
# A sum taken in another order may move an activation over the edge between two integers: one step of 1/127 of a block's
# largest, times one weight, and times the gate where there is one (sums here reach 15).
gguf_linear.tolerance[torch.float32] = (1e-3, 2e-2)
gguf_embedding.inputs = _embedding_inputs
