"""Provider "triton" of latent attention's cache write and of its decode; `triton_mla_prefill` has the prompts.

Decode: the heads of a program share each tile of latents, which is read once and serves as keys and, in its first `rank`
columns, as values. A token's latents are cut into splits as in `triton_decode`; the last program of a (token, part) merges
the partial results in a fixed order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.attention.mla import latent_decode, latent_rope_write
from octavo.ops.attention.triton_decode import LOG2E, MINUS, attend, token_offsets
from octavo.ops.rope_triton import rotation, rotation_partner
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import counters, launch, next_power_of_2, scratch

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SPLITS = 32
# Programs that keep the memory busy: two a multiprocessor of the largest GPUs.
_PROGRAMS = 264


@triton.jit
def write_or_rotate(
    token,
    part,
    q,
    latent,
    positions,
    cos_sin,
    norm,
    cache,
    slot_mapping,
    q_out,
    eps,
    q_stride,
    q_head_stride,
    q_offset,
    latent_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROW: tl.constexpr,
):
    """Part 0: write the token's latent and key. Part 1 + n: rotate its n-th block of BLOCK_H heads."""
    token = token.to(tl.int64)
    d = tl.arange(0, PADDED_ROPE)
    in_rope = d < ROPE_DIM
    partner = rotation_partner(d, ROPE_DIM, INTERLEAVED)
    position = tl.load(positions + token).to(tl.int64)
    c, s = rotation(cos_sin + position * ROPE_DIM, d, ROPE_DIM, INTERLEAVED)
    if part == 0:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        r = tl.arange(0, PADDED_RANK)
        row = latent + token * latent_stride
        v = tl.load(row + r, mask=r < RANK, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(v * v, axis=0) / RANK + eps)
        v = v * rstd * tl.load(norm + r, mask=r < RANK, other=0.0).to(tl.float32)
        key = tl.load(row + RANK + d, mask=in_rope, other=0.0).to(tl.float32)
        other = tl.load(row + RANK + partner, mask=in_rope, other=0.0).to(tl.float32)
        key = key * c + other * s
        place = cache + slot * ROW  # blocks lie one after the other, and so do their tokens
        tl.store(place + r, v.to(cache.dtype.element_ty), mask=r < tl.where(slot >= 0, RANK, 0))
        tl.store(place + RANK + d, key.to(cache.dtype.element_ty), mask=d < tl.where(slot >= 0, ROPE_DIM, 0))
    else:
        # Names of their own: Triton would merge those of the other branch, of other shapes.
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < NUM_HEADS)[:, None] & in_rope[None, :]
        q_rows = q + token * q_stride + heads[:, None] * q_head_stride + q_offset
        own = tl.load(q_rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
        theirs = tl.load(q_rows + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        rotated = own * c[None, :] + theirs * s[None, :]
        q_place = q_out + (token * NUM_HEADS + heads[:, None]) * ROPE_DIM + d[None, :]
        tl.store(q_place, rotated.to(q_out.dtype.element_ty), mask=inside)


@triton.jit
def _latent_rope_write_kernel(
    q,  # [tokens, NUM_HEADS, q_head_stride]: each head's last ROPE_DIM elements rotate
    latent,  # [tokens, RANK + ROPE_DIM], tokens latent_stride apart
    positions,  # [tokens]
    cos_sin,  # [max_position, ROPE_DIM] float32: cos | sin
    norm,  # [RANK]
    cache,  # [num_blocks, BLOCK_SIZE, RANK + ROPE_DIM], tokens ROW apart
    slot_mapping,  # [tokens]
    q_out,  # [tokens, NUM_HEADS, ROPE_DIM]
    eps,
    q_stride,
    q_head_stride,
    q_offset,
    latent_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 of a token writes its latent and key; the others rotate BLOCK_H heads. Grid (tokens, 1 + head blocks)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    write_or_rotate(
        tl.program_id(0), tl.program_id(1), q, latent, positions, cos_sin, norm, cache, slot_mapping, q_out, eps, q_stride,
        q_head_stride, q_offset, latent_stride, NUM_HEADS, RANK, PADDED_RANK, ROPE_DIM, PADDED_ROPE, BLOCK_H, INTERLEAVED,
        ROW,
    )  # fmt: skip


def heads_a_program(num_heads: int, padded_rope: int) -> int:
    """How many to rotate: about 1 Ki elements, eight a thread of 4 warps."""
    return min(max(1, 1024 // padded_rope), next_power_of_2(num_heads))


def rows_follow(cache: torch.Tensor) -> bool:
    """Whether tokens lie at equal distances, also over the borders of blocks; there may be something between them."""
    return cache.stride(2) == 1 and cache.stride(0) == cache.shape[1] * cache.stride(1)


def _accepts_write(q, latent, positions, cos_sin, norm_weight, eps, cache, slot_mapping, interleaved) -> bool:
    return (
        runs_on_triton(q)
        and q.shape[0] > 0
        and q.dtype in _FLOATS
        and cache.dtype in _FLOATS
        and q.stride(2) == 1
        and latent.stride(1) == 1
        and rows_follow(cache)
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
    )


@latent_rope_write.register("triton", supported=has_triton, accepts=_accepts_write)
def latent_rope_write_triton(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """One pass over latents and queries."""
    tokens, num_heads, head_dim = q.shape
    rope_dim, rank = cos_sin.shape[1], norm_weight.shape[0]
    q_out = torch.empty(tokens, num_heads, rope_dim, dtype=q.dtype, device=q.device)
    padded_rope = next_power_of_2(rope_dim)
    block_h = heads_a_program(num_heads, padded_rope)
    launch(
        _latent_rope_write_kernel,
        (tokens, 1 + triton.cdiv(num_heads, block_h)),
        q,
        latent,
        positions,
        cos_sin,
        norm_weight,
        cache,
        slot_mapping,
        q_out,
        eps,
        q.stride(0),
        q.stride(1),
        head_dim - rope_dim,
        latent.stride(0),
        NUM_HEADS=num_heads,
        RANK=rank,
        PADDED_RANK=next_power_of_2(rank),
        ROPE_DIM=rope_dim,
        PADDED_ROPE=padded_rope,
        BLOCK_H=block_h,
        INTERLEAVED=interleaved,
        ROW=cache.stride(1),
        num_warps=4,
    )
    return q_out


@dataclass(frozen=True, slots=True)
class LatentDecodeConfig:
    """How decode is cut: latents a tile, warps for 16 heads, parts of the values, programs to aim at over all splits."""

    tile: int
    num_stages: int
    num_warps: int
    value_blocks: int
    programs: int


def default_config(pairs: int, element_size: int) -> LatentDecodeConfig:
    """For `pairs` of a token and a block of heads.

    A tile of 32 latents of 576 two-byte numbers is 36 kB, and two of them are on their way. Few pairs are cut into many
    splits, and their merge is shared by parts of the values.
    """
    return LatentDecodeConfig(32 if element_size == 2 else 16, 2, 4, 4 if pairs <= 8 else 1, _PROGRAMS)


@triton.jit
def _find(starts, num_requests, token):
    """The request that `token` is of."""
    request = 0
    end = num_requests
    while end - request > 1:
        middle = (request + end) // 2
        before = tl.load(starts + middle) <= token
        request = tl.where(before, middle, request)
        end = tl.where(before, end, middle)
    return request


@triton.jit(do_not_specialize=["wanted_splits", "num_requests"])
def _latent_decode_kernel(
    q_latent,  # [tokens, NUM_HEADS, RANK]
    q_rope,  # [tokens, NUM_HEADS, ROPE_DIM]
    cache,  # [num_blocks, BLOCK_SIZE, RANK + ROPE_DIM], tokens ROW apart
    block_table,  # [requests, max_blocks]
    seq_lens,  # [requests]
    query_start_loc,  # [requests + 1]; not read where every request has one token
    out,  # [tokens, NUM_HEADS, RANK]
    partial_out,  # [tokens, parts, num_splits, BLOCK_H, VALUES] float32
    partial_lse,  # [tokens, parts, num_splits, 2, BLOCK_H] float32: maximum, sum
    arrivals,  # [tokens, parts] int32, zero
    num_requests,
    scale,
    wanted_splits,
    latent_stride,
    latent_head_stride,
    rope_stride,
    rope_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_H: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program attends to one split of a token's latents for BLOCK_H heads. Grid (num_splits, parts, tokens).

    Parts are blocks of heads times blocks of VALUES of the rank: the more, the less is left to the one that merges splits.
    With fewer requests than tokens, query_start_loc says which are whose; a token sees those before it and itself.
    """
    split = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.program_id(2)
    num_splits = tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
    VALUE_BLOCKS: tl.constexpr = (RANK + VALUES - 1) // VALUES
    head_block = part // VALUE_BLOCKS
    request = token
    after = 0  # tokens of the request behind this one
    if num_requests < tl.num_programs(2):
        request = _find(query_start_loc, num_requests, token)
        after = tl.load(query_start_loc + request + 1) - 1 - token
    seq_len = tl.load(seq_lens + request) - after
    per_split = tl.maximum(tl.cdiv(seq_len, wanted_splits), tl.cdiv(seq_len, num_splits))
    per_split = tl.maximum(tl.cdiv(per_split, TILE) * TILE, TILE)
    used_splits = tl.maximum(tl.cdiv(seq_len, per_split), 1)
    if split < used_splits:
        if PDL:
            gdc_wait()
        low = split * per_split
        high = tl.minimum(low + per_split, seq_len)
        row = token.to(tl.int64)
        heads = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
        live = heads < NUM_HEADS
        r = tl.arange(0, PADDED_RANK)
        d = tl.arange(0, PADDED_ROPE)
        v = part % VALUE_BLOCKS * VALUES + tl.arange(0, VALUES)
        in_rank = (r < RANK)[None, :]
        in_rope = (d < ROPE_DIM)[None, :]
        in_values = (v < RANK)[None, :]
        t = tl.arange(0, TILE)
        ql = tl.load(
            q_latent + row * latent_stride + heads[:, None] * latent_head_stride + r[None, :],
            mask=live[:, None] & in_rank,
            other=0.0,
        )
        qr = tl.load(
            q_rope + row * rope_stride + heads[:, None] * rope_head_stride + d[None, :],
            mask=live[:, None] & in_rope,
            other=0.0,
        )
        table_row = block_table + tl.cast(request, tl.int64) * table_stride
        m = tl.full([BLOCK_H], MINUS, tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, VALUES], tl.float32)
        for i in tl.range(low, high, TILE, num_stages=STAGES):
            tokens = i + t
            visible = tokens < high
            off = token_offsets(table_row, tokens, visible, BLOCK_SIZE * ROW, ROW, BLOCK_SIZE)[:, None]
            kv = tl.load(cache + off + r[None, :], mask=visible[:, None] & in_rank, other=0.0).to(ql.dtype)
            key = tl.load(cache + off + RANK + d[None, :], mask=visible[:, None] & in_rope, other=0.0).to(ql.dtype)
            qk = tl.dot(ql, kv.T, input_precision="ieee")
            qk = tl.dot(qr, key.T, qk, input_precision="ieee")
            values = kv
            if VALUE_BLOCKS > 1:
                values = tl.load(cache + off + v[None, :], mask=visible[:, None] & in_values, other=0.0).to(ql.dtype)
            acc, m, total = attend(acc, m, total, qk * (scale * LOG2E), visible[None, :], values)
        at = heads[:, None] * RANK + v[None, :]
        inside = live[:, None] & in_values
        if used_splits == 1:
            # A row of graph padding has no tokens, and zero for its result.
            y = acc / tl.maximum(total, 1e-30)[:, None]
            tl.store(out + row * (NUM_HEADS * RANK) + at, y.to(out.dtype.element_ty), mask=inside)
        else:
            pair = token * tl.num_programs(1) + part
            first = (pair * num_splits).to(tl.int64)
            h = tl.arange(0, BLOCK_H)
            mine = first + split
            place = h[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
            tl.store(partial_out + mine * (BLOCK_H * VALUES) + place, acc, mask=inside)
            tl.store(partial_lse + mine * (2 * BLOCK_H) + h, m)
            tl.store(partial_lse + mine * (2 * BLOCK_H) + BLOCK_H + h, total)
            # All threads' partial results must be written before one thread announces them.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == used_splits - 1:
                m_all = tl.full([BLOCK_H], MINUS, tl.float32)
                l_all = tl.zeros([BLOCK_H], tl.float32)
                acc_all = tl.zeros([BLOCK_H, VALUES], tl.float32)
                for s in tl.range(0, used_splits, num_stages=2):
                    theirs = first + s
                    ms = tl.load(partial_lse + theirs * (2 * BLOCK_H) + h, cache_modifier=".cg")
                    ls = tl.load(partial_lse + theirs * (2 * BLOCK_H) + BLOCK_H + h, cache_modifier=".cg")
                    os = tl.load(
                        partial_out + theirs * (BLOCK_H * VALUES) + place, mask=inside, other=0.0, cache_modifier=".cg"
                    )
                    m_next = tl.maximum(m_all, ms)
                    weight = tl.exp2(ms - m_next)
                    shrink = tl.exp2(m_all - m_next)
                    l_all = l_all * shrink + weight * ls
                    acc_all = acc_all * shrink[:, None] + os * weight[:, None]
                    m_all = m_next
                y = acc_all / l_all[:, None]
                tl.store(out + row * (NUM_HEADS * RANK) + at, y.to(out.dtype.element_ty), mask=inside)
                tl.store(arrivals + pair, 0)


def _accepts_decode(q_latent, q_rope, cache, block_table, seq_lens, max_seq_len, scale, query_start_loc=None) -> bool:
    return (
        runs_on_triton(q_latent)
        and q_latent.shape[0] > 0
        and q_latent.dtype in _FLOATS
        and cache.dtype in _FLOATS
        and q_latent.stride(2) == 1
        and q_rope.stride(2) == 1
        and q_rope.dtype == q_latent.dtype
        and rows_follow(cache)
        and block_table.stride(1) == 1
    )


@latent_decode.register("triton", supported=has_triton, accepts=_accepts_decode)
def latent_decode_triton(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    query_start_loc: torch.Tensor | None = None,
    *,
    config: LatentDecodeConfig | None = None,
) -> torch.Tensor:
    """Split over the cached tokens, merged by whoever comes last."""
    tokens, num_heads, rank = q_latent.shape
    rope_dim = q_rope.shape[2]
    block_h = 16 if num_heads <= 16 else 32
    head_blocks = triton.cdiv(num_heads, block_h)
    padded_rank = next_power_of_2(rank)
    if config is None:
        config = default_config(tokens * head_blocks, cache.element_size())
    values = max(16, padded_rank // config.value_blocks)
    wanted_splits = min(_MAX_SPLITS, max(1, config.programs // (tokens * head_blocks)))
    num_splits = min(wanted_splits, triton.cdiv(max_seq_len, config.tile))
    parts = head_blocks * triton.cdiv(rank, values)
    out = torch.empty(tokens, num_heads, rank, dtype=q_latent.dtype, device=q_latent.device)
    launch(
        _latent_decode_kernel,
        (num_splits, parts, tokens),
        q_latent,
        q_rope,
        cache,
        block_table,
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        out,
        scratch("latent_out", tokens * parts * num_splits * block_h * values, out.device),
        scratch("latent_lse", tokens * parts * num_splits * block_h * 2, out.device),
        counters(tokens * parts, out.device),
        seq_lens.shape[0],
        scale,
        wanted_splits,
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        block_table.stride(0),
        NUM_HEADS=num_heads,
        RANK=rank,
        PADDED_RANK=padded_rank,
        ROPE_DIM=rope_dim,
        PADDED_ROPE=max(16, next_power_of_2(rope_dim)),
        BLOCK_SIZE=cache.shape[1],
        ROW=cache.stride(1),
        BLOCK_H=block_h,
        VALUES=values,
        TILE=config.tile,
        STAGES=config.num_stages,
        num_warps=config.num_warps * block_h // 16,
    )
    return out
