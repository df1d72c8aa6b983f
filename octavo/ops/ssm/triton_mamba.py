"""Providers "triton" of Mamba's scan and of its dual form. A program owns the state of its channels or head."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.ssm.mamba import selective_scan, state_space_dual
from octavo.ops.triton_device import apply_gate, softplus
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit
def _then(decay, drive, next_decay, next_drive):
    """h → decay h + drive, and after it the next."""
    return decay * next_decay, drive * next_decay + next_drive


@triton.jit
def _scan_kernel(
    x,  # [tokens, channels], as dt and gate
    dt,
    b,  # [tokens, SIZE], as c
    c,
    gate,
    a_log,  # [channels, SIZE]
    d,  # [channels], as dt_bias
    dt_bias,
    states,  # [rows, channels, SIZE]
    rows,  # [requests]
    query_start_loc,  # [requests + 1]
    seq_lens,  # [requests]
    out,  # [tokens, channels]
    channels,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program scans one request in BLOCK channels, TOKENS at a time. Grid (requests, cdiv(channels, BLOCK))."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0)
    ch = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, PADDED)
    inside, inside_n = ch < channels, n < SIZE
    inside_state = inside[:, None] & inside_n[None, :]
    start = tl.load(query_start_loc + request).to(tl.int64)
    query_len = tl.load(query_start_loc + request + 1) - start
    # A request that begins in this step has no state yet.
    kept_size = tl.where(tl.load(seq_lens + request) > query_len, SIZE, 0)
    at = ch[:, None] * SIZE + n[None, :]
    a = -tl.exp(tl.load(a_log + at, mask=inside_state, other=0.0))
    skip = tl.load(d + ch, mask=inside, other=0.0)
    bias = tl.load(dt_bias + ch, mask=inside, other=0.0)
    state = states + tl.load(rows + request).to(tl.int64) * channels * SIZE + at
    h = tl.load(state, mask=inside_state & (n < kept_size)[None, :], other=0.0)
    i = tl.arange(0, TOKENS)
    for first in range(0, query_len, TOKENS):
        live = first + i < query_len
        t = (start + first + i)[:, None]
        here = live[:, None] & inside[None, :]
        here_n = live[:, None] & inside_n[None, :]
        x_tile = tl.load(x + t * x_stride + ch[None, :], mask=here, other=0.0).to(tl.float32)
        dt_tile = tl.load(dt + t * dt_stride + ch[None, :], mask=here, other=0.0).to(tl.float32)
        dt_tile = tl.where(live[:, None], softplus(dt_tile + bias[None, :]), 0.0)
        b_tile = tl.load(b + t * b_stride + n[None, :], mask=here_n, other=0.0).to(tl.float32)
        c_tile = tl.load(c + t * c_stride + n[None, :], mask=here_n, other=0.0).to(tl.float32)
        decay = tl.exp(dt_tile[:, :, None] * a[None, :, :])
        drive = (dt_tile * x_tile)[:, :, None] * b_tile[:, None, :]
        if TOKENS > 1:
            decay, drive = tl.associative_scan((decay, drive), 0, _then)
        reached = decay * h[None, :, :] + drive
        y = tl.sum(reached * c_tile[:, None, :], axis=2) + skip[None, :] * x_tile
        h = tl.sum(tl.where((i == TOKENS - 1)[:, None, None], reached, 0.0), axis=0)
        gate_tile = tl.load(gate + t * gate_stride + ch[None, :], mask=here, other=0.0).to(tl.float32)
        y = y * apply_gate(gate_tile, "silu")
        tl.store(out + t * channels + ch[None, :], y.to(out.dtype.element_ty), mask=here)
    tl.store(state, h, mask=inside_state)


def rows_are_dense(*tensors: torch.Tensor) -> bool:
    """Whether every tensor's last dimension lies together."""
    return all(t.stride(-1) == 1 for t in tensors)


def _accepts_scan(x, dt, b, c, gate, a_log, d, dt_bias, states, requests) -> bool:
    kept = (a_log, d, dt_bias, states)
    return (
        runs_on_triton(x)
        and x.shape[0] > 0
        and rows_are_dense(x, dt, b, c, gate)
        and all(t.is_contiguous() and t.dtype == torch.float32 for t in kept)
    )


