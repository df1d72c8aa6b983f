"""`LatentAttention`: DeepSeek-V2's attention over cached latents (see `ops.attention.mla`)."""

import torch
from torch import nn

from octavo.context import get_step_context
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.ops.attention.mla import latent_attention, latent_decode_attention, latent_rope_write
from octavo.types.kv_spec import KVSpec, LatentSpec


class LatentUp(Linear):
    """The projection from latents to keys and values: rows [head: keys | values]. Decode uses its two halves as they are."""

    weight: nn.Parameter
    reads_numbers = True


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from one latent a token.

    The runner sets `kv_cache` ([num_blocks, block_size, rank + rope_dim]) and `group` when memory is planned.
    """

    def __init__(self, num_heads: int, nope_dim: int, rope_dim: int, value_dim: int, rank: int, scale: float):
        super().__init__()
        self.num_heads, self.nope_dim, self.rope_dim, self.rank = num_heads, nope_dim, rope_dim, rank
        self.scale = scale
        self.kv_a_layernorm = RMSNorm(rank)
        self.kv_b_proj = LatentUp(rank, num_heads * (nope_dim + value_dim))
        self.group = 0
        self.kv_cache: torch.Tensor = torch.empty(0)

    def kv_spec(self, block_size: int, dtype: str) -> KVSpec:
        """What this layer keeps."""
        return LatentSpec(self.rank + self.rope_dim, dtype, block_size)

    @property
    def up(self) -> torch.Tensor:
        """[num_heads, nope_dim + value_dim, rank]: from a latent to a head's key, then its value."""
        return self.kv_b_proj.weight.view(self.num_heads, -1, self.rank)

    def forward(self, q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
        """q [tokens, num_heads * (nope_dim + rope_dim)], latent [tokens, rank + rope_dim] → [tokens, num_heads * value_dim]."""
        return self.attend(self.kv_cache, q, latent, positions, rope)

    def attend(self, cache, q, latent, positions, rope) -> torch.Tensor:
        """Write the step's latents into cache [num_blocks, block_size, rank + rope_dim] and attend to all of a request's."""
        context = get_step_context()
        meta = context.groups[self.group]
        if context.max_query_len == 1:
            norm = self.kv_a_layernorm
            out = latent_decode_attention(
                q.unflatten(-1, (self.num_heads, -1)),
                latent,
                positions,
                rope.cos_sin,
                norm.weight,
                norm.eps,
                self.up,
                cache,
                meta.slot_mapping,
                meta.block_table,
                context.seq_lens,
                context.max_seq_len,
                self.scale,
                rope.interleaved,
            )
            return out.flatten(1)
        q_nope, q_rope = self.write(cache, q, latent, positions, rope)
        out = latent_attention(
            q_nope,
            q_rope,
            self.up,
            cache,
            meta.block_table,
            context.query_start_loc,
            context.seq_lens,
            context.max_query_len,
            context.max_seq_len,
            self.scale,
            context.query_start_loc_cpu,
            context.seq_lens_cpu,
        )
        return out.flatten(1)

    def write(self, cache, q, latent, positions, rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's latents; returns the queries' parts, of which the second is rotated."""
        slots = get_step_context().groups[self.group].slot_mapping
        q = q.unflatten(-1, (self.num_heads, -1))
        norm = self.kv_a_layernorm
        q_rope = latent_rope_write(
            q, latent, positions, rope.cos_sin, norm.weight, norm.eps, cache, slots, rope.interleaved
        )
        return q[..., : self.nope_dim], q_rope
