"""Attention of one new token a request over the paged KV cache.

Provider "triton" of `decode_attention`, and the decode rows of `paged_attention`.

A request's keys are cut into splits, one program each for every KV head; the query heads of a group share the program and
its keys. How many splits a request gets follows from its own length, on the device: the grid has room for the longest, and
programs without work leave. The last program of a (request, KV head) merges the partial results, all asked for at once.

The fused form takes the projection's output: it normalises and rotates q and the new key, writes the new key and value to
the cache, and attends to the new token from registers, so the cached tokens can be read before the projection has finished
(PDL).
"""
# Triton branches on constants at compile time only where they stand alone in an `if`.
# ruff: noqa: SIM102

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.attention import decode_attention
from octavo.ops.rope_triton import accepts_qkv, rotation, rotation_partner, to_cached
from octavo.ops.triton_device import tanh, unpack_e4m3_pairs
from octavo.ops.triton_support import has_triton
from octavo.ops.triton_utils import counters, forget_choices_with, launch, next_power_of_2, scratch, tuned_table

LOG2E = tl.constexpr(1.4426950408889634)
# Stands for minus infinity in running maxima: differences of it stay finite.
MINUS = tl.constexpr(-1e30)


@triton.constexpr_function
def compute_dtype(q_dtype, cache_dtype):
    """What products are computed in: the cache's dtype, or what E4M3 numbers become.

    That is float16, which holds them exactly and costs one instruction for two of them, half of what bfloat16 does.
    """
    if cache_dtype != tl.float8e4nv:
        return cache_dtype
    return tl.float32 if q_dtype == tl.float32 else tl.float16


def num_distances(distance_bias: torch.Tensor | None) -> int:
    """What kernels specialise for: 0 without a bias, 1 for slopes, else the length of a table."""
    return 0 if distance_bias is None else 1 if distance_bias.dim() == 1 else distance_bias.shape[1]


@triton.jit
def head_bias(distance_bias, head, live, NUM_DISTANCES: tl.constexpr):
    """For each row's head: its slope, or the address of its table; without a bias zeros, which nothing reads."""
    if NUM_DISTANCES == 0:
        return tl.zeros(head.shape, tl.float32)
    elif NUM_DISTANCES == 1:
        return tl.load(distance_bias + head, mask=live, other=0.0).to(tl.float32)
    else:
        return distance_bias + tl.where(live, head, 0) * NUM_DISTANCES


@triton.jit
def scores_log2(qk, scale, softcap, bias, distance, HAS_SOFTCAP: tl.constexpr, NUM_DISTANCES: tl.constexpr):
    """Scores in units of log 2, ready for exp2. `bias` [rows] is `head_bias`; `distance` [rows or 1, keys]: key
    minus query position."""
    if HAS_SOFTCAP or NUM_DISTANCES:
        qk = qk * scale
        if HAS_SOFTCAP:
            qk = softcap * tanh(qk / softcap)
        if NUM_DISTANCES == 1:
            qk += bias[:, None] * distance.to(tl.float32)
        if NUM_DISTANCES > 1:
            # Keys behind their query are hidden afterwards.
            back = tl.minimum(tl.maximum(-distance, 0), NUM_DISTANCES - 1)
            qk += tl.load(bias[:, None] + back).to(tl.float32)
        return qk * LOG2E
    else:
        return qk * (scale * LOG2E)


@triton.jit
def attend(acc, m, total, s, visible, v_tile):
    """One tile of online softmax: acc [rows, dim], running maximum and sum [rows], scores [rows, keys] in log 2."""
    s = tl.where(visible, s, MINUS)
    m_new = tl.maximum(m, tl.max(s, axis=1))
    shrink = tl.exp2(m - m_new)
    p = tl.where(visible, tl.exp2(s - m_new[:, None]), 0.0)
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
    return acc, m_new, total


