"""T5's relative positions: a bias by the distance of two tokens, learned for buckets of distances."""

import math

import torch
from torch import nn

from octavo.context import get_step_context


class RelativeBias(nn.Module):
    """One number a head for each bucket (Raffel et al. 2020), as attention in both directions sees distances."""

    def __init__(self, num_buckets: int, num_heads: int, max_distance: int = 128):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads), requires_grad=False)
        self.num_buckets, self.max_distance = num_buckets, max_distance

    def forward(self) -> torch.Tensor:
        """[num_heads, length, length] for the step's longest request; each takes the corner of its own length."""
        positions = torch.arange(get_step_context().max_query_len, device=self.weight.device)
        return self.weight[self._buckets(positions[None, :] - positions[:, None])].permute(2, 0, 1)

    def _buckets(self, distance: torch.Tensor) -> torch.Tensor:
        """Half the buckets look back and half ahead; half of those are for one distance each, the rest grow with it."""
        half = self.num_buckets // 2
        exact, far = half // 2, distance.abs()
        growth = torch.log(far.float().clamp(min=1) / exact) / math.log(self.max_distance / exact) * (half - exact)
        bucket = torch.where(far < exact, far, (exact + growth.long()).clamp(max=half - 1))
        return bucket + (distance > 0) * half
