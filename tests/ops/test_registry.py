"""Every operator of the registry: each provider against the torch reference, with the operator's own inputs and tolerance.

Triton providers run on the GPU where there is one; elsewhere a child process runs them in Triton's interpreter, which must
be chosen before Triton is imported.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import octavo.ops
from octavo.ops.registry import REGISTRY
from octavo.ops.triton_support import is_interpreting

for module in pkgutil.walk_packages(octavo.ops.__path__, "octavo.ops."):
    if "triton" not in module.name or find_spec("triton") is not None:
        importlib.import_module(module.name)

CASES = [
    pytest.param(op, provider, dtype, id=f"{name}-{provider.name}-{str(dtype).removeprefix('torch.')}")
    for name, op in sorted(REGISTRY.items())
    if op.inputs is not None
    for provider in op.providers
    for dtype in (torch.float32, torch.bfloat16)
]


def _copy(arguments: tuple) -> tuple:
    return tuple(_clone(a) if isinstance(a, torch.Tensor) else a for a in arguments)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, gaps included."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _tensors(value: object) -> list[torch.Tensor]:
    """The tensors in what an operator returned, or in the arguments it changed in place; 8-bit floats widened to compare."""
    if isinstance(value, torch.Tensor):
        return [value.float() if value.is_floating_point() and value.itemsize == 1 else value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []


@pytest.mark.parametrize(("op", "provider", "dtype"), CASES)
def test_provider_equals_reference(op, provider, dtype):
    if not provider.is_available():
        pytest.skip(f"provider {provider.name} is not supported on this machine")
    device = "cuda" if torch.cuda.is_available() and provider.name != "cpu" else "cpu"
    rtol, atol = op.tolerance[dtype]
    accepted = 0
    for arguments in op.inputs(torch.Generator().manual_seed(0), dtype, device):
        if not provider.accepts(*arguments):
            continue
        accepted += 1
        expected_arguments, actual_arguments = _copy(arguments), _copy(arguments)
        expected = op.reference(*expected_arguments)
        actual = provider.fn(*actual_arguments)
        pairs = zip(
            _tensors(expected) + _tensors(expected_arguments),
            _tensors(actual) + _tensors(actual_arguments),
            strict=True,
        )
        for one, other in pairs:
            torch.testing.assert_close(other, one, rtol=rtol, atol=atol, equal_nan=True)
    if accepted == 0:
        pytest.skip(f"provider {provider.name} accepts none of the operator's inputs in {dtype} on {device}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the providers ran on the GPU")
@pytest.mark.skipif(is_interpreting(), reason="this is the child process")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install octavo[triton]")
def test_triton_providers_in_the_interpreter():
    # Those of matrices are for 16 bits, and the interpreter rounds to 8-bit floats in its own way: test_fp8.py knows how.
    wanted = [case.id for case in CASES if case.id.endswith("-triton-float32")]
    wanted = [name for name in wanted if not name.startswith("linear-") and "fp8" not in name]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *(f"{__file__}::test_provider_equals_reference[{n}]" for n in wanted),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert f"{len(wanted)} passed" in child.stdout, child.stdout
