"""Attention for ragged batches that mix prefill chunks and decodes: provider "triton" of `paged_attention`.

Chunks of several tokens are cut into query tiles that hold all query heads of one KV head (row = token * group + head), so a
tile's keys are read once for the group. Requests with a single token go to the split-KV kernel of `triton_decode`, which is
made for them; each kernel skips the other's rows.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.attention import paged_attention
from octavo.ops.attention.triton_decode import (
    LOG2E,
    MINUS,
    compute_dtype,
    head_bias,
    launch_decode,
    num_distances,
    scores_log2,
    token_offsets,
)
from octavo.ops.rope_triton import CACHE_DTYPES, FLOATS
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit
def _attend_tile(
    acc,
    m,
    total,
    q,
    bias,
    query_pos,
    first,
    high,
    seq_len,
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
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_DISTANCES: tl.constexpr,
):
    """Online softmax over the keys first … first + TILE; those from `high` on are not read. MASKED: some are not visible."""
    d = tl.arange(0, PADDED_DIM)
    tok = first + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        # The tile lies in one block.
        block = tl.load(table_row + first // BLOCK_SIZE).to(tl.int64)
        off = block * block_stride + (first % BLOCK_SIZE + tl.arange(0, TILE)) * token_stride
    else:
        off = token_offsets(table_row, tok, tok < high, block_stride, token_stride, BLOCK_SIZE)
    at = off[:, None] + d[None, :]
    if MASKED:
        readable = (tok < high)[:, None] & (d < HEAD_DIM)[None, :]
        k_tile = tl.load(keys + at, mask=readable, other=0.0)
        v_tile = tl.load(keys + kv_stride + at, mask=readable, other=0.0)
    elif HEAD_DIM == PADDED_DIM:
        k_tile = tl.load(keys + at)
        v_tile = tl.load(keys + kv_stride + at)
    else:
        k_tile = tl.load(keys + at, mask=(d < HEAD_DIM)[None, :], other=0.0)
        v_tile = tl.load(keys + kv_stride + at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    k_tile = k_tile.to(q.dtype)
    v_tile = v_tile.to(q.dtype)
    s = tl.dot(q, k_tile.T, input_precision="ieee")
    factor = scale * LOG2E
    if HAS_SOFTCAP or NUM_DISTANCES:
        distance = tok[None, :] - query_pos[:, None]
        s = scores_log2(s, scale, softcap, bias, distance, HAS_SOFTCAP, NUM_DISTANCES)
        factor = 1.0
    if MASKED:
        visible = (tok[None, :] <= query_pos[:, None]) & (tok < seq_len)[None, :]
        if HAS_WINDOW:
            visible = visible & (tok[None, :] > query_pos[:, None] - window)
        s = tl.where(visible, s * factor, MINUS)
        factor = 1.0
    # A row that has seen no visible key yet sums ones; its first visible key shrinks them to nothing. That takes an exact
    # MINUS - MINUS: with a factor to multiply in the same instruction, the difference is rounding error of 1e22.
    m_new = tl.maximum(m, tl.max(s, axis=1) * factor)
    shrink = tl.exp2(m - m_new)
    p = tl.exp2(s * factor - m_new[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(q.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
    return acc, m_new, total


@triton.jit(do_not_specialize=["num_requests", "window"])
def _prefill_kernel(
    q,  # [tokens, NUM_HEADS, HEAD_DIM], tokens q_stride apart
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    block_table,  # [requests, max_blocks]
    query_start_loc,  # [requests + 1]
    seq_lens,  # [requests]
    sinks,  # [NUM_HEADS]
    distance_bias,  # [NUM_HEADS, NUM_DISTANCES] float32
    out,  # [tokens, NUM_HEADS, HEAD_DIM]
    num_requests,
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
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_DISTANCES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program attends for ROWS / PADDED_GROUP tokens of one request and one KV head. Grid (query tiles, NUM_KV_HEADS).

    Request r's tiles start at query_start_loc[r] // TOKENS + r, which leaves room for a part-filled tile a request without
    any list made on the host; the surplus tiles have no tokens. Late tiles have the most keys and go first.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKENS: tl.constexpr = ROWS // PADDED_GROUP
    scale *= k_scale
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
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
    # A single token is the decode kernel's.
    if (query_len > 1) & (first_query < query_len):
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
        # Keys past the tile's last query are seen by nobody; those up to its first query by everybody, but for a window.
        high = tl.minimum(first_pos + TOKENS, seq_len)
        if HAS_WINDOW:
            low = tl.maximum(first_pos - window + 1, 0) // TILE * TILE
        else:
            low = (first_pos + 1) // TILE * TILE
            for i in tl.range(0, low, TILE, num_stages=STAGES):
                acc, m, total = _attend_tile(
                    acc, m, total, q_tile, bias, query_pos, i, high, seq_len, keys, table_row, scale, softcap, window,
                    block_stride, kv_stride, token_stride,
                    HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, False, HAS_WINDOW, HAS_SOFTCAP, NUM_DISTANCES,
                )  # fmt: skip
        for i in tl.range(low, high, TILE, num_stages=STAGES if HAS_WINDOW else 1):
            acc, m, total = _attend_tile(
                acc, m, total, q_tile, bias, query_pos, i, high, seq_len, keys, table_row, scale, softcap, window,
                block_stride, kv_stride, token_stride,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True, HAS_WINDOW, HAS_SOFTCAP, NUM_DISTANCES,
            )  # fmt: skip
        y = acc / total[:, None] * v_scale
        out_at = out + row[:, None] * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_at, y.to(out.dtype.element_ty), mask=inside)


def launch_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    distance_bias: torch.Tensor | None,
    out: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    shape: tuple[int, int, int, int] | None = None,
) -> None:
    """Fill `out` for every request with several tokens. `shape`: (rows, keys a tile, stages, warps)."""
    tokens, num_heads, head_dim = q.shape
    num_requests = seq_lens.shape[0]
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    padded_group = next_power_of_2(num_heads // num_kv_heads)
    padded_dim = max(16, next_power_of_2(head_dim))  # a matrix product takes no fewer
    if shape is None:
        if q.element_size() > 2:
            # float32 products run on the CUDA cores, operands in registers: larger tiles spill.
            shape = (16, 16, 2, 4)
        elif padded_dim > 256:
            # 64 kB of queries and two stages of 32 kB.
            shape = (64, 16, 2, 8)
        elif padded_dim > 128:
            shape = (64, 32, 2, 4)
        else:
            # 32 kB of queries and three stages of 32 kB; with 4 warps the accumulator would spill.
            shape = (128, 64, 3, 8)
    rows, tile, num_stages, num_warps = shape
    rows = max(rows, padded_group)
    launch(
        _prefill_kernel,
        (tokens // (rows // padded_group) + num_requests, num_kv_heads),
        q,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        q if sinks is None else sinks,
        q if distance_bias is None else distance_bias,
        out,
        num_requests,
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
        STAGES=num_stages,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        NUM_DISTANCES=num_distances(distance_bias),
        num_warps=num_warps,
    )


def accepts(q, kv_cache, block_table, *args, **kwargs) -> bool:
    """What the kernels of this file ask of a call."""
    return (
        runs_on_triton(q)
        and q.dtype in FLOATS
        and kv_cache.dtype in CACHE_DTYPES
        and q.shape[0] > 0
        and q[0].is_contiguous()
        and kv_cache.stride(4) == 1
        and block_table.stride(1) == 1
    )


@paged_attention.register("triton", supported=has_triton, accepts=accepts)
def paged_attention_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
    query_start_loc_cpu: list[int] | None = None,
    seq_lens_cpu: list[int] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """The query-tile kernel for chunks and the split-KV kernel for single tokens, each only where there may be such."""
    if query_start_loc_cpu is not None and query_start_loc_cpu[-1] == q.shape[0]:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        # Rows after the last request's, in a padded batch, belong to nobody; they must still be finite.
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    num_requests = seq_lens.shape[0]
    if max_query_len > 1:
        launch_prefill(
            q, kv_cache, block_table, query_start_loc, seq_lens, scale, window, softcap, sinks, distance_bias, out,
            k_scale, v_scale,
        )  # fmt: skip
        if query_start_loc_cpu is None:
            has_single = num_requests > 1
        else:
            has_single = any(
                query_start_loc_cpu[r + 1] - query_start_loc_cpu[r] == 1 for r in range(len(query_start_loc_cpu) - 1)
            )
    else:
        has_single = True
    if has_single:
        launch_decode(
            q.flatten(1),
            kv_cache,
            block_table,
            seq_lens,
            max_seq_len,
            q.shape[1],
            scale,
            window,
            softcap,
            sinks,
            distance_bias,
            out,
            k_scale,
            v_scale,
            query_start_loc=query_start_loc,
        )
    return out
