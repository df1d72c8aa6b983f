"""Provider "triton" of the rotary embedding with its neighbours: head norms, KV cache write."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.rope import qkv_rope_write, write_kv
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit
def rotation_partner(d, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The element that d rotates with; d itself past ROTARY_DIM."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        partner = d ^ 1
    else:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
    return tl.where(d < ROTARY_DIM, partner, d)


@triton.jit
def rotation(cos_sin_row, d, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(c, s) with rotated[d] = c * v[d] + s * v[partner of d]; (1, 0) past ROTARY_DIM."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    rotates = d < ROTARY_DIM
    if INTERLEAVED:
        angle = d // 2
        first = d % 2 == 0
    else:
        angle = d % HALF
        first = d < HALF
    c = tl.load(cos_sin_row + angle, mask=rotates, other=1.0)
    s = tl.load(cos_sin_row + HALF + angle, mask=rotates, other=0.0)
    return c, tl.where(first, -s, s)


@triton.jit
def to_cached(x, inverse_scale, DTYPE: tl.constexpr):
    """x as a cache of DTYPE keeps it: E4M3 numbers are divided by their scale and saturate (NaN stays), others are rounded."""
    if tl.float8e4nv == DTYPE:
        x = tl.clamp(x.to(tl.float32) * inverse_scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def _qkv_rope_write_kernel(
    qkv,  # [tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM], tokens qkv_stride apart
    positions,  # [tokens]
    cos_sin,  # [max_position, ROTARY_DIM] float32: cos | sin
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    slot_mapping,  # [tokens]
    q_norm,  # [HEAD_DIM]
    k_norm,  # [HEAD_DIM]
    q_out,  # [tokens, NUM_HEADS, HEAD_DIM]
    eps,
    inverse_k_scale,
    inverse_v_scale,
    qkv_stride,
    block_stride,
    kv_stride,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes BLOCK_H heads of one token, in the order q, k, v. Grid (tokens, cdiv(all heads, BLOCK_H))."""
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, PADDED_DIM)
    in_dim = d < HEAD_DIM
    is_q = heads < NUM_HEADS
    is_v = heads >= NUM_HEADS + NUM_KV_HEADS
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_dim[None, :]
    if PDL:
        gdc_wait()
    slot = tl.load(slot_mapping + token).to(tl.int64)
    head_rows = qkv + token * qkv_stride + heads[:, None] * HEAD_DIM
    raw = tl.load(head_rows + d[None, :], mask=inside, other=0.0)
    v = raw.to(tl.float32)
    HAS_NORM: tl.constexpr = HAS_Q_NORM or HAS_K_NORM
    if ROTARY_DIM > 0:
        partner = rotation_partner(d, ROTARY_DIM, INTERLEAVED)
        w = tl.load(head_rows + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(v * v, axis=1) / HEAD_DIM + eps)[:, None]
        factor = tl.full([BLOCK_H, PADDED_DIM], 1.0, tl.float32)
        if HAS_Q_NORM:
            gamma = tl.load(q_norm + d, mask=in_dim, other=0.0).to(tl.float32)
            factor = tl.where(is_q[:, None], gamma[None, :] * rstd, factor)
        if HAS_K_NORM:
            gamma = tl.load(k_norm + d, mask=in_dim, other=0.0).to(tl.float32)
            factor = tl.where((is_q | is_v)[:, None], factor, gamma[None, :] * rstd)
        v = v * factor
        if ROTARY_DIM > 0:
            factor = tl.full([BLOCK_H, PADDED_DIM], 1.0, tl.float32)
            if HAS_Q_NORM:
                gamma = tl.load(q_norm + partner, mask=in_dim, other=0.0).to(tl.float32)
                factor = tl.where(is_q[:, None], gamma[None, :] * rstd, factor)
            if HAS_K_NORM:
                gamma = tl.load(k_norm + partner, mask=in_dim, other=0.0).to(tl.float32)
                factor = tl.where((is_q | is_v)[:, None], factor, gamma[None, :] * rstd)
            w = w * factor
    if ROTARY_DIM > 0:
        position = tl.load(positions + token).to(tl.int64)
        c, s = rotation(cos_sin + position * ROTARY_DIM, d, ROTARY_DIM, INTERLEAVED)
        v = tl.where(is_v[:, None], v, v * c[None, :] + w * s[None, :])
    result = v.to(raw.dtype)
    tl.store(
        q_out + token * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + d[None, :],
        result,
        mask=inside & is_q[:, None],
    )
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    kv_head = tl.where(is_v, heads - NUM_HEADS - NUM_KV_HEADS, heads - NUM_HEADS)
    place = block * block_stride + offset * token_stride
    place = place + tl.where(is_v, kv_stride, 0)[:, None] + kv_head[:, None] * head_stride + d[None, :]
    writable_heads = tl.where(slot >= 0, NUM_HEADS + 2 * NUM_KV_HEADS, 0)
    written = ((heads >= NUM_HEADS) & (heads < writable_heads))[:, None] & in_dim[None, :]
    inverse_scale = tl.where(is_v, inverse_v_scale, inverse_k_scale)[:, None]
    tl.store(kv_cache + place, to_cached(result, inverse_scale, kv_cache.dtype.element_ty), mask=written)


