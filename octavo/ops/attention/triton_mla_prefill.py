"""Provider "triton" of `latent_attention` for steps with prompts in them.

A request's keys and values are computed from its latents once for all its new tokens, and then attended to as usual: for a
long chunk that is a third of the arithmetic of the absorbed form. They are computed for a window of so many tokens at a time
that a long context cannot exhaust the memory; where one window does not hold all, the running softmax is carried over.

    cached latents → gathered [window, rank + rope_dim] → keys | values [window, num_heads, nope_dim + value_dim] → attention

Requests with a few tokens behind a context are cheaper absorbed. The leading ones of a batch, where decodes stand, are
served so; any other is a short chunk.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.attention.mla import absorbed, latent_attention
from octavo.ops.attention.triton_decode import LOG2E, MINUS
from octavo.ops.attention.triton_mla import rows_follow
from octavo.ops.rope_triton import FLOATS
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2

# Tokens up to which a chunk is absorbed. Expanding one latent costs as much as attending to it absorbed for about 80 tokens.
_FEW = 32
# Tokens absorbed in all: queries and results are `rank` wide.
_MAX_ABSORBED = 4096
# Tokens expanded at a time, or as many as the step has if they are more, which is what the measured worst step does.
_WINDOW = 8192


@triton.jit(do_not_specialize=["num_requests", "window_start", "num_keys"])
def _gather_latents_kernel(
    cache,  # [num_blocks, BLOCK_SIZE, WIDTH], tokens ROW apart
    block_table,  # [requests, max_blocks]
    seq_lens,  # [requests]
    key_ends,  # [requests]: sums of seq_lens up to and with each
    out,  # [window, WIDTH]
    num_requests,
    window_start,
    num_keys,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program copies KEYS latents of the requests' latents laid end to end. Grid (cdiv(num_keys, KEYS),)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    live = place < num_keys
    key = window_start + place
    request = tl.zeros([KEYS], tl.int32)
    end = request + num_requests - 1
    span = num_requests
    while span > 1:
        middle = (request + end) // 2
        passed = tl.load(key_ends + middle) <= key
        request = tl.where(passed, tl.minimum(middle + 1, end), request)
        end = tl.where(passed, end, middle)
        span = (span + 1) // 2
    position = key - (tl.load(key_ends + request) - tl.load(seq_lens + request))
    entry = block_table + request.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=live, other=0).to(tl.int64)
    d = tl.arange(0, PADDED_WIDTH)[None, :]
    inside = live[:, None] & (d < WIDTH)
    row = (block * BLOCK_SIZE + position % BLOCK_SIZE) * ROW
    latents = tl.load(cache + row[:, None] + d, mask=inside)
    tl.store(out + place.to(tl.int64)[:, None] * WIDTH + d, latents, mask=inside)


@triton.jit
def _read(at, readable, d, DIM: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=readable & (d < DIM), other=0.0)
    elif d.shape[1] == DIM:
        return tl.load(at)
    else:
        return tl.load(at, mask=d < DIM, other=0.0)


@triton.jit
def _attend_keys(
    acc,
    m,
    total,
    q,
    q_rot,
    query_pos,
    first,
    high,
    keys,
    rotated,
    scale,
    kv_stride,
    latent_stride,
    NOPE_DIM: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys first … first + TILE; those from `high` on are not read. MASKED: some are not visible."""
    n = tl.arange(0, PADDED_NOPE)[None, :]
    d = tl.arange(0, PADDED_ROPE)[None, :]
    v = tl.arange(0, PADDED_VALUE)[None, :]
    step = tl.arange(0, TILE)
    token = first + step
    readable = (token < high)[:, None]
    keys += tl.cast(first, tl.int64) * kv_stride + step[:, None] * kv_stride
    rotated += tl.cast(first, tl.int64) * latent_stride + step[:, None] * latent_stride
    key = _read(keys + n, readable, n, NOPE_DIM, MASKED)
    key_rot = _read(rotated + d, readable, d, ROPE_DIM, MASKED)
    value = _read(keys + NOPE_DIM + v, readable, v, VALUE_DIM, MASKED)
    s = tl.dot(q, key.T, input_precision="ieee")
    s = tl.dot(q_rot, key_rot.T, s, input_precision="ieee") * (scale * LOG2E)
    if MASKED:
        s = tl.where((token[None, :] <= query_pos[:, None]) & (token < high)[None, :], s, MINUS)
    m_new = tl.maximum(m, tl.max(s, axis=1))
    shrink = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, m_new, total


