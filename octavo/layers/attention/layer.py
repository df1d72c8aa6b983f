"""`PagedAttention`: the layer models call. It owns its KV cache view, reads the step context, and calls the operators."""

import torch
from torch import nn

from octavo.context import StepContext, get_step_context
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.ops.attention import decode_attention, paged_attention
from octavo.ops.rope import qkv_rope_write, write_kv
from octavo.types.kv_spec import FullAttentionSpec, KVSpec, SlidingWindowSpec

SCALES = ("k_scale", "v_scale")


class PagedAttention(nn.Module):
    """Causal self-attention over the paged cache.

    The runner sets `kv_cache` ([num_blocks, 2, block_size, num_kv_heads, head_dim]) and `group` (which block table is
    ours) when memory is planned. A checkpoint may hold scales for caches of 8-bit floats: what the cache keeps is a key
    divided by `k_scale`, a value divided by `v_scale`. They are parameters until `process_after_loading` makes numbers of
    them, 1 where the checkpoint has none.
    """

    k_scale: float
    v_scale: float
    has_stored_scales = False

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window or 0
        self.softcap = softcap
        self.sinks, self.distance_bias = sinks, distance_bias
        self.group = 0
        self.kv_cache: torch.Tensor = torch.empty(0)
        for name in SCALES:
            param = nn.Parameter(torch.ones((), dtype=torch.float32), requires_grad=False)
            param.weight_loader = _load_scale  # type: ignore[attr-defined]
            param.is_optional = True  # type: ignore[attr-defined]
            self.register_parameter(name, param)

    def process_after_loading(self) -> None:
        """Read the scales off the device."""
        params = [self.get_parameter(name) for name in SCALES]
        self.has_stored_scales = all(getattr(param, "is_loaded", False) for param in params)
        for name, param in zip(SCALES, params, strict=True):
            delattr(self, name)
            setattr(self, name, param.item() if getattr(param, "is_loaded", False) else 1.0)

    @property
    def _scales(self) -> tuple[float, float]:
        """Of the cache at hand: wider ones keep numbers as they are."""
        return (self.k_scale, self.v_scale) if self.kv_cache.dtype.itemsize == 1 else (1.0, 1.0)

    def kv_spec(self, block_size: int, dtype: str) -> KVSpec:
        """What this layer keeps."""
        if self.window:
            return SlidingWindowSpec(self.num_kv_heads, self.head_dim, dtype, block_size, self.window)
        return FullAttentionSpec(self.num_kv_heads, self.head_dim, dtype, block_size)

    def step_context(self) -> StepContext:
        """The running step as this layer attends in it."""
        return get_step_context()

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rope: Rope | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] → [tokens, num_heads * head_dim].

        `rope` None leaves positions out; the norms apply to each head before the rotation; `distance_bias` is as in
        `ops.attention`, for layers that have none of their own.
        """
        if distance_bias is None:
            distance_bias = self.distance_bias
        context = self.step_context()
        meta = context.groups[self.group]
        cos_sin = None if rope is None else rope.cos_sin
        interleaved = rope is not None and rope.interleaved
        norms = (
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            1e-6 if q_norm is None else q_norm.eps,
        )
        if context.max_query_len == 1:
            out = decode_attention(
                qkv,
                positions,
                cos_sin,
                self.kv_cache,
                meta.slot_mapping,
                meta.block_table,
                context.seq_lens,
                context.max_seq_len,
                self.num_heads,
                self.num_kv_heads,
                self.scale,
                *norms,
                interleaved,
                self.window,
                self.softcap,
                self.sinks,
                distance_bias,
                *self._scales,
            )
        else:
            q = qkv_rope_write(
                qkv,
                positions,
                cos_sin,
                self.kv_cache,
                meta.slot_mapping,
                self.num_heads,
                self.num_kv_heads,
                *norms,
                interleaved,
                *self._scales,
            )
            out = self._attend(q, distance_bias)
        return out.flatten(1)

    def read(self, q: torch.Tensor, positions: torch.Tensor, rope: Rope, q_norm: RMSNorm) -> torch.Tensor:
        """For layers that keep nothing and attend to what this one wrote: q [tokens, num_heads * head_dim], and returned."""
        no_keys = self.kv_cache[..., :0, :]
        slots = self.step_context().groups[self.group].slot_mapping
        q = qkv_rope_write(
            q,
            positions,
            rope.cos_sin,
            no_keys,
            slots,
            self.num_heads,
            0,
            q_norm.weight,
            None,
            q_norm.eps,
            rope.interleaved,
        )
        return self._attend(q, self.distance_bias).flatten(1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """For models that rotate by themselves: q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim].

        Writes k and v, returns [tokens, num_heads, head_dim].
        """
        meta = get_step_context().groups[self.group]
        write_kv(k, v, self.kv_cache, meta.slot_mapping, *self._scales)
        return self._attend(q, self.distance_bias)

    def _attend(self, q: torch.Tensor, distance_bias: torch.Tensor | None) -> torch.Tensor:
        context = self.step_context()
        return paged_attention(
            q,
            self.kv_cache,
            context.groups[self.group].block_table,
            context.query_start_loc,
            context.seq_lens,
            context.max_query_len,
            context.max_seq_len,
            self.scale,
            self.window,
            self.softcap,
            self.sinks,
            distance_bias,
            context.query_start_loc_cpu,
            context.seq_lens_cpu,
            *self._scales,
        )


def _load_scale(param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
    """Copy a scale, which checkpoints keep as [] or [1]."""
    if loaded.numel() != 1:
        raise ValueError(f"expects one scale for all heads, the checkpoint has {list(loaded.shape)}")
    if not 0 < float(loaded) < float("inf"):
        raise ValueError(f"a scale of the KV cache is positive, the checkpoint has {float(loaded)}")
    param.copy_(loaded.reshape(()))
    param.is_loaded = True  # type: ignore[attr-defined]
