"""DeepSeek-V3.2's latent attention to the tokens an indexer chooses (see `ops.attention.sparse`)."""

from typing import NamedTuple, cast

import torch
from torch import nn

from octavo.context import get_step_context
from octavo.layers.attention.mla import LatentAttention
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import Rope
from octavo.ops.attention.sparse import index_topk, sparse_latent_attention
from octavo.ops.rope import apply_rope
from octavo.types.kv_spec import KVSpec, LatentSpec


class IndexInputs(NamedTuple):
    """What a step's tokens bring to the choice."""

    q: torch.Tensor  # [tokens, num_heads, head_dim], rotated
    key: torch.Tensor  # [tokens, head_dim], rotated
    weights: torch.Tensor  # [tokens, num_heads]


class Indexer(nn.Module):
    """Makes queries of the latent ones, and keys and weights of the heads of the hidden states.

    Scales of the published form (of the heads' width and number) are left out: they do not change an order. `interleaved`:
    how the first rotary_dim elements of a head rotate, which need not be how the attention's do.
    """

    def __init__(self, hidden_size: int, q_rank: int, num_heads: int, head_dim: int, interleaved: bool):
        super().__init__()
        self.num_heads, self.interleaved = num_heads, interleaved
        self.wq_b = Linear(q_rank, num_heads * head_dim)
        self.wk = Linear(hidden_size, head_dim)
        self.k_norm = LayerNorm(head_dim, 1e-6)
        # In floating point whatever the other linears' format.
        self.weights_proj = nn.Linear(hidden_size, num_heads, bias=False).requires_grad_(False)

    def forward(self, hidden: torch.Tensor, q_latent: torch.Tensor, positions: torch.Tensor, rope: Rope) -> IndexInputs:
        """hidden [tokens, hidden_size] and q_latent [tokens, q_rank], both normalised."""
        table = cast(torch.Tensor, rope.cos_sin)[positions]
        q = apply_rope(self.wq_b(q_latent).unflatten(-1, (self.num_heads, -1)), table, self.interleaved)
        key = apply_rope(self.k_norm(self.wk(hidden))[:, None], table, self.interleaved)
        return IndexInputs(q, key[:, 0], self.weights_proj(hidden))


class SparseLatentAttention(LatentAttention):
    """`LatentAttention` to the `topk` tokens that score best; cached rows are latent | rotated key | index key.

    `source`: an earlier layer, with pages of the same kind, whose choice is taken over.
    """

    def __init__(self, sizes: tuple[int, int, int, int, int], scale: float, index_dim: int, topk: int):
        super().__init__(*sizes, scale)
        self.index_dim, self.topk = index_dim, topk
        self.source: tuple[SparseLatentAttention, ...] = ()  # in a tuple, so that it is no part of this
        self.chosen: tuple[torch.Tensor, torch.Tensor] | None = None  # in the running step, see `index_topk`

    def kv_spec(self, block_size: int, dtype: str) -> KVSpec:
        return LatentSpec(self.rank + self.rope_dim + self.index_dim, dtype, block_size)

    def forward(self, q, latent, positions, rope, index: IndexInputs | None = None):
        """q, latent, positions and rope as in `LatentAttention`; `index` is None where there is a source."""
        latents, keys = self.kv_cache.tensor_split([-self.index_dim], dim=-1)
        sees_all = get_step_context().max_seq_len <= self.topk
        if index is not None:
            self.chosen = self.choose(keys, index, sees_all)
        if sees_all:
            return self.attend(latents, q, latent, positions, rope)
        q_nope, q_rope = self.write(latents, q, latent, positions, rope)
        chosen = self.source[0].chosen if self.source else self.chosen
        assert chosen is not None
        return sparse_latent_attention(q_nope, q_rope, self.up, latents, *chosen, self.scale).flatten(1)

    def choose(
        self, keys: torch.Tensor, index: IndexInputs, sees_all: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Write the step's keys into keys [num_blocks, block_size, index_dim], and choose where there is a choice."""
        context = get_step_context()
        meta = context.groups[self.group]
        slots = meta.slot_mapping.clamp(min=0)  # a dropped slot lands in block 0, which no request owns
        keys[slots // meta.block_size, slots % meta.block_size] = index.key.to(keys.dtype)
        if sees_all:
            return None
        return index_topk(
            index.q,
            index.weights,
            keys,
            meta.block_table,
            context.seq_lens,
            context.max_seq_len,
            self.topk,
            None if context.max_query_len == 1 else context.query_start_loc,
            context.query_start_loc_cpu,
            context.seq_lens_cpu,
        )
