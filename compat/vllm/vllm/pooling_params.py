"""Octavo's pooling parameters."""

from octavo.types.pooling_params import PoolingParams
from vllm import _missing

__all__ = ["PoolingParams"]


def __getattr__(name: str) -> object:
    raise _missing.error_for(__name__, name)
