"""Provider "triton" of the gated delta rule. A program owns some columns of a head's state, which do not depend on others."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.ssm.delta import NORM_EPS, gated_delta_rule
from octavo.ops.ssm.triton_mamba import precision, rows_are_dense
from octavo.ops.triton_device import softplus
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2


@triton.jit
def _delta_kernel(
    qkv,  # [tokens, 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM], tokens qkv_stride apart
    b,  # [tokens, HEADS], tokens b_stride apart
    a,  # [tokens, HEADS], tokens a_stride apart
    a_log,  # [HEADS], as dt_bias
    dt_bias,
    states,  # [rows, HEADS, KEY_DIM, VALUE_DIM]
    rows,  # [requests]
    query_start_loc,  # [requests + 1]
    seq_lens,  # [requests]
    out,  # [tokens, HEADS, VALUE_DIM]
    scale,
    eps,
    qkv_stride,
    b_stride,
    a_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK values of one head of one request, TOKENS at a time; their state stays in registers.

    Grid (requests, HEADS, cdiv(VALUE_DIM, BLOCK)).
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED)
    e = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside_d, inside_e = d < KEY_DIM, e < VALUE_DIM
    inside_state = inside_d[:, None] & inside_e[None, :]
    start = tl.load(query_start_loc + request).to(tl.int64)
    query_len = tl.load(query_start_loc + request + 1) - start
    # A request that begins in this step has no state yet.
    kept_dim = tl.where(tl.load(seq_lens + request) > query_len, KEY_DIM, 0)
    rate, bias = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    row = tl.load(rows + request).to(tl.int64)
    state = states + ((row * HEADS + head) * KEY_DIM + d[:, None]) * VALUE_DIM + e[None, :]
    h = tl.load(state, mask=inside_state & (d < kept_dim)[:, None], other=0.0)
    q_at = head // (HEADS // KEY_HEADS) * KEY_DIM
    k_at = q_at + KEY_HEADS * KEY_DIM
    v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    if TOKENS == 1:
        if query_len > 0:
            token = qkv + start * qkv_stride
            q = tl.load(token + q_at + d, mask=inside_d, other=0.0).to(tl.float32)
            k = tl.load(token + k_at + d, mask=inside_d, other=0.0).to(tl.float32)
            v = tl.load(token + v_at + e, mask=inside_e, other=0.0).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q) + eps) * scale
            k *= tl.rsqrt(tl.sum(k * k) + eps)
            beta = tl.sigmoid(tl.load(b + start * b_stride + head).to(tl.float32))
            h *= tl.exp(rate * softplus(tl.load(a + start * a_stride + head).to(tl.float32) + bias))
            u = beta * (v - tl.sum(h * k[:, None], axis=0))
            h += k[:, None] * u[None, :]
            y = tl.sum(h * q[:, None], axis=0)
            tl.store(out + (start * HEADS + head) * VALUE_DIM + e, y.to(out.dtype.element_ty), mask=inside_e)
    else:
        i = tl.arange(0, TOKENS)
        for first in range(0, query_len, TOKENS):
            live = first + i < query_len
            t = start + first + i
            token = qkv + t[:, None] * qkv_stride
            here_d, here_e = live[:, None] & inside_d[None, :], live[:, None] & inside_e[None, :]
            q = tl.load(token + q_at + d[None, :], mask=here_d, other=0.0).to(tl.float32)
            k = tl.load(token + k_at + d[None, :], mask=here_d, other=0.0).to(tl.float32)
            v = tl.load(token + v_at + e[None, :], mask=here_e, other=0.0).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, axis=1) + eps)[:, None] * scale
            k *= tl.rsqrt(tl.sum(k * k, axis=1) + eps)[:, None]
            beta = tl.sigmoid(tl.load(b + t * b_stride + head, mask=live, other=0.0).to(tl.float32))
            beta = tl.where(live, beta, 0.0)
            log_g = rate * softplus(tl.load(a + t * a_stride + head, mask=live, other=0.0).to(tl.float32) + bias)
            log_g = tl.where(live, log_g, 0.0)
            log_decay = tl.cumsum(log_g, axis=0)
            total = tl.sum(log_g, axis=0)
            so_far = tl.exp(log_decay)[:, None]
            between = tl.where(i[:, None] >= i[None, :], log_decay[:, None] - log_decay[None, :], float("-inf"))
            decay = tl.exp(between)
            system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
            u = beta[:, None] * (v - so_far * tl.dot(k, h, input_precision=PRECISION))
            # (1 + strictly lower part of `system`) u = right side, row by row.
            for r in range(1, TOKENS):
                factors = tl.sum(tl.where((i == r)[:, None] & (i < r)[None, :], system, 0.0), axis=0)
                correction = tl.sum(factors[:, None] * u, axis=0)
                u = tl.where((i == r)[:, None], u - correction[None, :], u)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
            y = so_far * tl.dot(q, h, input_precision=PRECISION)
            y = tl.dot(scores, u, y, input_precision=PRECISION)
            left = tl.exp(total - log_decay)[:, None]
            h = tl.dot(tl.trans(k * left), u, h * tl.exp(total), input_precision=PRECISION)
            at = (t[:, None] * HEADS + head) * VALUE_DIM + e[None, :]
            tl.store(out + at, y.to(out.dtype.element_ty), mask=here_e)
    tl.store(state, h, mask=inside_state)


def _accepts(qkv, b, a, a_log, dt_bias, states, requests, num_key_heads) -> bool:
    return (
        runs_on_triton(qkv)
        and qkv.shape[0] > 0
        and rows_are_dense(qkv, b, a)
        and states.shape[2] <= 256
        and all(t.is_contiguous() and t.dtype == torch.float32 for t in (a_log, dt_bias, states))
    )


@gated_delta_rule.register("triton", supported=has_triton, accepts=_accepts)
def _gated_delta_rule_triton(qkv, b, a, a_log, dt_bias, states, requests, num_key_heads):
    _, heads, key_dim, value_dim = states.shape
    out = torch.empty(qkv.shape[0], heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    padded = max(16, next_power_of_2(key_dim))
    # A token: 32 columns are whole lines of the state. A prompt: 32 elements of it a thread of 8 warps; the rows of the
    # triangular system follow one another, so chunks are short.
    tile, elements = (1, 4096) if requests.max_query_len == 1 else (32, 8192)
    block = max(16, min(next_power_of_2(value_dim), elements // padded))
    launch(
        _delta_kernel, (requests.rows.shape[0], heads, triton.cdiv(value_dim, block)),
        qkv, b, a, a_log, dt_bias, states, requests.rows, requests.query_start_loc, requests.seq_lens, out,
        key_dim**-0.5, NORM_EPS, qkv.stride(0), b.stride(0), a.stride(0), KEY_HEADS=num_key_heads, HEADS=heads,
        KEY_DIM=key_dim, PADDED=padded, VALUE_DIM=value_dim, BLOCK=block, TOKENS=tile, PRECISION=precision(qkv.dtype),
        num_warps=4 if tile == 1 else 8,
    )  # fmt: skip
    return out
