"""Rotary position embedding, fused with what stands next to it: head norms before, the KV cache write after.

Tables hold cos and sin side by side, `cos_sin [max_position, rotary_dim]` float32: cos of the rotary_dim / 2 angles, then
sin (Su et al. 2021, in the half-split order of the published checkpoints; `interleaved` pairs neighbours instead).
"""

import torch

from octavo.ops.norm import rms_norm
from octavo.ops.registry import op


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first rotary_dim elements of x [tokens, heads, head_dim] by cos_sin [tokens, rotary_dim]."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    rotated, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    out = out.to(x.dtype)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def to_cached(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x as a cache of `dtype` keeps it: 8-bit floats are divided by their scale and saturate, others are only rounded."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)


@op
def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store k, v [tokens, num_kv_heads, head_dim] at their slots; slot -1 is dropped.

    kv_cache [num_blocks, 2, block_size, num_kv_heads, head_dim]; slot_mapping [tokens] int64 = block * block_size + offset.
    A key is its elements in the cache times `k_scale`, a value times `v_scale`; caches of more than 8 bits have scales of 1.
    """
    block_size = kv_cache.shape[2]
    # A dropped slot lands in block 0, which no request owns: no data-dependent shape is needed.
    slots = slot_mapping.clamp(min=0)
    block, offset = slots // block_size, slots % block_size
    kv_cache[block, 0, offset] = to_cached(k, kv_cache.dtype, k_scale)
    kv_cache[block, 1, offset] = to_cached(v, kv_cache.dtype, v_scale)


@op
def qkv_rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Normalise the heads, rotate, write keys and values into the cache; returns q [tokens, num_heads, head_dim].

    qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] as the fused projection leaves it; positions [tokens]; `q_norm`
    and `k_norm` [head_dim] or None; `cos_sin` None leaves positions out (NoPE layers); the scales as in `write_kv`.
    """
    head_dim = kv_cache.shape[-1]
    q, k, v = qkv.view(qkv.shape[0], -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = rms_norm.reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm.reference(k, k_norm, eps)
    if cos_sin is not None:
        table = cos_sin[positions]
        q, k = apply_rope(q, table, interleaved), apply_rope(k, table, interleaved)
    write_kv.reference(k, v, kv_cache, slot_mapping, k_scale, v_scale)
    return q
