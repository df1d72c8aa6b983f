"""`Platform`: what the engine asks about the machine it runs on.

Configuration asks before anything is loaded: data types, memory, defaults. The worker asks for its device and waits for
it. torch is imported inside methods only, so that a process without a model (the front, the command line) stays light.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

Usage = Literal["llm", "server"]


@dataclass(frozen=True)
class BatchDefaults:
    """Sizes of a step when the user gives none."""

    max_num_batched_tokens: int
    max_num_seqs: int


class Platform(ABC):
    """One kind of device. `index` counts devices of the kind."""

    name: str  # as in --device and OCTAVO_PLATFORM
    default_block_size: int  # tokens in a KV cache block
    default_async_scheduling: bool  # whether the device computes while the host schedules
    default_memory_utilization: float | None  # share of total memory; None: the cache is sized from what is free
    supports_graphs: bool

    def __init__(self, index: int = 0):
        self.index = index

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether this machine has the device and torch can use it."""

    @property
    @abstractmethod
    def device(self) -> str:
        """torch's name for the device, such as "cuda:0"."""

    @property
    @abstractmethod
    def supported_dtypes(self) -> tuple[str, ...]:
        """Data types a model may run in."""

    @property
    @abstractmethod
    def preferred_dtype(self) -> str:
        """The data type in which this device is fastest without losing accuracy that matters."""

    @abstractmethod
    def total_memory(self) -> int:
        """Bytes the device has, or this container may use."""

    @abstractmethod
    def available_memory(self) -> int:
        """Bytes of `total_memory` nobody uses now."""

    @abstractmethod
    def batch_defaults(self, usage: Usage) -> BatchDefaults:
        """Step sizes when the user gives none: `LLM` wants throughput, a server also short steps."""

    @property
    def num_threads(self) -> int:
        """Host threads for computing; 0 leaves torch's choice."""
        return 0

    @property
    def fp8_refusal(self) -> str | None:
        """Why 8-bit floating point linears cannot be computed here; None: they can."""
        return None

    def describe(self) -> str:
        """The device in words, for the start-up log."""
        return self.device

    def synchronize(self) -> None:  # noqa: B027 (nothing to wait for is the right default)
        """Wait until the device has done all it was given."""
