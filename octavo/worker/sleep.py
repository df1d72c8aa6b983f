"""What a worker does to give its memory back and to take it again.

Graphs hold addresses, so they go with the cache and are captured anew on waking, by the very calls of the start. Weights
either wait in host memory, each tensor keeping its place in the model, or are read from disk again.
"""

import gc
from collections.abc import Iterator

import torch
from torch import nn

from octavo.worker.memory import release_freed_memory

# Host memory is taken in pieces of this size: the allocator of pinned memory rounds up to powers of two.
CHUNK_BYTES = 1 << 28


class HostWeights:
    """A model's parameters and buffers in host memory, while the model's own tensors have no storage.

    Storages are moved, not tensors: views, ties and whoever else holds one of the tensors need not be known.
    """

    def __init__(self, model: nn.Module):
        """Copy, then free. A copy that fails leaves the model as it was."""
        found = {}
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage
        self._storages = list(found.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self.num_bytes = sum(self._sizes)
        pin = any(storage.is_cuda for storage in self._storages)
        self._chunks = [
            torch.empty(min(CHUNK_BYTES, self.num_bytes - start), dtype=torch.uint8, pin_memory=pin)
            for start in range(0, self.num_bytes, CHUNK_BYTES)
        ]
        for device, host in self._pieces():
            host.copy_(device, non_blocking=True)
        if pin:
            torch.cuda.synchronize()
        self._free()

    def restore(self) -> None:
        """Give the model its weights back. When memory is short, nothing is taken and the copy stays."""
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
        except RuntimeError:
            self._free()
            raise
        for device, host in self._pieces():
            device.copy_(host, non_blocking=True)
        if any(storage.is_cuda for storage in self._storages):
            torch.cuda.synchronize()

    def _free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes of a storage, the bytes of a chunk that belong to them), covering all storages and all chunks."""
        at = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            start = 0
            while start < size:
                chunk, offset = divmod(at, CHUNK_BYTES)
                length = min(size - start, CHUNK_BYTES - offset)
                yield whole[start : start + length], self._chunks[chunk][offset : offset + length]
                start += length
                at += length


def release_memory(device: torch.device) -> None:
    """Give what nobody holds any more back to the device, or on a CPU to the system."""
    gc.unfreeze()  # the core froze what it had at the start, cycles included
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        release_freed_memory()
