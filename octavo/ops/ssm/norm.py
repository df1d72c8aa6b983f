"""The norm and gate behind recurrent layers."""

import torch
import torch.nn.functional as F

from octavo.ops.registry import op


@op
def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int, gate_first: bool
) -> torch.Tensor:
    """RMSNorm of each group of channels and silu(gate): norm(x silu(gate)) if `gate_first`, else norm(x) silu(gate).

    x, gate [tokens, channels]; weight [channels], or [group_size] which all groups share. Returns x's shape and dtype.
    """
    y, factor = x.float(), F.silu(gate.float())
    if gate_first:
        y = y * factor
    y = y.unflatten(1, (-1, group_size))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float().view(-1, group_size)
    y = y.flatten(1)
    return (y if gate_first else y * factor).to(x.dtype)


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(device, dtype)

    for tokens, groups, size, shared, gate_first in (
        (1, 1, 160, False, True),
        (5, 3, 48, False, True),
        (7, 4, 32, True, False),
    ):
        x, gate = make(tokens, groups * size), make(tokens, 2 * groups * size)[:, : groups * size]
        yield x, gate, make(size if shared else groups * size), 1e-5, size, gate_first


gated_norm.inputs = _inputs
