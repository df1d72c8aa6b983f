"""Provider "triton_invariant" of both attention operators: a token's result depends, in every bit, on the token alone.

That is, on its position and what it sees; not on other requests, nor on whether it came as a decode, in a chunk of any size or
as a prompt. Two things see to it:

* the keys are cut at multiples of SPAN, counted from the sequence's start. Each span is attended to from scratch, in tiles of
  equal size; the results are merged in the order of the spans, by the same operations whether one program does it all or
  several programs leave their spans to the last of them;
* one shape of tile serves single tokens and chunks: rows of a tile that belong to nobody are computed for nothing.

Spans and tiles of which a token sees nothing leave its result as it was: their weight is an exact zero.
"""

import itertools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.attention import decode_attention, paged_attention
from octavo.ops.attention.triton_decode import (
    LOG2E,
    MINUS,
    compute_dtype,
    head_bias,
    num_distances,
    scores_log2,
    token_offsets,
)
from octavo.ops.attention.triton_prefill import accepts as _accepts_paged
from octavo.ops.rope import qkv_rope_write
from octavo.ops.triton_support import has_triton
from octavo.ops.triton_utils import counters, launch, next_power_of_2, scratch

SPAN = 256
_MAX_PARTIAL_BYTES = 1 << 28


@triton.jit
def _merge(acc, m, total, span_acc, span_m, span_total):
    """Add a span to the running (acc [rows, dim], maximum, sum [rows]); spelt out, so that every compilation rounds alike."""
    m_new = tl.maximum(m, span_m)
    old, new = tl.exp2(m - m_new), tl.exp2(span_m - m_new)
    total = tl.fma(span_total, new, total * old)
    acc = tl.fma(span_acc, new[:, None] + tl.zeros_like(span_acc), acc * old[:, None])
    return acc, m_new, total


