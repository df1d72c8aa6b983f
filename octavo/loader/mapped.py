"""Tensors over memory-mapped files, and giving their pages back.

A checkpoint is read through a private mapping: nothing is copied until a tensor goes to its parameter, and once it has,
its pages are dropped from this process. So the peak of host memory is the model plus one tensor, not the model twice.
"""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import LoadError


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file copy-on-write (torch wants writable memory; nothing reaches the file)."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise LoadError(f"{path} cannot be read: {error}.") from None


def view(data: mmap.mmap, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """A flat CPU tensor over part of the mapping, without a copy; it keeps the mapping alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=num_bytes // dtype.itemsize, offset=offset)


def release(data: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Drop the pages of a range from this process; a later access reads them from the file again."""
    if num_bytes == 0 or not hasattr(data, "madvise"):
        return
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    data.madvise(mmap.MADV_DONTNEED, start, offset + num_bytes - start)
