"""Quantised matrices in the layout that integer kernels read (csrc/cpu/packed.h), and the same layout read by torch.

Rows are cut into tiles of `lanes`, columns into groups that share a scale. A tile is a stream of groups:

    scales [lanes] float16 | minima [lanes] float16, if there are any | quants

A quant word is four neighbouring columns of one row; words of all rows of the tile lie side by side. With 4 bits, a word
holds columns of the group's first half in the low nibbles and of its second half in the high ones.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch


class QuantKind(IntEnum):
    """How a quant is kept."""

    U4 = 0  # 4 bits, 0 … 15
    U5 = 1  # a byte, 0 … 31
    S8 = 2  # a byte, -128 … 127; or 128 more, and then `zero` is 128 more as well


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """[rows, cols] of gain * (scale * (quant - zero) + minimum)."""

    data: torch.Tensor  # uint8, flat
    rows: int
    cols: int
    kind: QuantKind
    group: int  # 16 or 32 columns
    zero: int
    has_min: bool
    gain: float
    lanes: int


def unpack(matrix: PackedMatrix) -> torch.Tensor:
    """The numbers, float32 [rows, cols]."""
    m = matrix
    header = 2 * m.lanes * (1 + m.has_min)
    words = m.group // 8 if m.kind == QuantKind.U4 else m.group // 4
    groups = m.data.view(-1, m.cols // m.group, header + words * m.lanes * 4)
    halves = groups[..., :header].contiguous().view(torch.float16).float().unflatten(-1, (-1, m.lanes, 1))
    quants = groups[..., header:].unflatten(-1, (words, m.lanes, 4))
    if m.kind == QuantKind.U4:
        quants = torch.cat((quants & 15, quants >> 4), dim=-3)
    elif m.kind == QuantKind.S8 and m.zero == 0:
        quants = quants.view(torch.int8)
    # [tiles, groups, words, lanes, 4] → [tiles, groups, lanes, group]
    numbers = quants.transpose(-3, -2).flatten(-2).float() - m.zero
    numbers = halves[..., 0, :, :] * numbers
    if m.has_min:
        numbers = numbers + halves[..., 1, :, :]
    return (m.gain * numbers).transpose(1, 2).flatten(2).flatten(0, 1)[: m.rows]


def split_rows(matrix: PackedMatrix, sizes: tuple[int, ...]) -> tuple[PackedMatrix, ...]:
    """The matrix cut into parts of `sizes` rows, sharing its memory; empty where a cut would go through a tile."""
    m = matrix
    if any(size % m.lanes for size in sizes):
        return ()
    row_bytes = m.data.numel() // m.rows  # whole tiles: the same for each row
    parts, start = [], 0
    for size in sizes:
        data = m.data[start * row_bytes : (start + size) * row_bytes]
        parts.append(replace(m, data=data, rows=size))
        start += size
    return tuple(parts)


def random_matrix(
    rng: torch.Generator, rows: int, cols: int, kind: QuantKind, group: int, has_min: bool, lanes: int
) -> PackedMatrix:
    """A matrix of random quants, with numbers of about the size that keeps activations near one: for tests."""
    zero = {QuantKind.U4: 8, QuantKind.U5: 16, QuantKind.S8: 0}[kind]
    words = group // 8 if kind == QuantKind.U4 else group // 4
    shape = (-(-rows // lanes), cols // group)
    largest = {QuantKind.U4: 8, QuantKind.U5: 16, QuantKind.S8: 128}[kind]
    halves = torch.rand(*shape, lanes * (1 + has_min), generator=rng) / (largest * cols**0.5)
    top = 32 if kind == QuantKind.U5 else 256
    quants = torch.randint(0, top, (*shape, words * lanes * 4), generator=rng, dtype=torch.uint8)
    data = torch.cat((halves.half().view(torch.uint8), quants), dim=-1).flatten()
    offset = 128 if kind == QuantKind.S8 and lanes == 16 else 0
    return PackedMatrix(data, rows, cols, kind, group, 0 if has_min else zero + offset, has_min, 2.0, lanes)
