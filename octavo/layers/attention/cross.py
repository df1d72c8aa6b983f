"""`CrossAttention`: a decoder's tokens read all that their request's encoder put out."""

import torch
from torch import nn

from octavo.context import get_step_context
from octavo.layers.linear import Linear, RowLinear
from octavo.layers.norm import RMSNorm
from octavo.ops.attention import paged_attention
from octavo.ops.rope import write_kv
from octavo.types.kv_spec import CrossAttentionSpec, KVSpec


class CrossAttention(nn.Module):
    """residual + o(attention of q(norm(x)) to the keys and values of the encoder's positions), which `fill` writes once.

    The runner sets `kv_cache` ([num_blocks, 2, block_size, num_heads, head_dim]) and `group` when memory is planned.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, *, bias: bool = False, scale: float | None = None
    ):
        super().__init__()
        width = num_heads * head_dim
        self.num_heads, self.head_dim = num_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.q_proj = Linear(hidden_size, width, bias)
        self.kv_proj = Linear(hidden_size, (width, width), bias)
        self.o_proj = RowLinear(width, hidden_size, bias)
        self.group = 0
        self.kv_cache: torch.Tensor = torch.empty(0)

    def kv_spec(self, block_size: int, dtype: str) -> KVSpec:
        """What this layer keeps."""
        return CrossAttentionSpec(self.num_heads, self.head_dim, dtype, block_size)

    def fill(self, encoder_states: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Keep the keys and values of an encoder's output [positions, hidden] at their slots [positions] int64."""
        k, v = self.kv_proj(encoder_states).view(-1, 2, self.num_heads, self.head_dim).unbind(1)
        write_kv(k, v, self.kv_cache, slot_mapping)

    def forward(
        self, x: torch.Tensor, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden].

        To the operator every token is a request of its own with all its keys before it: no order hides any of them.
        """
        encoder = get_step_context().encoder
        assert encoder is not None, "a step of an encoder-decoder model says where its encoder's output lies"
        out = paged_attention(
            self.q_proj(x, norm).view(-1, self.num_heads, self.head_dim),
            self.kv_cache,
            encoder.block_tables[self.group],
            encoder.query_start_loc,
            encoder.seq_lens,
            1,
            encoder.max_seq_len,
            self.scale,
        )
        return self.o_proj(out.flatten(1), residual=residual)
