"""Octavo's outputs."""

from octavo.types.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
)
from vllm import _missing

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "RequestMetrics", "RequestOutput"]


def __getattr__(name: str) -> object:
    raise _missing.error_for(__name__, name)