@triton.jit(do_not_specialize=["num_requests", "window_start", "window_end", "sums_stride"])
def _latent_prefill_kernel(
    q_nope,  # [tokens, NUM_HEADS, NOPE_DIM], strides q_stride and q_head_stride
    q_rope,  # [tokens, NUM_HEADS, ROPE_DIM], strides rope_stride and rope_head_stride
    kv,  # [window, NUM_HEADS, NOPE_DIM + VALUE_DIM]
    latents,  # [window, rank + ROPE_DIM], moved on to the rotated keys
    query_start_loc,  # [requests + 1]
    seq_lens,  # [requests]
    key_ends,  # [requests]: sums of seq_lens up to and with each
    out,  # [tokens, NUM_HEADS, VALUE_DIM]
    carried,  # [tokens, NUM_HEADS, VALUE_DIM] float32, where there are several windows
    carried_sums,  # [2, tokens, NUM_HEADS] float32: maximum, sum; the same
    num_requests,
    window_start,
    window_end,
    scale,
    q_stride,
    q_head_stride,
    rope_stride,
    rope_head_stride,
    latent_stride,
    sums_stride,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program attends for ROWS tokens of one request and one head. Grid (query tiles, NUM_HEADS).

    Tiles are dealt to requests as in `triton_prefill`. The window holds keys window_start … window_end of the requests' keys
    laid end to end. A tile whose keys go on in the next one leaves there what it has.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    base = tl.load(query_start_loc)
    request = 0
    end = num_requests
    while end - request > 1:
        middle = (request + end) // 2
        before = (tl.load(query_start_loc + middle) - base) // ROWS + middle <= tile
        request = tl.where(before, middle, request)
        end = tl.where(before, end, middle)
    query_start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - query_start
    first_query = (tile - ((query_start - base) // ROWS + request)) * ROWS
    seq_len = tl.load(seq_lens + request)
    key_start = tl.load(key_ends + request) - seq_len
    first_pos = seq_len - query_len + first_query
    last = tl.minimum(first_pos + ROWS, seq_len)  # what comes from here on is seen by nobody
    low = tl.maximum(window_start - key_start, 0)
    high = tl.minimum(last, window_end - key_start)
    if (first_query < query_len) & (low < high):
        r = first_query + tl.arange(0, ROWS)
        live = (r < query_len)[:, None]
        n = tl.arange(0, PADDED_NOPE)[None, :]
        d = tl.arange(0, PADDED_ROPE)[None, :]
        v = tl.arange(0, PADDED_VALUE)[None, :]
        token = (query_start + r).to(tl.int64)
        at = token[:, None]
        q = tl.load(q_nope + at * q_stride + head * q_head_stride + n, mask=live & (n < NOPE_DIM), other=0.0)
        q_rot = tl.load(q_rope + at * rope_stride + head * rope_head_stride + d, mask=live & (d < ROPE_DIM), other=0.0)
        query_pos = seq_len - query_len + r
        here = (at * NUM_HEADS + head) * VALUE_DIM + v
        inside = live & (v < VALUE_DIM)
        sums = carried_sums + token * NUM_HEADS + head
        num_carried = tl.where(low > 0, query_len, 0)
        m = tl.load(sums, mask=r < num_carried, other=MINUS)
        total = tl.load(sums + sums_stride, mask=r < num_carried, other=0.0)
        acc = tl.load(carried + here, mask=(r < num_carried)[:, None] & (v < VALUE_DIM), other=0.0)
        KV: tl.constexpr = NOPE_DIM + VALUE_DIM
        offset = (key_start - window_start).to(tl.int64)
        keys = kv + offset * (NUM_HEADS * KV) + head * KV
        rotated = latents + offset * latent_stride
        # Keys up to the tile's first query are seen by all its rows.
        middle = low + tl.maximum(tl.minimum(first_pos + 1, high) - low, 0) // TILE * TILE
        for i in tl.range(low, middle, TILE, num_stages=STAGES):
            acc, m, total = _attend_keys(
                acc, m, total, q, q_rot, query_pos, i, high, keys, rotated, scale, NUM_HEADS * KV, latent_stride,
                NOPE_DIM, PADDED_NOPE, ROPE_DIM, PADDED_ROPE, VALUE_DIM, PADDED_VALUE, TILE, False,
            )  # fmt: skip
        for i in tl.range(middle, high, TILE, num_stages=1):
            acc, m, total = _attend_keys(
                acc, m, total, q, q_rot, query_pos, i, high, keys, rotated, scale, NUM_HEADS * KV, latent_stride,
                NOPE_DIM, PADDED_NOPE, ROPE_DIM, PADDED_ROPE, VALUE_DIM, PADDED_VALUE, TILE, True,
            )  # fmt: skip
        if high == last:
            y = acc / total[:, None]
            tl.store(out + here, y.to(out.dtype.element_ty), mask=inside)
        else:
            tl.store(sums, m, mask=r < query_len)
            tl.store(sums + sums_stride, total, mask=r < query_len)
            tl.store(carried + here, acc, mask=inside)


def launch_shape(element_size: int) -> tuple[int, int, int, int]:
    """(queries and keys a tile, stages, warps)."""
    if element_size > 2:
        # float32 products run on the CUDA cores, operands in registers: larger tiles spill.
        return 16, 16, 2, 4
    # 48 kB of queries and three stages of 40 kB.
    return 128, 64, 3, 8


def attend_expanded(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    num_keys: int,
    tokens: int,
    window: int,
    *,
    shape: tuple[int, int, int, int] | None = None,
) -> None:
    """Fill `out` for requests that have `tokens` new tokens and `num_keys` tokens in the cache between them.

    query_start_loc may begin within q and out. `window`: keys expanded at a time; `shape`: as `launch_shape` gives it.
    """
    num_heads, nope_dim, rope_dim, value_dim = up.shape[0], q_nope.shape[2], q_rope.shape[2], out.shape[2]
    num_requests, rank, width = seq_lens.shape[0], up.shape[2], cache.shape[2]
    rows, tile, num_stages, num_warps = shape or launch_shape(q_nope.element_size())
    key_ends = seq_lens.cumsum(0, dtype=torch.int32)
    latents = cache.new_empty(window, width)
    kv = cache.new_empty(window, num_heads * (nope_dim + value_dim))
    # Nothing is carried where one window holds all.
    carried_tokens = 0 if num_keys <= window else out.shape[0]
    carried = torch.empty(carried_tokens, *out.shape[1:], dtype=torch.float32, device=out.device)
    sums = torch.empty(2, carried_tokens, num_heads, dtype=torch.float32, device=out.device)
    for start in range(0, num_keys, window):
        end = min(start + window, num_keys)
        keys_a_program = 4
        launch(
            _gather_latents_kernel,
            (triton.cdiv(end - start, keys_a_program),),
            cache,
            block_table,
            seq_lens,
            key_ends,
            latents,
            num_requests,
            start,
            end - start,
            block_table.stride(0),
            BLOCK_SIZE=cache.shape[1],
            ROW=cache.stride(1),
            WIDTH=width,
            PADDED_WIDTH=next_power_of_2(width),
            KEYS=keys_a_program,
        )
        torch.mm(latents[: end - start, :rank], up.flatten(0, 1).t(), out=kv[: end - start])
        launch(
            _latent_prefill_kernel,
            (tokens // rows + num_requests, num_heads),
            q_nope,
            q_rope,
            kv,
            latents[:, rank:],
            query_start_loc,
            seq_lens,
            key_ends,
            out,
            carried,
            sums,
            num_requests,
            start,
            end,
            scale,
            q_nope.stride(0),
            q_nope.stride(1),
            q_rope.stride(0),
            q_rope.stride(1),
            width,
            sums.stride(0),
            NUM_HEADS=num_heads,
            NOPE_DIM=nope_dim,
            PADDED_NOPE=max(16, next_power_of_2(nope_dim)),
            ROPE_DIM=rope_dim,
            PADDED_ROPE=max(16, next_power_of_2(rope_dim)),
            VALUE_DIM=value_dim,
            PADDED_VALUE=max(16, next_power_of_2(value_dim)),
            ROWS=rows,
            TILE=tile,
            STAGES=num_stages,
            num_warps=num_warps,
        )


def num_absorbed(starts: list[int], lens: list[int]) -> int:
    """How many leading requests are cheaper absorbed."""
    for request, ((start, end), seq_len) in enumerate(zip(pairwise(starts), lens, strict=True)):
        if end - start > _FEW or end - start == seq_len > 1 or end > _MAX_ABSORBED:
            return request
    return len(lens)


def _accepts(
    q_nope,
    q_rope,
    up,
    cache,
    block_table,
    query_start_loc,
    seq_lens,
    max_query_len,
    max_seq_len,
    scale,
    query_start_loc_cpu=None,
    seq_lens_cpu=None,
) -> bool:
    return (
        query_start_loc_cpu is not None
        and query_start_loc_cpu[-1] == q_nope.shape[0]
        and seq_lens_cpu is not None
        and runs_on_triton(q_nope)
        and q_nope.dtype in FLOATS
        and q_nope.dtype == q_rope.dtype == up.dtype == cache.dtype
        and q_nope.stride(2) == 1
        and q_rope.stride(2) == 1
        and up.is_contiguous()
        and rows_follow(cache)
        and block_table.stride(1) == 1
    )


@latent_attention.register("triton", supported=has_triton, accepts=_accepts)
def latent_attention_triton(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    query_start_loc_cpu: list[int],
    seq_lens_cpu: list[int],
) -> torch.Tensor:
    """Leading short requests absorbed, the others expanded."""
    starts, lens = query_start_loc_cpu, seq_lens_cpu
    tokens, num_heads, nope_dim = q_nope.shape
    out = q_nope.new_empty(tokens, num_heads, up.shape[1] - nope_dim)
    first = num_absorbed(starts, lens)
    done = starts[first]
    if done:
        out[:done] = absorbed(
            q_nope[:done], q_rope[:done], up, cache, block_table[:first], seq_lens[:first], max_seq_len, scale,
            query_start_loc[: first + 1],
        )  # fmt: skip
    if first < len(lens):
        attend_expanded(
            q_nope, q_rope, up, cache, block_table[first:], query_start_loc[first:], seq_lens[first:], scale, out,
            sum(lens[first:]), tokens - done, max(_WINDOW, tokens),
        )  # fmt: skip
    return out
