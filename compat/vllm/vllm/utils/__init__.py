"""Small helpers that examples use."""

import uuid

from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "cdiv", "random_uuid"]


def random_uuid() -> str:
    """A random request id."""
    return uuid.uuid4().hex


def cdiv(a: int, b: int) -> int:
    """Division, rounded up."""
    return -(a // -b)