@triton.jit
def _attend_span(
    q,  # [ROWS, PADDED_DIM]
    bias,  # [ROWS]
    query_pos,  # [ROWS]
    low,
    high,
    keys,
    table_row,
    scale,
    softcap,
    window,
    block_stride,
    kv_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_DISTANCES: tl.constexpr,
):
    """Online softmax from scratch over the keys low … high."""
    d = tl.arange(0, PADDED_DIM)
    m = tl.full([q.shape[0]], MINUS, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], PADDED_DIM], tl.float32)
    for first in tl.range(low, high, TILE, num_stages=STAGES):
        tok = first + tl.arange(0, TILE)
        readable = tok < high
        off = token_offsets(table_row, tok, readable, block_stride, token_stride, BLOCK_SIZE)
        at = off[:, None] + d[None, :]
        mask = readable[:, None] & (d < HEAD_DIM)[None, :]
        k_tile = tl.load(keys + at, mask=mask, other=0.0).to(q.dtype)
        v_tile = tl.load(keys + kv_stride + at, mask=mask, other=0.0).to(q.dtype)
        s = tl.dot(q, k_tile.T, input_precision="ieee")
        distance = tok[None, :] - query_pos[:, None]
        s = scores_log2(s, scale, softcap, bias, distance, HAS_SOFTCAP, NUM_DISTANCES)
        visible = (distance <= 0) & readable[None, :]
        if HAS_WINDOW:
            visible = visible & (distance > -window)
        # A row that has seen no key yet keeps a maximum of MINUS and sums up zeros.
        s = tl.where(visible, s, MINUS)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.where(visible, tl.exp2(s - m_new[:, None]), 0.0)
        shrink = tl.exp2(m - m_new)
        total = tl.fma(total, shrink, tl.sum(p, axis=1))
        acc = tl.dot(p.to(q.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=["num_requests", "window"])
def _attention_kernel(
    q,  # [tokens, NUM_HEADS, HEAD_DIM], tokens q_stride apart
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    block_table,  # [requests, max_blocks]
    query_start_loc,  # [requests + 1]; not read when EACH_ONE
    seq_lens,  # [requests]
    sinks,  # [NUM_HEADS]
    distance_bias,  # [NUM_HEADS, NUM_DISTANCES] float32
    out,  # [tokens, NUM_HEADS, HEAD_DIM]
    partial_out,  # [requests, NUM_KV_HEADS, spans, GROUP, HEAD_DIM] float32
    partial_stats,  # [requests, NUM_KV_HEADS, spans, 2, GROUP] float32: maximum, sum
    arrivals,  # [requests, NUM_KV_HEADS] int32, zero
    num_requests,
    max_spans,
    scale,
    k_scale,
    v_scale,
    window,
    softcap,
    q_stride,
    block_stride,
    kv_stride,
    token_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_DISTANCES: tl.constexpr,
    SINGLE: tl.constexpr,
    EACH_ONE: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program attends for ROWS / PADDED_GROUP tokens of one request and one KV head.

    SINGLE: requests with one token, grid (requests, NUM_KV_HEADS, programs that share a request's spans if SHARED); EACH_ONE:
    all requests have one. Otherwise requests with more, grid (query tiles, NUM_KV_HEADS, 1), laid out as in `triton_prefill`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKENS: tl.constexpr = ROWS // PADDED_GROUP
    kv_head = tl.program_id(1)
    scale *= k_scale
    if SINGLE:
        request = tl.program_id(0)
        first_query = 0
        if EACH_ONE:
            query_start = request
            query_len = 1
        else:
            query_start = tl.load(query_start_loc + request)
            query_len = tl.load(query_start_loc + request + 1) - query_start
        is_mine = query_len == 1
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        request = 0
        end = num_requests
        while end - request > 1:
            middle = (request + end) // 2
            before = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
            request = tl.where(before, middle, request)
            end = tl.where(before, end, middle)
        query_start = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - query_start
        first_query = (tile - (query_start // TOKENS + request)) * TOKENS
        is_mine = (query_len > 1) & (first_query < query_len)
    if is_mine:
        seq_len = tl.load(seq_lens + request)
        r = tl.arange(0, ROWS)
        token = first_query + r // PADDED_GROUP
        g = r % PADDED_GROUP
        head = kv_head * GROUP + g
        live = (token < query_len) & (g < GROUP)
        d = tl.arange(0, PADDED_DIM)
        inside = live[:, None] & (d < HEAD_DIM)[None, :]
        row = (query_start + token).to(tl.int64)
        q_tile = tl.load(q + row[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
        q_tile = q_tile.to(compute_dtype(q.dtype.element_ty, kv_cache.dtype.element_ty))
        first_pos = seq_len - query_len + first_query
        query_pos = seq_len - query_len + token
        bias = head_bias(distance_bias, head, live, NUM_DISTANCES)
        m = tl.full([ROWS], MINUS, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            m = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
        acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        table_row = block_table + tl.cast(request, tl.int64) * table_stride
        keys = kv_cache + kv_head * head_stride
        high = tl.minimum(first_pos + TOKENS, seq_len)
        first_span = 0
        if HAS_WINDOW:
            first_span = tl.maximum(first_pos - window + 1, 0) // SPAN
        end_span = tl.cdiv(high, SPAN)
        out_at = out + row[:, None] * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
        if SHARED:
            pair = request * NUM_KV_HEADS + kv_head
            stat = live & (token == 0)
            mine = first_span + tl.program_id(2)
            for span in tl.range(mine, end_span, tl.num_programs(2), num_stages=1):
                span_acc, span_m, span_total = _attend_span(
                    q_tile, bias, query_pos, span * SPAN, tl.minimum((span + 1) * SPAN, high), keys, table_row, scale,
                    softcap, window, block_stride, kv_stride, token_stride,
                    HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, STAGES, HAS_WINDOW, HAS_SOFTCAP, NUM_DISTANCES,
                )  # fmt: skip
                part = pair.to(tl.int64) * max_spans + span - first_span
                part_at = partial_out + part * (GROUP * HEAD_DIM) + g[:, None] * HEAD_DIM + d[None, :]
                tl.store(part_at, span_acc, mask=inside)
                tl.store(partial_stats + part * (2 * GROUP) + g, span_m, mask=stat)
                tl.store(partial_stats + part * (2 * GROUP) + GROUP + g, span_total, mask=stat)
            # All threads' partial results must be written before one thread announces them.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == tl.num_programs(2) - 1:
                for span in tl.range(first_span, end_span, num_stages=1):
                    part = pair.to(tl.int64) * max_spans + span - first_span
                    part_at = partial_out + part * (GROUP * HEAD_DIM) + g[:, None] * HEAD_DIM + d[None, :]
                    stats_at = partial_stats + part * (2 * GROUP) + g
                    span_acc = tl.load(part_at, mask=inside, other=0.0, cache_modifier=".cg")
                    span_m = tl.load(stats_at, mask=stat, other=0.0, cache_modifier=".cg")
                    span_total = tl.load(stats_at + GROUP, mask=stat, other=0.0, cache_modifier=".cg")
                    acc, m, total = _merge(acc, m, total, span_acc, span_m, span_total)
                y = tl.where(seq_len > 0, acc / total[:, None] * v_scale, 0.0)
                tl.store(out_at, y.to(out.dtype.element_ty), mask=inside)
                tl.store(arrivals + pair, 0)
        else:
            for span in tl.range(first_span, end_span, num_stages=1):
                span_acc, span_m, span_total = _attend_span(
                    q_tile, bias, query_pos, span * SPAN, tl.minimum((span + 1) * SPAN, high), keys, table_row, scale,
                    softcap, window, block_stride, kv_stride, token_stride,
                    HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, STAGES, HAS_WINDOW, HAS_SOFTCAP, NUM_DISTANCES,
                )  # fmt: skip
                acc, m, total = _merge(acc, m, total, span_acc, span_m, span_total)
            y = tl.where(seq_len > 0, acc / total[:, None] * v_scale, 0.0)
            tl.store(out_at, y.to(out.dtype.element_ty), mask=inside)


def _shape(q: torch.Tensor, padded_group: int, padded_dim: int) -> tuple[int, int, int, int]:
    """(rows, keys a tile, stages, warps): one for all calls of a model, since it is part of what fixes the bits."""
    if q.element_size() > 2:
        # float32 products run on the CUDA cores, operands in registers: larger tiles spill.
        rows, tile, stages, warps = 16, 16, 2, 4
    elif padded_dim > 128:
        rows, tile, stages, warps = 64, 16 if padded_dim > 256 else 32, 2, 8
    else:
        # 64 rows are what the matrix instruction of a warp group takes.
        rows, tile, stages, warps = 64, 64, 3, 4
    return max(rows, padded_group), tile, stages, warps


def launch_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    distance_bias: torch.Tensor | None,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
    *,
    single: bool,
    programs: int | None = None,
) -> None:
    """Fill `out` for the requests with a single token, or for those with more.

    Without `query_start_loc` every request has one. `programs` share the spans of a request with one; it changes no bit.
    """
    tokens, num_heads, head_dim = q.shape
    num_requests = seq_lens.shape[0]
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    padded_group = next_power_of_2(group)
    padded_dim = max(16, next_power_of_2(head_dim))  # a matrix product takes no fewer
    rows, tile, num_stages, num_warps = _shape(q, padded_group, padded_dim)
    pairs = num_requests * num_kv_heads
    max_spans = triton.cdiv(min(max_seq_len, window + SPAN) if window > 0 else max_seq_len, SPAN) + (window > 0)
    if programs is None:
        # About four programs a multiprocessor, as long as what they leave to the last of them stays small.
        programs = max(1, min(max_spans, 512 // pairs))
        if pairs * max_spans * group * head_dim * 4 > _MAX_PARTIAL_BYTES:
            programs = 1
    shared = single and programs > 1
    partial_out = partial_stats = arrivals = out
    if shared:
        partial_out = scratch("attention_spans", pairs * max_spans * group * head_dim, out.device)
        partial_stats = scratch("attention_span_stats", pairs * max_spans * 2 * group, out.device)
        arrivals = counters(pairs, out.device)
    first = num_requests if single else tokens // (rows // padded_group) + num_requests
    launch(
        _attention_kernel,
        (first, num_kv_heads, programs if shared else 1),
        q,
        kv_cache,
        block_table,
        seq_lens if query_start_loc is None else query_start_loc,
        seq_lens,
        q if sinks is None else sinks,
        q if distance_bias is None else distance_bias,
        out,
        partial_out,
        partial_stats,
        arrivals,
        num_requests,
        max_spans,
        scale,
        k_scale,
        v_scale,
        window,
        softcap,
        q.stride(0),
        *kv_cache.stride()[:4],
        block_table.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        PADDED_GROUP=padded_group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        TILE=tile,
        SPAN=SPAN,
        STAGES=num_stages,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        NUM_DISTANCES=num_distances(distance_bias),
        SINGLE=single,
        EACH_ONE=query_start_loc is None,
        SHARED=shared,
        num_warps=num_warps,
    )


@paged_attention.register("triton_invariant", supported=has_triton, accepts=_accepts_paged, by_name_only=True)
def paged_attention_triton_invariant(
    q, kv_cache, block_table, query_start_loc, seq_lens, max_query_len, max_seq_len, scale, window=0, softcap=0.0,
    sinks=None, distance_bias=None, query_start_loc_cpu=None, seq_lens_cpu=None, k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    """A launch for requests with several tokens and one for those with a single one, each only where there may be such."""
    # Rows after the last request's, in a padded batch, belong to nobody; they must still be finite.
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lens = None if query_start_loc_cpu is None else [b - a for a, b in itertools.pairwise(query_start_loc_cpu)]
    for single in (False, True):
        if max_query_len == 1 and not single:
            continue
        if lens is None or any((n == 1) == single for n in lens if n):
            launch_attention(
                q, kv_cache, block_table, query_start_loc, seq_lens, max_seq_len, scale, window, softcap, sinks,
                distance_bias, out, k_scale, v_scale, single=single,
            )  # fmt: skip
    return out


@decode_attention.register("triton_invariant", supported=has_triton, by_name_only=True)
def decode_attention_triton_invariant(
    qkv, positions, cos_sin, kv_cache, slot_mapping, block_table, seq_lens, max_seq_len, num_heads, num_kv_heads, scale,
    q_norm=None, k_norm=None, eps=1e-6, interleaved=False, window=0, softcap=0.0, sinks=None, distance_bias=None,
    k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    """The two operators one after the other."""
    q = qkv_rope_write(
        qkv, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, q_norm, k_norm, eps, interleaved,
        k_scale, v_scale,
    )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_attention(
        q, kv_cache, block_table, None, seq_lens, max_seq_len, scale, window, softcap, sinks, distance_bias, out,
        k_scale, v_scale, single=True,
    )  # fmt: skip
    return out
