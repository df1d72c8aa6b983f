"""Provider "triton" of the short convolution."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.ssm.conv import short_conv
from octavo.ops.triton_device import apply_gate
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "search_steps"])
def _conv_kernel(
    x,  # [num_tokens, channels], tokens x_stride apart
    weight,  # [channels, WIDTH]
    bias,  # [channels]
    states,  # [rows, WIDTH - 1, channels]
    rows,  # [num_requests]
    query_start_loc,  # [num_requests + 1]
    seq_lens,  # [num_requests]
    out,  # [num_tokens, channels]
    num_tokens,
    num_requests,
    search_steps,
    channels,
    x_stride,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DECODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK channels of TOKENS tokens. Grid (cdiv(num_tokens, TOKENS), cdiv(channels, BLOCK)).

    DECODE: every request has one token, and its states are advanced here; else `_conv_state_kernel` does that, once nobody
    reads them any more.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = t < num_tokens
    inside = live[:, None] & (c < channels)[None, :]
    request = t
    if not DECODE:
        # The last request that begins at the token or before it.
        request = tl.zeros([TOKENS], tl.int32)
        end = request + num_requests
        for _ in range(search_steps):
            middle = (request + end) // 2
            before = tl.load(query_start_loc + middle, mask=live, other=0) <= t
            request = tl.where(before, middle, request)
            end = tl.where(before, end, middle)
    start = tl.load(query_start_loc + request, mask=live, other=0)
    query_len = tl.load(query_start_loc + request + 1, mask=live, other=0) - start
    goes_on = (tl.load(seq_lens + request, mask=live, other=0) > query_len)[:, None] & inside
    row = tl.load(rows + request, mask=live, other=0).to(tl.int64)
    state = states + row[:, None] * (WIDTH - 1) * channels + c[None, :]
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(WIDTH):
        source = t - (WIDTH - 1 - i)
        is_new = (source >= start)[:, None]
        place = source - start + WIDTH - 1  # among the state's tokens, where the source lies before the step
        v = tl.load(x + source.to(tl.int64)[:, None] * x_stride + c[None, :], mask=inside & is_new, other=0.0)
        kept = tl.load(state + place[:, None] * channels, mask=goes_on & ~is_new, other=0.0)
        w = tl.load(weight + c * WIDTH + i, mask=c < channels, other=0.0).to(tl.float32)
        acc += w[None, :] * (v.to(tl.float32) + kept.to(tl.float32))
    if ACTIVATION is not None:
        acc = apply_gate(acc, ACTIVATION)
    tl.store(out + t.to(tl.int64)[:, None] * channels + c[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if DECODE:
        for i in tl.static_range(WIDTH - 2):
            kept = tl.load(state + (i + 1) * channels, mask=goes_on, other=0.0)
            tl.store(state + i * channels, kept, mask=inside)
        v = tl.load(x + t.to(tl.int64)[:, None] * x_stride + c[None, :], mask=inside, other=0.0)
        tl.store(state + (WIDTH - 2) * channels, v.to(states.dtype.element_ty), mask=inside)


@triton.jit
def _conv_state_kernel(
    x,  # [num_tokens, channels], tokens x_stride apart
    states,  # [rows, WIDTH - 1, channels]
    rows,  # [num_requests]
    query_start_loc,  # [num_requests + 1]
    seq_lens,  # [num_requests]
    channels,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program keeps the last inputs of one request in BLOCK channels. Grid (num_requests, cdiv(channels, BLOCK))."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    kept_channels = tl.where(tl.load(seq_lens + request) > query_len, channels, 0)
    state = states + tl.load(rows + request).to(tl.int64) * (WIDTH - 1) * channels + c
    for i in tl.static_range(WIDTH - 1):
        source = query_len - (WIDTH - 1) + i  # in the step; what lies before it moves down from place i + query_len
        new, old = tl.where(source >= 0, channels, 0), tl.where(source < 0, kept_channels, 0)
        v = tl.load(x + (start + source).to(tl.int64) * x_stride + c, mask=c < new, other=0.0)
        kept = tl.load(state + (i + query_len) * channels, mask=c < old, other=0.0)
        tl.store(state + i * channels, v.to(states.dtype.element_ty) + kept, mask=inside)


def _accepts(x, weight, bias, states, requests, activation=None) -> bool:
    kept = [
        t for t in (weight, bias, states, requests.rows, requests.query_start_loc, requests.seq_lens) if t is not None
    ]
    return (
        runs_on_triton(x)
        and x.shape[0] > 0
        and x.stride(1) == 1
        and weight.shape[1] >= 2
        and all(t.is_contiguous() for t in kept)
    )


@short_conv.register("triton", supported=has_triton, accepts=_accepts)
def _short_conv_triton(x, weight, bias, states, requests, activation=None):
    tokens, channels = x.shape
    num_requests, width = requests.rows.shape[0], weight.shape[1]
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    is_decode = requests.max_query_len == 1
    # Single tokens have little to share, so many programs are better than wide ones; in prompts four tokens a thread reuse
    # each other's inputs from the first-level cache.
    tile = 1 if is_decode else 16
    block = min(256 if is_decode else 64, next_power_of_2(channels))
    metadata = (requests.rows, requests.query_start_loc, requests.seq_lens)
    launch(
        _conv_kernel, (triton.cdiv(tokens, tile), triton.cdiv(channels, block)),
        x, weight, weight if bias is None else bias, states, *metadata, out, tokens, num_requests,
        num_requests.bit_length(), channels, x.stride(0),
        WIDTH=width, TOKENS=tile, BLOCK=block, HAS_BIAS=bias is not None, ACTIVATION=activation, DECODE=is_decode,
        num_warps=2 if is_decode else 4,
    )  # fmt: skip
    if not is_decode:
        launch(
            _conv_state_kernel, (num_requests, triton.cdiv(channels, 256)),
            x, states, *metadata, channels, x.stride(0), WIDTH=width, BLOCK=256,
        )  # fmt: skip
    return out