@triton.jit
def _write_kv_kernel(
    k,  # [tokens, NUM_KV_HEADS, HEAD_DIM], tokens k_stride apart
    v,
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    slot_mapping,  # [tokens]
    inverse_k_scale,
    inverse_v_scale,
    k_stride,
    v_stride,
    block_stride,
    kv_stride,
    token_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program stores BLOCK elements of one token's key and value. Grid (tokens, cdiv(NUM_KV_HEADS * HEAD_DIM, BLOCK))."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    inside = i < tl.where(slot >= 0, NUM_KV_HEADS * HEAD_DIM, 0)
    place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
    place = place + (i // HEAD_DIM) * head_stride + i % HEAD_DIM
    new_k = tl.load(k + token * k_stride + i, mask=inside, other=0.0)
    new_v = tl.load(v + token * v_stride + i, mask=inside, other=0.0)
    tl.store(kv_cache + place, to_cached(new_k, inverse_k_scale, kv_cache.dtype.element_ty), mask=inside)
    tl.store(kv_cache + kv_stride + place, to_cached(new_v, inverse_v_scale, kv_cache.dtype.element_ty), mask=inside)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CACHE_DTYPES = (*FLOATS, torch.float8_e4m3fn)


def _accepts_write_kv(k, v, kv_cache, slot_mapping, k_scale=1.0, v_scale=1.0) -> bool:
    return (
        runs_on_triton(k)
        and kv_cache.dtype in CACHE_DTYPES
        and k.numel() > 0
        and kv_cache.stride(-1) == 1
        and all(t[0].is_contiguous() for t in (k, v))
    )


@write_kv.register("triton", supported=has_triton, accepts=_accepts_write_kv)
def write_kv_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """One pass; slot -1 writes nothing."""
    tokens, num_kv_heads, head_dim = k.shape
    block = min(1024, next_power_of_2(num_kv_heads * head_dim))
    launch(
        _write_kv_kernel,
        (tokens, triton.cdiv(num_kv_heads * head_dim, block)),
        k,
        v,
        kv_cache,
        slot_mapping,
        1.0 / k_scale,
        1.0 / v_scale,
        k.stride(0),
        v.stride(0),
        *kv_cache.stride()[:4],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        BLOCK=block,
        num_warps=4,
    )


def accepts_qkv(qkv, cos_sin, kv_cache, q_norm, k_norm) -> bool:
    """What every kernel that reads a fused projection row asks of it."""
    return (
        runs_on_triton(qkv)
        and qkv.dtype in FLOATS
        and kv_cache.dtype in CACHE_DTYPES
        and qkv.shape[0] > 0
        and qkv.stride(1) == 1
        and kv_cache.stride(4) == 1
        and (cos_sin is None or (cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()))
        and all(n is None or n.is_contiguous() for n in (q_norm, k_norm))
    )


def _accepts(
    qkv,
    positions,
    cos_sin,
    kv_cache,
    slot_mapping,
    num_heads,
    num_kv_heads,
    q_norm=None,
    k_norm=None,
    eps=1e-6,
    interleaved=False,
    k_scale=1.0,
    v_scale=1.0,
) -> bool:
    return accepts_qkv(qkv, cos_sin, kv_cache, q_norm, k_norm)


@qkv_rope_write.register("triton", supported=has_triton, accepts=_accepts)
def qkv_rope_write_triton(
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
    """All of it in one pass over qkv."""
    tokens, head_dim = qkv.shape[0], kv_cache.shape[-1]
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    padded_dim = next_power_of_2(head_dim)
    all_heads = num_heads + 2 * num_kv_heads
    # About 1 Ki elements, eight a thread of 4 warps.
    block_h = max(1, min(1024 // padded_dim, next_power_of_2(all_heads)))
    launch(
        _qkv_rope_write_kernel,
        (tokens, triton.cdiv(all_heads, block_h)),
        qkv,
        positions,
        qkv if cos_sin is None else cos_sin,
        kv_cache,
        slot_mapping,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        q,
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        qkv.stride(0),
        *kv_cache.stride()[:4],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        ROTARY_DIM=0 if cos_sin is None else cos_sin.shape[-1],
        INTERLEAVED=interleaved,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        BLOCK_H=block_h,
        num_warps=4,
    )
    return q
