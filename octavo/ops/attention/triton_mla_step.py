"""Provider "triton" of `latent_decode_attention`: a decode step of a few requests in three kernels.

    write the latents, rotate, absorb the queries   heads' keys' projections, [requests, num_heads, rank]
    attention over the latents                      `triton_mla`
    values                                          heads' values' projections, [requests, num_heads, value_dim]

All three are programmatic dependents, and the first and the last have asked for their weights before they wait. Two batched
products of a vendor library would cost as much again in launches and ramps.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.attention.mla import latent_decode, latent_decode_attention
from octavo.ops.attention.triton_mla import heads_a_program, rows_follow, write_or_rotate
from octavo.ops.rope_triton import FLOATS
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch, next_power_of_2

# Beyond, the batched products of a vendor library are faster.
_MAX_REQUESTS = 64


@triton.jit
def _head_product(
    x,  # rows of one head, x_stride apart
    w,  # that head's weights: element (k, n) at k * k_stride + n * n_stride
    y,  # rows of the result, y_stride apart
    first_n,
    first_row,
    num_rows,
    x_stride,
    y_stride,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    K_STRIDE: tl.constexpr,
    N_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x @ w for BLOCK_M rows and BLOCK_N columns."""
    k = tl.arange(0, PADDED_K)
    n = first_n + tl.arange(0, BLOCK_N)
    m = first_row + tl.arange(0, BLOCK_M)
    weights = tl.load(
        w + k[:, None] * K_STRIDE + n[None, :] * N_STRIDE, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0
    )
    if PDL:
        gdc_wait()
    rows = tl.load(x + m[:, None] * x_stride + k[None, :], mask=(m < num_rows)[:, None] & (k < K)[None, :], other=0.0)
    result = tl.dot(rows, weights, input_precision="ieee")
    inside = (m < num_rows)[:, None] & (n < N)[None, :]
    tl.store(y + m[:, None] * y_stride + n[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _write_absorb_kernel(
    q,  # [tokens, NUM_HEADS, NOPE_DIM + ROPE_DIM], strides q_stride and q_head_stride
    latent,  # [tokens, RANK + ROPE_DIM], tokens latent_stride apart
    positions,  # [tokens]
    cos_sin,  # [max_position, ROPE_DIM] float32: cos | sin
    norm,  # [RANK]
    cache,  # [num_blocks, block_size, RANK + ROPE_DIM], tokens ROW apart
    slot_mapping,  # [tokens]
    up,  # [NUM_HEADS, UP_ROWS, RANK]: keys' rows first
    q_rope,  # [tokens, NUM_HEADS, ROPE_DIM]
    q_latent,  # [tokens, NUM_HEADS, RANK]
    num_tokens,
    eps,
    q_stride,
    q_head_stride,
    latent_stride,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    UP_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs absorb BLOCK_M tokens' queries of one head, for BLOCK_N of the rank; the others do what those of
    `_latent_rope_write_kernel` do. Grid (products + tokens * (1 + head blocks),)."""
    if PDL:
        gdc_launch_dependents()
    N_BLOCKS: tl.constexpr = (RANK + BLOCK_N - 1) // BLOCK_N
    num_products = NUM_HEADS * N_BLOCKS * tl.cdiv(num_tokens, BLOCK_M)
    program = tl.program_id(0)
    if program < num_products:
        head = program // N_BLOCKS % NUM_HEADS
        _head_product(
            q + head * q_head_stride, up + head * (UP_ROWS * RANK), q_latent + head * RANK, program % N_BLOCKS * BLOCK_N,
            program // (N_BLOCKS * NUM_HEADS) * BLOCK_M, num_tokens, q_stride, NUM_HEADS * RANK,
            NOPE_DIM, PADDED_NOPE, RANK, BLOCK_N, BLOCK_M, RANK, 1, PDL,
        )  # fmt: skip
    else:
        if PDL:
            gdc_wait()
        PARTS: tl.constexpr = 1 + (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
        program -= num_products
        write_or_rotate(
            program // PARTS, program % PARTS, q, latent, positions, cos_sin, norm, cache, slot_mapping, q_rope, eps,
            q_stride, q_head_stride, NOPE_DIM, latent_stride, NUM_HEADS, RANK, PADDED_RANK, ROPE_DIM, PADDED_ROPE, BLOCK_H,
            INTERLEAVED, ROW,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _values_kernel(
    attended,  # [tokens, NUM_HEADS, RANK]
    up,  # [NUM_HEADS, NOPE_DIM + VALUE_DIM, RANK], moved on to the values' rows
    out,  # [tokens, NUM_HEADS, VALUE_DIM]
    num_tokens,
    NUM_HEADS: tl.constexpr,
    UP_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N values of one head for BLOCK_M tokens. Grid (value blocks, NUM_HEADS, token blocks)."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    _head_product(
        attended + head * RANK, up + head * (UP_ROWS * RANK), out + head * VALUE_DIM, tl.program_id(0) * BLOCK_N,
        tl.program_id(2) * BLOCK_M, num_tokens, NUM_HEADS * RANK, NUM_HEADS * VALUE_DIM,
        RANK, PADDED_RANK, VALUE_DIM, BLOCK_N, BLOCK_M, 1, RANK, PDL,
    )  # fmt: skip


def _accepts(
    q,
    latent,
    positions,
    cos_sin,
    norm_weight,
    eps,
    up,
    cache,
    slot_mapping,
    block_table,
    seq_lens,
    max_seq_len,
    scale,
    interleaved,
) -> bool:
    return (
        runs_on_triton(q)
        and 0 < q.shape[0] <= _MAX_REQUESTS
        and q.dtype in FLOATS
        and all(t.dtype == q.dtype for t in (latent, norm_weight, up, cache))
        and q.stride(2) == 1
        and latent.stride(1) == 1
        and block_table.stride(1) == 1
        and rows_follow(cache)
        and up.is_contiguous()
        and cos_sin.is_contiguous()
        and cos_sin.dtype == torch.float32
    )


@latent_decode_attention.register("triton", supported=has_triton, accepts=_accepts)
def latent_decode_attention_triton(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    up: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    interleaved: bool,
) -> torch.Tensor:
    """Three kernels in a chain."""
    tokens, num_heads, head_dim = q.shape
    rope_dim, rank, up_rows = cos_sin.shape[1], up.shape[2], up.shape[1]
    nope_dim = head_dim - rope_dim
    value_dim = up_rows - nope_dim
    padded_rope = next_power_of_2(rope_dim)
    block_h = heads_a_program(num_heads, padded_rope)
    # float32 products run on the CUDA cores, unrolled: short ones.
    block_m = 16 if q.element_size() > 2 else min(64, max(16, next_power_of_2(tokens)))
    q_rope = q.new_empty(tokens, num_heads, rope_dim)
    q_latent = q.new_empty(tokens, num_heads, rank)
    # 16 kB of weights a program in both products: with 16 heads about one program a multiprocessor.
    block_n = 64
    products = num_heads * triton.cdiv(rank, block_n) * triton.cdiv(tokens, block_m)
    launch(
        _write_absorb_kernel,
        (products + tokens * (1 + triton.cdiv(num_heads, block_h)),),
        q,
        latent,
        positions,
        cos_sin,
        norm_weight,
        cache,
        slot_mapping,
        up,
        q_rope,
        q_latent,
        tokens,
        eps,
        q.stride(0),
        q.stride(1),
        latent.stride(0),
        NUM_HEADS=num_heads,
        NOPE_DIM=nope_dim,
        PADDED_NOPE=max(16, next_power_of_2(nope_dim)),
        UP_ROWS=up_rows,
        RANK=rank,
        PADDED_RANK=next_power_of_2(rank),
        ROPE_DIM=rope_dim,
        PADDED_ROPE=padded_rope,
        BLOCK_H=block_h,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        INTERLEAVED=interleaved,
        ROW=cache.stride(1),
        num_warps=4,
    )
    attended = latent_decode(q_latent, q_rope, cache, block_table, seq_lens, max_seq_len, scale)
    out = q.new_empty(tokens, num_heads, value_dim)
    block_n = 16
    launch(
        _values_kernel,
        (triton.cdiv(value_dim, block_n), num_heads, triton.cdiv(tokens, block_m)),
        attended,
        up[:, nope_dim:],
        out,
        tokens,
        NUM_HEADS=num_heads,
        UP_ROWS=up_rows,
        RANK=rank,
        PADDED_RANK=next_power_of_2(rank),
        VALUE_DIM=value_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return out