@selective_scan.register("triton", supported=has_triton, accepts=_accepts_scan)
def _selective_scan_triton(x, dt, b, c, gate, a_log, d, dt_bias, states, requests):
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    size = a_log.shape[1]
    padded = next_power_of_2(size)
    # 64 states a thread of 4 warps at most: a tile of tokens of few channels, or one token of many.
    tile = 1 if requests.max_query_len == 1 else 16
    block = max(1, min(next_power_of_2(channels), (2048 if tile == 1 else 4096) // (tile * padded)))
    launch(
        _scan_kernel, (requests.rows.shape[0], triton.cdiv(channels, block)),
        x, dt, b, c, gate, a_log, d, dt_bias, states, requests.rows, requests.query_start_loc, requests.seq_lens, out,
        channels, *(t.stride(0) for t in (x, dt, b, c, gate)), SIZE=size, PADDED=padded, TOKENS=tile, BLOCK=block,
    )  # fmt: skip
    return out


@triton.jit
def _dual_kernel(
    xbc,  # [tokens, HEADS * HEAD_DIM + 2 * GROUPS * SIZE], tokens x_stride apart
    dt,  # [tokens, HEADS], tokens dt_stride apart
    a_log,  # [HEADS], as d and dt_bias
    d,
    dt_bias,
    states,  # [rows, HEADS, HEAD_DIM, SIZE]
    rows,  # [requests]
    query_start_loc,  # [requests + 1]
    seq_lens,  # [requests]
    out,  # [tokens, HEADS, HEAD_DIM]
    dt_low,
    dt_high,
    x_stride,
    dt_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK elements of one head of one request, TOKENS at a time; their state stays in registers.

    Grid (requests, HEADS, cdiv(HEAD_DIM, BLOCK)).
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, PADDED)
    inside_p, inside_n = p < HEAD_DIM, n < SIZE
    inside_state = inside_p[:, None] & inside_n[None, :]
    start = tl.load(query_start_loc + request).to(tl.int64)
    query_len = tl.load(query_start_loc + request + 1) - start
    # A request that begins in this step has no state yet.
    kept_size = tl.where(tl.load(seq_lens + request) > query_len, SIZE, 0)
    a = -tl.exp(tl.load(a_log + head))
    skip, bias = tl.load(d + head), tl.load(dt_bias + head)
    row = tl.load(rows + request).to(tl.int64)
    state = states + ((row * HEADS + head) * HEAD_DIM + p[:, None]) * SIZE + n[None, :]
    h = tl.load(state, mask=inside_state & (n < kept_size)[None, :], other=0.0)
    b_at = HEADS * HEAD_DIM + head // (HEADS // GROUPS) * SIZE
    c_at = b_at + GROUPS * SIZE
    if TOKENS == 1:
        if query_len > 0:
            token = xbc + start * x_stride
            x = tl.load(token + head * HEAD_DIM + p, mask=inside_p, other=0.0).to(tl.float32)
            b = tl.load(token + b_at + n, mask=inside_n, other=0.0).to(tl.float32)
            c = tl.load(token + c_at + n, mask=inside_n, other=0.0).to(tl.float32)
            step = softplus(tl.load(dt + start * dt_stride + head).to(tl.float32) + bias)
            step = tl.minimum(tl.maximum(step, dt_low), dt_high)
            h = h * tl.exp(step * a) + (step * x)[:, None] * b[None, :]
            y = tl.sum(h * c[None, :], axis=1) + skip * x
            tl.store(out + (start * HEADS + head) * HEAD_DIM + p, y.to(out.dtype.element_ty), mask=inside_p)
    else:
        i = tl.arange(0, TOKENS)
        for first in range(0, query_len, TOKENS):
            live = first + i < query_len
            t = start + first + i
            token = xbc + t[:, None] * x_stride
            here, here_n = live[:, None] & inside_p[None, :], live[:, None] & inside_n[None, :]
            x = tl.load(token + head * HEAD_DIM + p[None, :], mask=here, other=0.0).to(tl.float32)
            b = tl.load(token + b_at + n[None, :], mask=here_n, other=0.0).to(tl.float32)
            c = tl.load(token + c_at + n[None, :], mask=here_n, other=0.0).to(tl.float32)
            step = softplus(tl.load(dt + t * dt_stride + head, mask=live, other=0.0).to(tl.float32) + bias)
            step = tl.where(live, tl.minimum(tl.maximum(step, dt_low), dt_high), 0.0)
            log_decay = tl.cumsum(step * a, axis=0)
            total = tl.sum(step * a, axis=0)
            between = tl.where(i[:, None] >= i[None, :], log_decay[:, None] - log_decay[None, :], float("-inf"))
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * tl.exp(between) * step[None, :]
            y = tl.dot(c, tl.trans(h), input_precision=PRECISION) * tl.exp(log_decay)[:, None]
            y = tl.dot(scores, x, y, input_precision=PRECISION) + skip * x
            left = step * tl.exp(total - log_decay)
            h = tl.dot(tl.trans(x * left[:, None]), b, h * tl.exp(total), input_precision=PRECISION)
            at = (t[:, None] * HEADS + head) * HEAD_DIM + p[None, :]
            tl.store(out + at, y.to(out.dtype.element_ty), mask=here)
    tl.store(state, h, mask=inside_state)


def _accepts_dual(xbc, dt, a_log, d, dt_bias, states, requests, dt_limit) -> bool:
    kept = (a_log, d, dt_bias, states)
    return (
        runs_on_triton(xbc)
        and xbc.shape[0] > 0
        and rows_are_dense(xbc, dt)
        and states.shape[3] <= 256
        and all(t.is_contiguous() and t.dtype == torch.float32 for t in kept)
    )


@state_space_dual.register("triton", supported=has_triton, accepts=_accepts_dual)
def _state_space_dual_triton(xbc, dt, a_log, d, dt_bias, states, requests, dt_limit):
    _, heads, head_dim, size = states.shape
    tokens, width = xbc.shape
    out = torch.empty(tokens, heads * head_dim, dtype=xbc.dtype, device=xbc.device)
    padded = max(16, next_power_of_2(size))
    # 16 state elements a thread of 4 warps for a token, 32 of 8 for a prompt, whose tiles are what a thread has registers for.
    tile, elements = (1, 2048) if requests.max_query_len == 1 else (16 if padded > 128 else 32, 8192)
    block = max(16, min(next_power_of_2(head_dim), elements // padded))
    launch(
        _dual_kernel, (requests.rows.shape[0], heads, triton.cdiv(head_dim, block)),
        xbc, dt, a_log, d, dt_bias, states, requests.rows, requests.query_start_loc, requests.seq_lens, out, *dt_limit,
        xbc.stride(0), dt.stride(0), HEADS=heads, HEAD_DIM=head_dim, GROUPS=(width - heads * head_dim) // (2 * size),
        SIZE=size, PADDED=padded, BLOCK=block, TOKENS=tile, PRECISION=precision(xbc.dtype),
        num_warps=4 if tile == 1 else 8,
    )  # fmt: skip
    return out


def precision(dtype: torch.dtype) -> str:
    """Of products whose operands are float32: as exact as those of a model in `dtype` have to be."""
    return "ieee" if dtype == torch.float32 else "tf32"
