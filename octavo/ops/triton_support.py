"""Whether Triton kernels can run here, and on which tensors."""

import functools
import importlib.util
import os

import torch


@functools.cache
def is_interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels on CPU tensors (tests); the variable is Triton's own."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def has_triton() -> bool:
    """Whether a Triton provider can serve this machine: the package is there, and a GPU or the interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return is_interpreting() or torch.cuda.is_available()


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """Whether a kernel can take this tensor: on a GPU, or anywhere when interpreting."""
    return tensor.is_cuda or is_interpreting()
