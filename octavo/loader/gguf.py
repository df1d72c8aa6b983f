"""The weights of a GGUF file as a checkpoint's tensors: names mapped, the converter's changes undone, blocks decoded.

`GGUFTensor.raw()` gives the block bytes for kernels that work on them; `read()` decodes.
"""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.loader import mapped
from octavo.loader.gguf_families import Family, family_of, is_helper, is_stacked_experts, module_part
from octavo.loader.gguf_file import GGUFFile, GGUFTensorInfo, open_gguf
from octavo.loader.gguf_quants import DECODERS, PLAIN_TYPES, dequantize
from octavo.logger import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor, not read yet, under the name and shape that the family's checkpoints give it."""

    name: str
    gguf_name: str
    file: Path
    ggml_type: str
    stored_shape: tuple[int, ...]  # outermost first; [in, out] matrices are stored [out, in]
    offset: int  # bytes from the start of the file
    num_bytes: int
    data: mmap.mmap = field(repr=False)
    interleaved_heads: int = 0  # rows are interleaved in this many heads and have to be put back; 0: they are not
    minus_one: bool = False
    is_transposed: bool = False
    is_row: bool = False  # a vector that the checkpoint has as a matrix of one row

    @property
    def shape(self) -> tuple[int, ...]:
        if self.is_row:
            return (1, *self.stored_shape)
        return self.stored_shape[::-1] if self.is_transposed else self.stored_shape

    @property
    def block_type(self) -> str | None:
        """The block format, where the rows of `raw()` are the checkpoint's rows; None for all else."""
        changed = self.minus_one or self.is_transposed or len(self.stored_shape) != 2
        return self.ggml_type if self.ggml_type in DECODERS and not changed else None

    def raw(self) -> Tensor:
        """Block bytes `[..., bytes a row]` uint8, rows in the checkpoint's order, matrices as stored."""
        if self.num_bytes == 0 and 0 not in self.stored_shape:
            raise LoadError(f"GGUF {self.ggml_type} is unknown; decodable: {', '.join([*PLAIN_TYPES, *DECODERS])}")
        flat = mapped.view(self.data, self.offset, self.num_bytes, torch.uint8)
        rows = flat.view(*self.stored_shape[:-1], -1)
        return _half_split_rows(rows, self.interleaved_heads) if rows.dim() > 1 else rows

    def read(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The values: block types as `dtype`, decoded on `device`; plain types as stored, still in the mapping."""
        data = self.raw()
        if self.ggml_type not in PLAIN_TYPES and device.type != "cpu":
            data = data.to(device)
        values = dequantize(data, self.ggml_type, dtype)
        if values.dim() == 1:
            values = _half_split_rows(values, self.interleaved_heads)
        if self.minus_one:
            values = values.float() - 1
        return values.t() if self.is_transposed else values.view(self.shape)

    def release(self) -> None:
        """Give the pages back."""
        mapped.release(self.data, self.offset, self.num_bytes)


def open_gguf_tensors(paths: Sequence[Path]) -> Iterator[GGUFTensor]:
    """The weights of a GGUF file, or of the parts of a split one, in file order.

    Tensors with rope settings are passed over (gguf_metadata.py reads them); tensors of unknown name are warned about,
    all in one line, and passed over too.
    """
    parts = [open_gguf(path, vocabulary=False) for path in paths]
    first = parts[0]
    family = family_of(first.architecture, num_experts=first.get("expert_count", 0))
    heads = {"attn_q": 0, "attn_k": 0}
    if family.permuted:
        num_heads = first.require("attention.head_count")
        has_kv_heads = first.get("attention.head_count_kv") is not None
        heads = {"attn_q": num_heads, "attn_k": first.require("attention.head_count_kv") if has_kv_heads else num_heads}
    unknown = [
        name for part in parts for name in part.tensors if not is_helper(name) and family.checkpoint_name(name) is None
    ]
    if unknown:
        logger.warning(
            "%s has %d tensors that are unknown for %s and are not used: %s",
            paths[0],
            len(unknown),
            first.architecture,
            ", ".join(unknown[:20]) + (", …" if len(unknown) > 20 else ""),
        )
    for part in parts:
        for info in part.tensors.values():
            name = None if is_helper(info.name) else family.checkpoint_name(info.name)
            if name is not None:
                yield from _tensors(part, info, name, family, heads)


def _tensors(
    part: GGUFFile, info: GGUFTensorInfo, name: str, family: Family, heads: dict[str, int]
) -> Iterator[GGUFTensor]:
    """What one stored tensor becomes: itself, or one matrix an expert."""
    module = module_part(info.name)
    shape, num_bytes = info.shape, info.num_bytes
    count = 1
    if is_stacked_experts(info.name):
        count, shape = shape[0], shape[1:]
        num_bytes //= count
    for expert in range(count):
        yield GGUFTensor(
            name=name.replace("{expert}", str(expert)),
            gguf_name=info.name,
            file=part.path,
            ggml_type=info.ggml_type,
            stored_shape=shape,
            offset=info.offset + expert * num_bytes,
            num_bytes=num_bytes,
            data=part.data,
            interleaved_heads=heads.get(module, 0),
            minus_one=family.norm_plus_one and info.name.endswith("norm.weight"),
            is_transposed=module in family.transposed and len(shape) == 2,
            is_row=module == "ffn_gate_inp_shexp" and len(shape) == 1,
        )


def _half_split_rows(rows: Tensor, num_heads: int) -> Tensor:
    """Undo the interleaving of rotary pairs along the first dimension, head by head.

    Stored: row 2i and 2i + 1 of a head rotate together. Wanted: rows i and i + half. A copy; 0 heads: unchanged.
    """
    if num_heads == 0:
        return rows
    order = np.arange(len(rows)).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
    if rows.dim() == 1:
        return rows[torch.from_numpy(order)]
    return torch.from_numpy(rows.numpy()[order])  # torch copies single bytes here, or wakes threads that go on spinning
