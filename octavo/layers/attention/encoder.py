"""`EncoderAttention`: self-attention in both directions. It keeps nothing: a request is computed whole, in one step."""

from typing import cast

import torch
from torch import nn

from octavo.context import get_step_context
from octavo.errors import ConfigError
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.ops.attention.encoder import encoder_attention
from octavo.ops.rope import apply_rope


class EncoderAttention(nn.Module):
    """`PagedAttention` without the cache and without a direction. `window` counts tokens on either side, itself included."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, scale: float | None = None, window: int | None = None
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window or 0

    @classmethod
    def in_place_of(cls, layer: PagedAttention) -> "EncoderAttention":
        """The layer of a decoder that was trained to look both ways (EmbeddingGemma)."""
        if layer.softcap or layer.sinks is not None or layer.distance_bias is not None:
            raise ConfigError("attention in both directions has no soft caps, sinks or ALiBi here.")
        # Such checkpoints state the whole width of the window.
        window = layer.window // 2 + 1 if layer.window else None
        return cls(layer.num_heads, layer.num_kv_heads, layer.head_dim, scale=layer.scale, window=window)

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor | None = None,
        rope: Rope | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] → [tokens, num_heads * head_dim].

        The norms apply to each head before the rotation; `bias` as in `ops.attention.encoder`.
        """
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = qkv.view(qkv.shape[0], -1, self.head_dim).split(heads, dim=1)
        q, k = q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)
        if rope is not None:
            table = cast(torch.Tensor, rope.cos_sin)[positions]
            q, k = apply_rope(q, table, rope.interleaved), apply_rope(k, table, rope.interleaved)
        context = get_step_context()
        out = encoder_attention(
            q,
            k,
            v,
            context.query_start_loc,
            context.max_query_len,
            self.scale,
            self.window,
            bias,
            context.query_start_loc_cpu,
        )
        return out.flatten(1)
