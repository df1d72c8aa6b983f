"""Octavo's resolved configuration under vLLM's names."""

from octavo.config.engine import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from octavo.config.engine import EngineConfig as VllmConfig
from vllm import _missing

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "VllmConfig",
]


def __getattr__(name: str) -> object:
    raise _missing.error_for(__name__, name)
