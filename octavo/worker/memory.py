"""The memory plan: what weights, the worst step and the KV cache take, in bytes, before anything is served."""

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from octavo.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use. `num_blocks` counts the null block too."""

    total: int  # of the device (CPU: what the process may use)
    limit: int  # this engine's share
    weights: int
    working: int  # measured worst step
    other: int  # runtime, fragmentation, graphs
    kv_cache: int
    block_bytes: int
    block_tokens: int  # tokens of a sequence that one block a group holds
    num_groups: int
    num_blocks: int
    states: int = 0  # of recurrent layers, for all rows

    @property
    def kv_tokens(self) -> int:
        """Tokens the cache holds when every group needs a block for each."""
        return (self.num_blocks - 1) // max(self.num_groups, 1) * self.block_tokens

    def table(self) -> str:
        """The plan as log lines."""
        rows = [
            ("device memory", self.total),
            ("engine's share", self.limit),
            ("weights", self.weights),
            ("worst step (measured)", self.working),
            ("runtime and graphs", self.other),
            ("KV cache", self.kv_cache),
        ]
        if self.states:
            rows.insert(3, ("recurrent states", self.states))
        lines = [f"  {name:<22} {size:>16,} bytes  {size / GIB:8.2f} GiB" for name, size in rows]
        lines.append(f"  {self.num_blocks:,} blocks of {self.block_bytes:,} bytes = {self.kv_tokens:,} tokens")
        return "\n".join(lines)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def zero_bytes(size: int, device: torch.device) -> torch.Tensor:
    """A zeroed buffer of `size` bytes.

    On a CPU the kernel hands out zero pages when they are first touched; torch.zeros would write all of a cache of
    gigabytes at the start.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(size, dtype=np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)


def measure_working_bytes(run: Callable[[], None], device: torch.device) -> int:
    """The most memory `run` takes at any moment above what is held before it, in bytes.

    On CUDA from the allocator's peak; on Linux CPUs from the resident set's high-water mark, which the kernel lets a
    process reset; elsewhere 0.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak
    before_rss = _reset_peak_rss()
    run()
    if before_rss is None:
        return 0
    peak = max(_status_bytes("VmHWM") - before_rss, 0)
    release_freed_memory()
    return peak


def _reset_peak_rss() -> int | None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def release_freed_memory() -> None:
    """Give memory that the C library keeps after a free back to the system; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def kv_cache_bytes(share: int, needed: int, room: int | None = None) -> int:
    """Bytes for the KV cache: what the engine's `share` leaves beside what it `needed`, but no more than the `room` there is.

    Other processes on a GPU have shares of their own and do not count against this one; they may have left less `room`.
    """
    left = share - needed if room is None else min(share - needed, room)
    return max(left, 0)


def count_blocks(kv_bytes: int, block_bytes: int, min_blocks: int, what_fits: Callable[[int], str]) -> int:
    """Blocks that fit in `kv_bytes`; ConfigError when one full context does not fit.

    `what_fits(num_blocks)` gives the advice for the message.
    """
    num_blocks = kv_bytes // block_bytes if block_bytes else min_blocks
    if num_blocks < min_blocks:
        raise ConfigError(what_fits(num_blocks))
    return num_blocks
