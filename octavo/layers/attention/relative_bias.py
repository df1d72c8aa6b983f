"""T5's relative positions: a bias by the distance of two tokens, learned for buckets of distances."""

import math

import torch
from torch import nn

from octavo.context import get_step_context


class RelativeBias(nn.Module):
    """One number a head for each bucket (Raffel et al. 2020): the first buckets hold one distance each, the others grow with
    it, and the last holds all from `max_distance` on."""

    buckets_back: torch.Tensor  # [max_distance + 1] of each distance, when all buckets look back

    def __init__(self, num_buckets: int, num_heads: int, max_distance: int = 128):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads), requires_grad=False)
        self.num_buckets, self.max_distance = num_buckets, max_distance
        back = self._buckets(torch.arange(max_distance + 1), num_buckets)
        self.register_buffer("buckets_back", back, persistent=False)

    def forward(self) -> torch.Tensor:
        """In both directions, half the buckets for each: [num_heads, length, length] for the step's longest request; each
        takes the corner of its own length."""
        positions = torch.arange(get_step_context().max_query_len, device=self.weight.device)
        distance, half = positions[None, :] - positions[:, None], self.num_buckets // 2
        return self.weight[self._buckets(distance.abs(), half) + (distance > 0) * half].permute(2, 0, 1)

    def looking_back(self) -> torch.Tensor:
        """For causal attention, as `distance_bias` of `ops.attention`: [num_heads, max_distance + 1] float32."""
        return self.weight[self.buckets_back].T.float().contiguous()

    def _buckets(self, distance: torch.Tensor, num_buckets: int) -> torch.Tensor:
        exact = num_buckets // 2
        growth = torch.log(distance.float().clamp(min=1) / exact) / math.log(self.max_distance / exact)
        grown = (exact + (growth * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
        return torch.where(distance < exact, distance, grown)