@triton.jit
def token_offsets(block_table_row, tokens, inside, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    """Offsets of the cached tokens at positions `tokens`, by their blocks."""
    block = tl.load(block_table_row + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return block * block_stride + (tokens % BLOCK_SIZE) * token_stride


@triton.jit
def load_values(rows, inside, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """The values at `rows` (pointers [keys, 1]) in DTYPE, [keys, PADDED_DIM], dimensions in the order of `value_dims`.

    A product wants neighbouring keys side by side. Shared memory turns pairs of bytes that way, not bytes: E4M3 values are
    read two dimensions at a time and parted in registers, even dimensions first.
    """
    if rows.dtype.element_ty == tl.float8e4nv:
        pair = tl.arange(0, PADDED_DIM // 2)[None, :]
        pairs = tl.load(
            rows.to(tl.pointer_type(tl.int16), bitcast=True) + pair, mask=inside & (pair < HEAD_DIM // 2), other=0
        )
        even, odd = unpack_e4m3_pairs(pairs)
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (inside.shape[0], PADDED_DIM)).to(DTYPE)
    else:
        d = tl.arange(0, PADDED_DIM)[None, :]
        return tl.load(rows + d, mask=inside & (d < HEAD_DIM), other=0.0).to(DTYPE)


@triton.jit
def value_dims(PADDED_DIM: tl.constexpr, IS_8_BIT: tl.constexpr):
    """The dimension in each column of `load_values`."""
    d = tl.arange(0, PADDED_DIM)
    if IS_8_BIT:
        return d % (PADDED_DIM // 2) * 2 + d // (PADDED_DIM // 2)
    else:
        return d


@triton.jit(do_not_specialize=["window", "wanted_splits", "min_tokens", "max_tokens"])
def _decode_kernel(
    q_rows,  # FUSED: qkv [requests, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]; else q [tokens, NUM_HEADS * HEAD_DIM]
    positions,  # [requests], FUSED
    cos_sin,  # [max_position, ROTARY_DIM] float32, FUSED
    q_norm,  # [HEAD_DIM], FUSED
    k_norm,  # [HEAD_DIM], FUSED
    slot_mapping,  # [requests], FUSED
    query_start_loc,  # [requests + 1], not FUSED
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    block_table,  # [requests, max_blocks]
    seq_lens,  # [requests]
    sinks,  # [NUM_HEADS]
    distance_bias,  # [NUM_HEADS, NUM_DISTANCES] float32
    out,  # [tokens, NUM_HEADS, HEAD_DIM]
    partial_out,  # [requests, NUM_KV_HEADS, num_splits, GROUP, HEAD_DIM] float32
    partial_lse,  # [requests, NUM_KV_HEADS, num_splits, 2, GROUP] float32: maximum, sum
    arrivals,  # [requests, NUM_KV_HEADS] int32, zero
    scale,
    k_scale,
    v_scale,
    eps,
    window,
    softcap,
    wanted_splits,
    min_tokens,
    max_tokens,
    row_stride,
    block_stride,
    kv_stride,
    token_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_DISTANCES: tl.constexpr,
    FUSED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRELOAD: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program attends to one split of one request's keys for one KV head. Grid (num_splits, NUM_KV_HEADS, requests).

    A request is cut into about wanted_splits parts of at least min_tokens and at most max_tokens (but never more parts than
    the grid has). PRELOAD reads the first tile before the wait, which pays where a program has little more than that.
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    num_splits = tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    COMPUTE: tl.constexpr = compute_dtype(q_rows.dtype.element_ty, kv_cache.dtype.element_ty)
    scale *= k_scale
    seq_len = tl.load(seq_lens + request)
    # Tokens read from the cache: all but the new one, which FUSED has in registers.
    if FUSED:
        num_cached = tl.maximum(seq_len - 1, 0)
        row = request.to(tl.int64)
    else:
        num_cached = seq_len
        row = tl.load(query_start_loc + request).to(tl.int64)
    if HAS_WINDOW:
        first_token = tl.maximum(seq_len - window, 0)
        first_tile = first_token // TILE * TILE
    else:
        first_token = 0
        first_tile = 0
    length = num_cached - first_tile
    per_split = tl.minimum(tl.maximum(tl.cdiv(length, wanted_splits), min_tokens), max_tokens)
    per_split = tl.cdiv(tl.maximum(per_split, tl.cdiv(length, num_splits)), TILE) * TILE
    used_splits = tl.maximum(tl.cdiv(length, per_split), 1)
    if not FUSED:
        # A request with none or several new tokens is not this kernel's.
        is_decode = tl.load(query_start_loc + request + 1).to(tl.int64) - row == 1
        used_splits = tl.where(is_decode, used_splits, 0)
        if PDL:
            # Even if no request is: completion must stay transitive along the chain.
            if split >= used_splits:
                gdc_wait()
    if split < used_splits:
        low = first_tile + split * per_split
        high = tl.minimum(low + per_split, num_cached)
        d = tl.arange(0, PADDED_DIM)
        in_dim = d < HEAD_DIM
        dv = value_dims(PADDED_DIM, kv_cache.dtype.element_ty == tl.float8e4nv)
        in_value = dv < HEAD_DIM
        t = tl.arange(0, TILE)
        g = tl.arange(0, ROWS)
        live = g < GROUP
        head = kv_head * GROUP + g
        table_row = block_table + request.to(tl.int64) * table_stride
        keys = kv_cache + kv_head * head_stride
        if PRELOAD:
            tok0 = low + t
            visible0 = (tok0 < high) & (tok0 >= first_token)
            off0 = token_offsets(table_row, tok0, visible0, block_stride, token_stride, BLOCK_SIZE)
            at0 = off0[:, None] + d[None, :]
            k0 = tl.load(keys + at0, mask=visible0[:, None] & in_dim[None, :], other=0.0)
            v0 = load_values(keys + kv_stride + off0[:, None], visible0[:, None], HEAD_DIM, PADDED_DIM, COMPUTE)
        if FUSED:
            slot = tl.load(slot_mapping + request).to(tl.int64)
            if ROTARY_DIM > 0:
                partner = rotation_partner(d, ROTARY_DIM, INTERLEAVED)
                position = tl.load(positions + request).to(tl.int64)
                c, s = rotation(cos_sin + position * ROTARY_DIM, d, ROTARY_DIM, INTERLEAVED)
            if HAS_Q_NORM:
                q_gamma = tl.load(q_norm + d, mask=in_dim, other=0.0).to(tl.float32)
                if ROTARY_DIM > 0:
                    q_gamma_partner = tl.load(q_norm + partner, mask=in_dim, other=0.0).to(tl.float32)
            if HAS_K_NORM:
                k_gamma = tl.load(k_norm + d, mask=in_dim, other=0.0).to(tl.float32)
                if ROTARY_DIM > 0:
                    k_gamma_partner = tl.load(k_norm + partner, mask=in_dim, other=0.0).to(tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        bias = head_bias(distance_bias, head, live, NUM_DISTANCES)
        if PDL:
            gdc_wait()

        base = q_rows + row * row_stride
        q_at = base + head[:, None] * HEAD_DIM
        in_q = live[:, None] & in_dim[None, :]
        q = tl.load(q_at + d[None, :], mask=in_q, other=0.0).to(tl.float32)
        if FUSED:
            if HAS_Q_NORM:
                q_rstd = tl.rsqrt(tl.sum(q * q, axis=1) / HEAD_DIM + eps)[:, None]
                q = q * q_rstd * q_gamma[None, :]
            if ROTARY_DIM > 0:
                q_partner = tl.load(q_at + partner[None, :], mask=in_q, other=0.0).to(tl.float32)
                if HAS_Q_NORM:
                    q_partner = q_partner * q_rstd * q_gamma_partner[None, :]
                q = q * c[None, :] + q_partner * s[None, :]
        q = q.to(COMPUTE)

        m = tl.full([ROWS], MINUS, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        if HAS_SINKS:
            if split == 0:
                m = sink * LOG2E
                total = total + 1.0
        if FUSED:
            if split == 0:
                # The new token: to the cache, and into the softmax as the first key.
                k_at = base + (NUM_HEADS + kv_head) * HEAD_DIM
                k_new = tl.load(k_at + d, mask=in_dim, other=0.0).to(tl.float32)
                if HAS_K_NORM:
                    k_rstd = tl.rsqrt(tl.sum(k_new * k_new, axis=0) / HEAD_DIM + eps)
                    k_new = k_new * k_rstd * k_gamma
                if ROTARY_DIM > 0:
                    k_partner = tl.load(k_at + partner, mask=in_dim, other=0.0).to(tl.float32)
                    if HAS_K_NORM:
                        k_partner = k_partner * k_rstd * k_gamma_partner
                    k_new = k_new * c + k_partner * s
                k_new = to_cached(k_new, 1.0 / k_scale, kv_cache.dtype.element_ty)
                v_new = tl.load(base + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dv, mask=in_value, other=0.0)
                v_new = to_cached(v_new, 1.0 / v_scale, kv_cache.dtype.element_ty)
                place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
                width = tl.where(slot >= 0, HEAD_DIM, 0)
                tl.store(keys + place + d, k_new, mask=d < width)
                tl.store(keys + kv_stride + place + dv, v_new, mask=dv < width)
                qk_new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1)[:, None]
                no_distance = tl.zeros([1, 1], tl.int32)
                s_new = scores_log2(qk_new, scale, softcap, bias, no_distance, HAS_SOFTCAP, NUM_DISTANCES)
                s_new = tl.sum(s_new, axis=1)
                m_new = tl.maximum(m, s_new)
                p_new = tl.exp2(s_new - m_new)
                total = total * tl.exp2(m - m_new) + p_new
                acc = acc + p_new[:, None] * v_new.to(tl.float32)[None, :]
                m = m_new
        start = low
        if PRELOAD:
            qk = tl.dot(q, k0.to(COMPUTE).T, input_precision="ieee")
            distance = (tok0 - (seq_len - 1))[None, :]
            scores = scores_log2(qk, scale, softcap, bias, distance, HAS_SOFTCAP, NUM_DISTANCES)
            acc, m, total = attend(acc, m, total, scores, visible0[None, :], v0)
            start = low + TILE
        for i in tl.range(start, high, TILE, num_stages=STAGES):
            tok = i + t
            visible = tok < high
            if HAS_WINDOW:
                visible = visible & (tok >= first_token)
            if BLOCK_SIZE % TILE == 0:
                # The tile lies in one block.
                block = tl.load(table_row + i // BLOCK_SIZE).to(tl.int64)
                off = block * block_stride + (i % BLOCK_SIZE + t) * token_stride
            else:
                off = token_offsets(table_row, tok, visible, block_stride, token_stride, BLOCK_SIZE)
            at = off[:, None] + d[None, :]
            k_tile = tl.load(keys + at, mask=visible[:, None] & in_dim[None, :], other=0.0)
            v_tile = load_values(keys + kv_stride + off[:, None], visible[:, None], HEAD_DIM, PADDED_DIM, COMPUTE)
            qk = tl.dot(q, k_tile.to(COMPUTE).T, input_precision="ieee")
            distance = (tok - (seq_len - 1))[None, :]
            scores = scores_log2(qk, scale, softcap, bias, distance, HAS_SOFTCAP, NUM_DISTANCES)
            acc, m, total = attend(acc, m, total, scores, visible[None, :], v_tile)

        out_at = out + row * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dv[None, :]
        in_out = live[:, None] & in_value[None, :]
        # A row of graph padding has no tokens: its result is zero whatever lies in the buffers.
        if used_splits == 1:
            y = tl.where(seq_len > 0, acc / total[:, None] * v_scale, 0.0)
            tl.store(out_at, y.to(out.dtype.element_ty), mask=in_out)
        else:
            pair = request * NUM_KV_HEADS + kv_head
            first = (pair * num_splits).to(tl.int64)
            part = first + split
            tl.store(partial_out + part * (GROUP * HEAD_DIM) + g[:, None] * HEAD_DIM + dv[None, :], acc, mask=in_out)
            tl.store(partial_lse + part * (2 * GROUP) + g, m, mask=live)
            tl.store(partial_lse + part * (2 * GROUP) + GROUP + g, total, mask=live)
            # All threads' partial results must be written before one thread announces them.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == used_splits - 1:
                gm = tl.arange(0, MERGE_ROWS)
                in_group = gm < GROUP
                m_all = tl.full([MERGE_ROWS], MINUS, tl.float32)
                l_all = tl.zeros([MERGE_ROWS], tl.float32)
                acc_all = tl.zeros([MERGE_ROWS, PADDED_DIM], tl.float32)
                for base_split in tl.range(0, used_splits, MERGE, num_stages=1):
                    si = base_split + tl.arange(0, MERGE)
                    has = (si < used_splits)[:, None] & in_group[None, :]
                    parts = first + si
                    lse_at = partial_lse + parts[:, None] * (2 * GROUP) + gm[None, :]
                    ms = tl.load(lse_at, mask=has, other=MINUS, cache_modifier=".cg")
                    ls = tl.load(lse_at + GROUP, mask=has, other=0.0, cache_modifier=".cg")
                    os = tl.load(
                        partial_out
                        + parts[:, None, None] * (GROUP * HEAD_DIM)
                        + gm[None, :, None] * HEAD_DIM
                        + d[None, None, :],
                        mask=has[:, :, None] & in_dim[None, None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    m_next = tl.maximum(m_all, tl.max(ms, axis=0))
                    weight = tl.exp2(ms - m_next[None, :])
                    shrink = tl.exp2(m_all - m_next)
                    l_all = l_all * shrink + tl.sum(weight * ls, axis=0)
                    acc_all = acc_all * shrink[:, None] + tl.sum(os * weight[:, :, None], axis=0)
                    m_all = m_next
                y = acc_all / l_all[:, None] * v_scale
                merged_at = out + row * (NUM_HEADS * HEAD_DIM) + (kv_head * GROUP + gm)[:, None] * HEAD_DIM + d[None, :]
                tl.store(merged_at, y.to(out.dtype.element_ty), mask=in_group[:, None] & in_dim[None, :])
                tl.store(arrivals + pair, 0)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode attention is cut up: keys a tile, pipeline depth, and the splits of a request (see the kernel)."""

    tile: int
    num_stages: int
    wanted_splits: int
    min_tokens: int
    max_tokens: int
    preload: bool = False
    num_warps: int = 4


# Long enough that cutting a long request among short ones costs nothing, short enough that it does not run alone at the end.
_LONG_SPLIT = 4096
_MAX_SPLITS = 32


def table_key(num_heads: int, num_kv_heads: int, head_dim: int, element_size: int) -> str:
    """Of the tuned table: the shape, and how many bits the cache keeps a number in where they are not 16."""
    bits = "" if element_size == 2 else f",{8 * element_size} bits"
    return f"{num_heads},{num_kv_heads},{head_dim}{bits}"


@functools.lru_cache(maxsize=1024)
def choose(num_requests: int, num_heads: int, num_kv_heads: int, padded_dim: int, element_size: int) -> DecodeConfig:
    """The cut for a batch; the tuned table's section "decode" maps `table_key` to choices by requests."""
    by_batch = tuned_table("decode").get(table_key(num_heads, num_kv_heads, padded_dim, element_size), {})
    for limit in sorted(by_batch, key=int):
        if num_requests <= int(limit):
            return DecodeConfig(**by_batch[limit])
    pairs = num_requests * num_kv_heads
    # A tile of 64 keys of 128 two-byte values is 16 kB; wider heads and elements get fewer keys and stages.
    wide = padded_dim * element_size > 256
    tile, num_stages = (16 if padded_dim * element_size > 1024 else 32, 2) if wide else (64, 3)
    wanted_splits = min(_MAX_SPLITS, max(1, 256 // pairs))
    if pairs <= 16:
        return DecodeConfig(tile, num_stages, wanted_splits, tile, _LONG_SPLIT, preload=True)
    if pairs <= 64 and not wide:
        return DecodeConfig(128, 2, wanted_splits, 128, _LONG_SPLIT)
    return DecodeConfig(tile, num_stages, wanted_splits, tile, _LONG_SPLIT)


forget_choices_with(choose.cache_clear)


def launch_decode(
    q_rows: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    num_heads: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    distance_bias: torch.Tensor | None,
    out: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    query_start_loc: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    config: DecodeConfig | None = None,
) -> None:
    """Fill `out` for every request that has one token; fused with the projection's tail when `slot_mapping` is given."""
    fused = slot_mapping is not None
    num_requests = seq_lens.shape[0]
    _, _, block_size, num_kv_heads, head_dim = kv_cache.shape
    padded_dim = max(16, next_power_of_2(head_dim))  # a matrix product takes no fewer
    if config is None:
        config = choose(num_requests, num_heads, num_kv_heads, padded_dim, kv_cache.element_size())
    bound = min(max_seq_len, window + config.tile) if window > 0 else max_seq_len
    # Room for the wanted splits of at least min_tokens, and for long requests in parts of max_tokens.
    num_splits = max(
        1,
        min(config.wanted_splits, triton.cdiv(bound, config.min_tokens)),
        min(_MAX_SPLITS, triton.cdiv(bound, config.max_tokens)),
    )
    group = num_heads // num_kv_heads
    partial_out = partial_lse = arrivals = out
    if num_splits > 1:
        pairs = num_requests * num_kv_heads
        partial_out = scratch("attention", pairs * num_splits * group * head_dim, out.device)
        partial_lse = scratch("attention_lse", pairs * num_splits * 2 * group, out.device)
        arrivals = counters(pairs, out.device)
    launch(
        _decode_kernel,
        (num_splits, num_kv_heads, num_requests),
        q_rows,
        seq_lens if positions is None else positions,
        q_rows if cos_sin is None else cos_sin,
        q_rows if q_norm is None else q_norm,
        q_rows if k_norm is None else k_norm,
        seq_lens if slot_mapping is None else slot_mapping,
        seq_lens if query_start_loc is None else query_start_loc,
        kv_cache,
        block_table,
        seq_lens,
        q_rows if sinks is None else sinks,
        q_rows if distance_bias is None else distance_bias,
        out,
        partial_out,
        partial_lse,
        arrivals,
        scale,
        k_scale,
        v_scale,
        eps,
        window,
        softcap,
        config.wanted_splits,
        config.min_tokens,
        config.max_tokens,
        q_rows.stride(0),
        *kv_cache.stride()[:4],
        block_table.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        # The matrix instruction has at least 16 rows.
        ROWS=max(16, next_power_of_2(group)),
        MERGE_ROWS=next_power_of_2(group),
        BLOCK_SIZE=block_size,
        ROTARY_DIM=0 if cos_sin is None else cos_sin.shape[-1],
        INTERLEAVED=interleaved,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        NUM_DISTANCES=num_distances(distance_bias),
        FUSED=fused,
        TILE=config.tile,
        STAGES=config.num_stages,
        PRELOAD=config.preload,
        # Partial results loaded at once: up to 8 Ki values, 64 registers a thread.
        MERGE=max(1, min(16, 8192 // (next_power_of_2(group) * padded_dim))),
        num_warps=config.num_warps,
    )


def _accepts(
    qkv,
    positions,
    cos_sin,
    kv_cache,
    slot_mapping,
    block_table,
    seq_lens,
    max_seq_len,
    num_heads,
    num_kv_heads,
    scale,
    q_norm=None,
    k_norm=None,
    eps=1e-6,
    interleaved=False,
    window=0,
    softcap=0.0,
    sinks=None,
    distance_bias=None,
    k_scale=1.0,
    v_scale=1.0,
) -> bool:
    return accepts_qkv(qkv, cos_sin, kv_cache, q_norm, k_norm) and block_table.stride(1) == 1


@decode_attention.register("triton", supported=has_triton, accepts=_accepts)
def decode_attention_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Head norms, rotation, cache write and attention in one kernel; `config` overrides the chosen cut."""
    out = torch.empty(qkv.shape[0], num_heads, kv_cache.shape[-1], dtype=qkv.dtype, device=qkv.device)
    launch_decode(
        qkv,
        kv_cache,
        block_table,
        seq_lens,
        max_seq_len,
        num_heads,
        scale,
        window,
        softcap,
        sinks,
        distance_bias,
        out,
        k_scale,
        v_scale,
        positions=positions,
        cos_sin=cos_sin,
        slot_mapping=slot_mapping,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        interleaved=interleaved,
        config=config,
    )
    return out
