"""safetensors files: the header checked in full, the data mapped.

Layout: u64 header length (little endian), a JSON object `{name: {dtype, shape, data_offsets}}`, then the data, whose
offsets count from the end of the header. Read here rather than through the `safetensors` package so that a tensor's
pages can be given back as soon as it is loaded (see mapped.py).
"""

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.loader import mapped

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_METADATA = "__metadata__"


@dataclass(frozen=True)
class SafetensorsTensor:
    """One tensor of a file, not read yet."""

    name: str
    file: Path
    shape: tuple[int, ...]
    num_bytes: int
    stored_dtype: str
    data: mmap.mmap = field(repr=False)
    offset: int = 0  # bytes from the start of the file

    def read(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A view of the file in the dtype it was stored in; `dtype` and `device` are left to the copy that follows."""
        if self.stored_dtype not in DTYPES:
            raise LoadError(f"safetensors dtype {self.stored_dtype} is not supported; supported: {', '.join(DTYPES)}")
        return mapped.view(self.data, self.offset, self.num_bytes, DTYPES[self.stored_dtype]).view(self.shape)

    def release(self) -> None:
        """Give the pages back."""
        mapped.release(self.data, self.offset, self.num_bytes)


def open_safetensors(path: Path) -> Iterator[SafetensorsTensor]:
    """The tensors of a file in the order their data lies in it."""
    data = mapped.map_file(path)
    if len(data) < 8:
        raise LoadError(f"{path} is truncated: {len(data)} bytes, shorter than a safetensors header.")
    header_end = 8 + int.from_bytes(data[:8], "little")
    if header_end > len(data):
        raise LoadError(
            f"{path} is truncated or not safetensors: header of {header_end - 8} bytes, {len(data)} in all."
        )
    try:
        header = json.loads(data[8:header_end], object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError("not a JSON object")
        entries = [_entry(name, fields, header_end) for name, fields in header.items() if name != _METADATA]
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path} has a damaged safetensors header: {error}.") from None
    entries.sort(key=lambda entry: entry[1])
    position = header_end
    for name, start, end, _, _ in entries:
        if start < position:
            raise LoadError(f"{path} has a damaged safetensors header: the data of {name!r} overlaps another tensor's.")
        if end > len(data):
            raise LoadError(f"{path} is truncated: tensor {name!r} ends at byte {end}, the file has {len(data)}.")
        position = end
    return (
        SafetensorsTensor(name, path, shape, end - start, stored_dtype, data, start)
        for name, start, end, shape, stored_dtype in entries
    )


def _entry(name: str, fields: dict[str, Any], header_end: int) -> tuple[str, int, int, tuple[int, ...], str]:
    """(name, first byte, last byte + 1, shape, dtype) with the size checked against shape and dtype."""
    begin, end = fields["data_offsets"]
    shape, stored_dtype = tuple(int(dim) for dim in fields["shape"]), str(fields["dtype"])
    if begin < 0 or end < begin or any(dim < 0 for dim in shape):
        raise ValueError(f"tensor {name!r} has shape {list(shape)} and offsets {begin} to {end}")
    if stored_dtype in DTYPES and math.prod(shape) * DTYPES[stored_dtype].itemsize != end - begin:
        raise ValueError(f"tensor {name!r} is {stored_dtype} {list(shape)} but has {end - begin} bytes")
    return name, header_end + begin, header_end + end, shape, stored_dtype


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result
