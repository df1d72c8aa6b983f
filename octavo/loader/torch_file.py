"""PyTorch checkpoints (`pytorch_model.bin`): `torch.load` with `weights_only`, mapped where the file allows it."""

import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import LoadError


@dataclass(frozen=True)
class TorchTensor:
    """One tensor of a `.bin` file; a view of the mapping unless the file is of the old, unmappable kind."""

    name: str
    file: Path
    tensor: Tensor = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def read(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor as stored; `dtype` and `device` are left to the copy that follows."""
        return self.tensor

    def release(self) -> None:
        """Nothing to do: torch owns the mapping, which goes with the last tensor of the file."""


def open_torch(path: Path) -> Iterator[TorchTensor]:
    """The tensors of one file in its own order. The file is closed when the iterator is dropped."""
    try:
        # Files from before torch 1.6 are no zip archives; they can only be read whole.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(f"{path} cannot be read (damaged, truncated, or not plain tensors): {reason}") from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        raise LoadError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors.")
    others = [str(name) for name, value in loaded.items() if not isinstance(value, Tensor)]
    if others:
        raise LoadError(f"{path} holds entries that are not tensors: {', '.join(others[:10])}.")
    return (TorchTensor(name, path, tensor) for name, tensor in loaded.items())
