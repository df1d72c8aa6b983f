"""NVIDIA GPUs through torch.cuda."""

import sys
from functools import cached_property
from pathlib import Path

from octavo.platforms.base import BatchDefaults, Platform, Usage

_GIB = 1 << 30


def has_driver(*device_files: str) -> bool:
    """Whether Linux shows one of a driver's device files; without them, importing torch to ask is wasted time."""
    return sys.platform != "linux" or any(Path(file).exists() for file in device_files)


class CudaPlatform(Platform):
    """One CUDA device. Compute capability decides the data type; memory decides the batch."""

    name = "cuda"
    default_block_size = 64
    default_async_scheduling = True
    default_memory_utilization = 0.92
    supports_graphs = True

    @classmethod
    def is_available(cls) -> bool:
        if not has_driver("/dev/nvidiactl", "/dev/dxg"):
            return False
        import torch

        return torch.version.cuda is not None and torch.cuda.is_available()

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"

    @cached_property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0) for Hopper."""
        import torch

        return torch.cuda.get_device_capability(self.index)

    @property
    def supported_dtypes(self) -> tuple[str, ...]:
        return ("bfloat16", "float16", "float32") if self.capability >= (8, 0) else ("float16", "float32")

    @property
    def preferred_dtype(self) -> str:
        return self.supported_dtypes[0]

    @property
    def fp8_refusal(self) -> str | None:
        if self.capability >= (8, 9):
            return None
        major, minor = self.capability
        return f"it needs compute capability 8.9, and {self.device} has {major}.{minor}"

    def total_memory(self) -> int:
        import torch

        return torch.cuda.get_device_properties(self.index).total_memory

    def available_memory(self) -> int:
        import torch

        return torch.cuda.mem_get_info(self.index)[0]

    def batch_defaults(self, usage: Usage) -> BatchDefaults:
        total = self.total_memory()
        if total >= 160 * _GIB:
            return BatchDefaults(16384, 1024)
        # The 80 GiB card of the generation before Hopper computes too slowly for the long steps.
        if total >= 70 * _GIB and self.capability >= (9, 0):
            return BatchDefaults(16384 if usage == "llm" else 8192, 1024)
        return BatchDefaults(8192 if usage == "llm" else 2048, 256)

    def describe(self) -> str:
        import torch

        major, minor = self.capability
        name = torch.cuda.get_device_name(self.index)
        return f"{self.device} ({name}, capability {major}.{minor}, {self.total_memory() / _GIB:.1f} GiB)"

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self.index)
