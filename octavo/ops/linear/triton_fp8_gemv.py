"""One token times an E4M3 weight matrix, with what surrounds it, on the CUDA cores; the activations stay as they are.

`triton_gemv` says why it has this shape. The weights are widened in registers, so half the bytes are half the time: with
activations rounded as well nothing would be read less. Scales by row multiply the finished sums; scales by block multiply x,
since a program's rows all lie in one row of blocks.
"""
# Triton has no star expressions, and types its tuples by itself.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.linear.fp8 import BLOCK
from octavo.ops.linear.triton_gemv import GemvConfig
from octavo.ops.triton_device import apply_gate
from octavo.ops.triton_utils import launch


@triton.jit
def _fp8_gemv_kernel(
    x,  # [K]
    weight,  # [N, K] E4M3, or [2 * N, K] with an activation: the gate's rows, then the gated ones
    weight_scale,  # [N] or [2 * N]; by block [rows / SCALE_BLOCK, K / SCALE_BLOCK]
    bias,  # [N] or [2 * N]
    gamma,  # [K]
    residual,  # [N]
    out,  # [N]
    N,
    eps,
    scale,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N outputs. Grid (cdiv(N, BLOCK_N),). SCALE_BLOCK 0: scales by row."""
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION != ""
    NUM_CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    # Rows past the end read the last one again instead of being masked: the loads stay plain. So do columns, times zero.
    read_rows = rows if EVEN_N else tl.minimum(rows, N - 1)
    ks = tl.arange(0, BLOCK_K)
    wp = weight + read_rows.to(tl.int64)[:, None] * K
    up = wp + tl.cast(N, tl.int64) * K
    w_tiles = ()
    u_tiles = ()
    gammas = ()
    w_scales = ()
    u_scales = ()
    for c in tl.static_range(NUM_CHUNKS):
        columns = c * BLOCK_K + ks
        if K % BLOCK_K != 0:
            columns = tl.minimum(columns, K - 1)
        w_tiles = w_tiles + (tl.load(wp + columns[None, :], eviction_policy="evict_first"),)
        if GATED:
            u_tiles = u_tiles + (tl.load(up + columns[None, :], eviction_policy="evict_first"),)
        if HAS_NORM:
            gammas = gammas + (tl.load(gamma + columns),)
        if SCALE_BLOCK > 0:
            sp = weight_scale + first_row // SCALE_BLOCK * (K // SCALE_BLOCK) + columns // SCALE_BLOCK
            w_scales = w_scales + (tl.load(sp),)
            if GATED:
                u_scales = u_scales + (tl.load(sp + N // SCALE_BLOCK * (K // SCALE_BLOCK)),)
    if SCALE_BLOCK == 0:
        row_scale = tl.load(weight_scale + read_rows)
        if GATED:
            row_scale_up = tl.load(weight_scale + N + read_rows)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for c in tl.static_range(NUM_CHUNKS):
        if K % BLOCK_K == 0:
            xv = tl.load(x + c * BLOCK_K + ks).to(tl.float32)
        else:
            xv = tl.load(x + c * BLOCK_K + ks, mask=ks < K - c * BLOCK_K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += xv * xv
            xv = xv * gammas[c].to(tl.float32)
        if SCALE_BLOCK > 0:
            acc += w_tiles[c].to(tl.float32) * (xv * w_scales[c])[None, :]
            if GATED:
                acc_up += u_tiles[c].to(tl.float32) * (xv * u_scales[c])[None, :]
        else:
            acc += w_tiles[c].to(tl.float32) * xv[None, :]
            if GATED:
                acc_up += u_tiles[c].to(tl.float32) * xv[None, :]
    y = tl.sum(acc, axis=1)
    if SCALE_BLOCK == 0:
        y = y * row_scale
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y = y * rstd
    if HAS_BIAS:
        y += tl.load(bias + read_rows).to(tl.float32)
    if GATED:
        u = tl.sum(acc_up, axis=1)
        if SCALE_BLOCK == 0:
            u = u * row_scale_up
        if HAS_NORM:
            u = u * rstd
        if HAS_BIAS:
            u += tl.load(bias + N + read_rows).to(tl.float32)
        y = apply_gate(y, ACTIVATION) * u
    if HAS_RESIDUAL:
        y = tl.load(residual + read_rows).to(tl.float32) + scale * y
    if EVEN_N:
        tl.store(out + rows, y.to(out.dtype.element_ty))
    else:
        tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < N)


# A program keeps its weights in registers, four to one: 64 Ki of them are 128 registers a thread of 4 warps.
MAX_K = 1 << 16


def default_fp8_gemv_config(n: int, k: int, gated: bool) -> GemvConfig:
    """A choice for shapes nobody has measured: about 32 Ki weights (32 kB) a program, two programs a multiprocessor or more."""
    if k >= 1024 and k % 1024 == 0:
        block_k = next(b for b in (4096, 2048, 1024) if k % b == 0)
    else:
        # The power of two between 256 and 4096 that wastes the fewest lanes; the larger one of equals.
        block_k = min((4096, 2048, 1024, 512, 256), key=lambda b: -(-k // b) * b)
    padded = -(-k // block_k) * block_k
    per_row = padded * (2 if gated else 1)
    block_n = 1
    while block_n < 16 and per_row * block_n * 2 <= 32768 and n // (block_n * 2) >= 2 * 132:
        block_n *= 2
    values = per_row * block_n
    return GemvConfig(block_n, block_k, 2 if values <= 8192 else 4 if values <= 32768 else 8)


def fp8_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    config: GemvConfig,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """`linear_fp8` for x [1, K] without rounding it; all tensors contiguous, scales by row or by block."""
    k = weight.shape[1]
    n = weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    launch(
        _fp8_gemv_kernel,
        (triton.cdiv(n, config.block_n),),
        x,
        weight,
        weight_scale,
        x if bias is None else bias,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        out,
        n,
        eps,
        scale,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SCALE_BLOCK=BLOCK if weight_scale.dim() == 2 else 0,
        ACTIVATION=activation or "",
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        EVEN_N=n % config.block_n == 0,
        num_warps=config.num_warps,
    )
    return out
