"""Quantised matrices in the layout that integer kernels read (csrc/cpu/packed.h), and the same layout read by torch.

Rows are cut into tiles of `lanes`, columns into groups that share a scale. A tile is a stream of groups:

    scales [lanes] float16 | minima [lanes] float16, if there are any | quants

A quant word is four neighbouring columns of one row; words of all rows of the tile lie side by side. The low four bits of
two words share one: columns of the group's first half in the low nibbles, of its second half in the high ones. Further bits
of the whole group fill one more word: byte b of a row holds those of columns b, 4 + b, 8 + b … from its lowest bit on.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # the values of IQ4_NL


class QuantKind(IntEnum):
    """How a quant is kept."""

    U4 = 0  # 4 bits, 0 … 15
    U5 = 1  # 5 bits, 0 … 31, groups of 32
    U6 = 2  # 6 bits, 0 … 63, groups of 16
    S8 = 3  # a byte, -128 … 127; or 128 more, and then `zero` is 128 more as well
    N4 = 4  # 4 bits, one of NONLINEAR; `zero` as of S8

    @property
    def is_signed(self) -> bool:
        return self in (QuantKind.S8, QuantKind.N4)

    @property
    def plane_bits(self) -> int:
        """Bits of a quant beyond the nibble, where it has one."""
        return {QuantKind.U5: 1, QuantKind.U6: 2}.get(self, 0)

    def words(self, group: int) -> int:
        """Quant words of a group."""
        return group // 4 if self == QuantKind.S8 else group // 8 + (self.plane_bits > 0)


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
    words = m.kind.words(m.group)
    groups = m.data.view(-1, m.cols // m.group, header + words * m.lanes * 4)
    halves = groups[..., :header].contiguous().view(torch.float16).float().unflatten(-1, (-1, m.lanes, 1))
    quants = groups[..., header:].unflatten(-1, (words, m.lanes, 4))
    if m.kind == QuantKind.S8:
        quants = quants.view(torch.int8) if m.zero == 0 else quants
    else:
        nibbles, plane = quants[..., : m.group // 8, :, :], quants[..., m.group // 8 :, :, :]
        quants = torch.cat((nibbles & 15, nibbles >> 4), dim=-3)
        if bits := m.kind.plane_bits:
            shifts = torch.arange(0, m.group // 4 * bits, bits, dtype=torch.uint8).view(-1, 1, 1)
            quants = quants | ((plane >> shifts) & (2**bits - 1)) << 4
    # [tiles, groups, words, lanes, 4] → [tiles, groups, lanes, group]
    quants = quants.transpose(-3, -2).flatten(-2)
    numbers = torch.tensor(NONLINEAR)[quants.int()].float() if m.kind == QuantKind.N4 else quants.float() - m.zero
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
    rng: torch.Generator, rows: int, cols: int, kind: QuantKind, group: int, has_min: bool, lanes: int, offset: int = 0
) -> PackedMatrix:
    """A matrix of random quants, with numbers of about the size that keeps activations near one: for tests.

    `offset` is what is added to signed quants.
    """
    largest = {QuantKind.U4: 8, QuantKind.U5: 16, QuantKind.U6: 32, QuantKind.S8: 128, QuantKind.N4: 128}[kind]
    zero = offset if kind.is_signed else largest
    shape = (-(-rows // lanes), cols // group)
    halves = torch.rand(*shape, lanes * (1 + has_min), generator=rng) / (largest * cols**0.5)
    quants = torch.randint(0, 256, (*shape, kind.words(group) * lanes * 4), generator=rng, dtype=torch.uint8)
    data = torch.cat((halves.half().view(torch.uint8), quants), dim=-1).flatten()
    return PackedMatrix(data, rows, cols, kind, group, 0 if has_min else zero, has_min, 2.0, lanes)
