"""Random weights for `load_format="dummy"`: the same for the same seed and name, quick, and of a size to stay finite.

Matrices are uniform with variance 1 / fan-in, so that activations keep their size through the layers; norm weights lie
around 1, other vectors around 0. A large tensor repeats a pattern: drawing billions of numbers would take minutes on a
CPU, and nobody needs them to be independent.
"""

import zlib

import torch
from torch import Tensor

# Numbers drawn for one tensor at most; a prime, so that repeats do not line up with rows.
PATTERN_SIZE = 1_048_573


def fill_dummy(tensor: Tensor, name: str, seed: int) -> None:
    """Fill a tensor in place on its device."""
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # CPU generators take 32 bits only
    size = min(tensor.numel(), PATTERN_SIZE)
    if tensor.is_floating_point():
        center, spread = _range(tensor, name)
        pattern = torch.empty(size, device=tensor.device)
        pattern.uniform_(center - spread, center + spread, generator=generator)
    elif tensor.dtype == torch.bool:
        pattern = torch.zeros(size, device=tensor.device)
    else:
        limits = torch.iinfo(tensor.dtype)
        low, high = max(limits.min, -(2**31)), min(limits.max, 2**31 - 1)  # packed integers; never wider than 32 bits
        pattern = torch.randint(low, high + 1, (size,), device=tensor.device, generator=generator)
    pattern = pattern.to(tensor.dtype)
    flat = tensor.view(-1)  # parameters are contiguous
    for start in range(0, tensor.numel(), max(size, 1)):
        piece = flat[start : start + size]
        piece.copy_(pattern[: piece.numel()])


def _range(tensor: Tensor, name: str) -> tuple[float, float]:
    """(centre, half width) of the uniform distribution for a floating-point tensor."""
    if tensor.dim() >= 2:
        # Three dimensions: stacked experts, each a matrix of its own.
        fan_in = tensor.shape[-1] if tensor.dim() == 3 else tensor[0].numel()
        return 0.0, (3.0 / max(fan_in, 1)) ** 0.5
    return (1.0, 0.1) if name.endswith("weight") else (0.0, 0.02)
