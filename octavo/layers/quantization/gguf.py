"""GGUF weights that stay quantised: blocks are packed for the kernels as they are read, and computed from there.

A layer's parameter is an empty place; what was loaded into it hangs on its `pieces`, by shard. A piece is a packed matrix,
or a floating point tensor where the file holds plain numbers. Shards may have different types.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import Linear, LinearMethod, UnquantizedMethod
from octavo.ops.cpu.linear import finish_packing, is_available, pack_gguf
from octavo.ops.linear.gguf_linear import gguf_embedding, gguf_linear
from octavo.ops.linear.packed import PackedMatrix, split_rows, unpack

Piece = PackedMatrix | torch.Tensor


class BlockParameter(nn.Parameter):
    """The place of a weight that comes in blocks; the loader finds `block_loader` and hands them over undecoded."""

    rows: tuple[int, ...]  # of each shard
    cols: int
    block_loader: Callable[..., None]
    weight_loader: Callable[..., None]
    pieces: dict[int | None, Piece]  # replaced, never changed: a copy of the place must not share what comes later

    @classmethod
    def make(cls, rows: tuple[int, ...], cols: int) -> "BlockParameter":
        parameter = cls(torch.empty(0), requires_grad=False)
        parameter.rows, parameter.cols, parameter.pieces = rows, cols, {}
        parameter.block_loader, parameter.weight_loader = load_blocks, load_plain
        return parameter

    def keep(self, piece: Piece, shard: int | None) -> None:
        """Keep what a shard holds; ValueError when it has another shape than the layer."""
        got = tuple(piece.shape) if isinstance(piece, torch.Tensor) else (piece.rows, piece.cols)
        want = (sum(self.rows) if shard is None else self.rows[shard], self.cols)
        if got != want:
            raise ValueError(f"expects shape {list(want)}, the checkpoint has {list(got)}")
        self.pieces = {**self.pieces, shard: piece}

    @property
    def packed_bytes(self) -> int:
        """What the pieces take."""
        data = [p if isinstance(p, torch.Tensor) else p.data for p in self.pieces.values()]
        return sum(t.numel() * t.element_size() for t in data)

    def in_order(self) -> list[Piece]:
        """A piece a shard. A checkpoint that has all shards as one matrix gets it cut, where whole tiles allow it."""
        if None not in self.pieces:
            return [self.pieces[shard] for shard in range(len(self.rows))]
        whole = self.pieces[None]
        if len(self.rows) == 1 or isinstance(whole, torch.Tensor):
            return [whole]
        return list(split_rows(whole, self.rows)) or [unpack(whole)]


def load_blocks(place: BlockParameter, blocks: torch.Tensor, ggml_type: str, shard: int | None) -> None:
    """Pack blocks [rows, bytes a row] uint8 of a GGUF type."""
    packed = pack_gguf(blocks, ggml_type)
    if packed is None:
        raise ValueError(f"there is no kernel for {ggml_type}")
    place.keep(packed, shard)


def load_plain(place: BlockParameter, loaded: torch.Tensor, shard: int | None = None) -> None:
    """Keep plain numbers; a copy, since the tensor lies in the file's mapping."""
    place.keep(loaded.to(torch.float32, copy=True), shard)


class GGUFMethod(LinearMethod):
    """Packed weights and activations rounded to int8 in blocks of 32 (`ops.gguf_linear`); all other numbers are float32.

    Before the head activations are rounded finely: most of what int8 costs in perplexity would come from there.
    """

    @staticmethod
    def is_supported() -> bool:
        """Whether this machine has the kernels."""
        return is_available()

    def create_weights(self, layer: Linear) -> None:
        layer.weight = BlockParameter.make(layer.out_sizes, layer.in_features)
        layer.create_bias()

    def process_after_loading(self, layer: Linear) -> None:
        finish_packing()
        pieces = cast(BlockParameter, layer.weight).in_order()
        matrices = tuple(piece for piece in pieces if isinstance(piece, PackedMatrix))
        if len(matrices) < len(pieces):
            # Plain numbers are computed as they are, and so are shards packed beside them.
            layer.weight = nn.Parameter(
                torch.cat([unpack(p) if isinstance(p, PackedMatrix) else p for p in pieces]), requires_grad=False
            )
            layer.method = UnquantizedMethod()
            return
        layer.matrices = matrices  # type: ignore[assignment]
        _register_data(layer, matrices)

    def apply(self, layer, x, norm, activation, residual, scale):
        # The head's rounding goes straight into the scores, and its second term costs no time where memory is the limit.
        fine = isinstance(layer, LMHead)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return gguf_linear(x, layer.matrices, layer.bias, weight, eps, activation, residual, scale, fine)

    def create_table(self, table: Embedding) -> None:
        table.weight = BlockParameter.make((table.weight.shape[0],), table.weight.shape[1])
        table.method = self

    def process_table_after_loading(self, table: Embedding) -> None:
        (piece,) = cast(BlockParameter, table.weight).in_order()
        if isinstance(piece, torch.Tensor):
            table.weight = nn.Parameter(piece, requires_grad=False)
            table.method = None
            return
        table.matrix = piece  # type: ignore[assignment]
        _register_data(table, (piece,))

    def embed(self, table, input_ids):
        return gguf_embedding(input_ids, table.matrix, table.scale)


def _register_data(module: nn.Module, matrices: tuple[PackedMatrix, ...]) -> None:
    """Let the model know its packed bytes, so that memory is accounted for."""
    for i, matrix in enumerate(matrices):
        module.register_buffer(f"packed_{i}", matrix.data, persistent=False)
