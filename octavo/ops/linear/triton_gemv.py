"""One token times a weight matrix, with what surrounds the product, on the CUDA cores.

At one token a linear layer is a read of its weights. Each program holds BLOCK_N whole rows in registers, so that all its
bytes are in flight at once and, under PDL, are asked for before the predecessor ends. The RMSNorm costs nothing:
y = (W · (gamma * x)) * rsqrt(mean(x²) + eps), both sums from one pass over x.
"""
# Triton has no star expressions, and types its tuples by itself.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton_device import apply_gate
from octavo.ops.triton_utils import launch


@triton.jit
def _gemv_kernel(
    x,  # [K]
    weight,  # [N, K], or [2 * N, K] with an activation: the gate's rows, then the gated ones
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
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N outputs. Grid (cdiv(N, BLOCK_N),)."""
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION != ""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    NUM_CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last one again instead of being masked: the loads stay plain.
    read_rows = rows if EVEN_N else tl.minimum(rows, N - 1)
    ks = tl.arange(0, BLOCK_K)
    wp = weight + read_rows.to(tl.int64)[:, None] * K + ks[None, :]
    up = wp + tl.cast(N, tl.int64) * K
    w_tiles = ()
    u_tiles = ()
    gammas = ()
    for c in tl.static_range(NUM_CHUNKS):
        if EVEN_K:
            w_tiles = w_tiles + (tl.load(wp + c * BLOCK_K, eviction_policy="evict_first"),)
            if GATED:
                u_tiles = u_tiles + (tl.load(up + c * BLOCK_K, eviction_policy="evict_first"),)
            if HAS_NORM:
                gammas = gammas + (tl.load(gamma + c * BLOCK_K + ks),)
        else:
            inside = ks < K - c * BLOCK_K
            w_tiles = w_tiles + (
                tl.load(wp + c * BLOCK_K, mask=inside[None, :], other=0.0, eviction_policy="evict_first"),
            )
            if GATED:
                u_tiles = u_tiles + (
                    tl.load(up + c * BLOCK_K, mask=inside[None, :], other=0.0, eviction_policy="evict_first"),
                )
            if HAS_NORM:
                gammas = gammas + (tl.load(gamma + c * BLOCK_K + ks, mask=inside, other=0.0),)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for c in tl.static_range(NUM_CHUNKS):
        if EVEN_K:
            xv = tl.load(x + c * BLOCK_K + ks).to(tl.float32)
        else:
            xv = tl.load(x + c * BLOCK_K + ks, mask=ks < K - c * BLOCK_K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += xv * xv
            xv = xv * gammas[c].to(tl.float32)
        acc += w_tiles[c].to(tl.float32) * xv[None, :]
        if GATED:
            acc_up += u_tiles[c].to(tl.float32) * xv[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y = y * rstd
    if HAS_BIAS:
        y += tl.load(bias + read_rows).to(tl.float32)
    if GATED:
        u = tl.sum(acc_up, axis=1)
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


# A program keeps its weights in registers: at most 64 Ki values for 8 warps (256 values, 128 registers, a thread).
MAX_K = 1 << 16


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Launch shape of the one-token kernel: rows and columns of a program's weight tile."""

    block_n: int
    block_k: int
    num_warps: int


def default_gemv_config(n: int, k: int, gated: bool) -> GemvConfig:
    """A choice for shapes nobody has measured.

    About 16 Ki weights (32 kB) a program and four programs a multiprocessor keep the bytes in flight that memory needs; 64
    weights a thread are eight loads of 16 bytes.
    """
    if k >= 1024 and k % 1024 == 0:
        block_k = next(b for b in (4096, 2048, 1024) if k % b == 0)
    else:
        # The power of two between 256 and 4096 that wastes the fewest masked lanes; the larger one of equals.
        block_k = min((4096, 2048, 1024, 512, 256), key=lambda b: -(-k // b) * b)
    padded = -(-k // block_k) * block_k
    per_row = padded * (2 if gated else 1)
    block_n = 1
    while block_n < 16 and per_row * block_n * 2 <= 16384 and n // (block_n * 2) >= 4 * 132:
        block_n *= 2
    values = per_row * block_n
    num_warps = 2 if values <= 4096 else 4 if values <= 8192 or (gated and values <= 16384) else 8
    return GemvConfig(block_n, block_k, num_warps)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemvConfig,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """`linear` for x [1, K]; all tensors contiguous."""
    k = weight.shape[1]
    n = weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    launch(
        _gemv_kernel,
        (triton.cdiv(n, config.block_n),),
        x,
        weight,
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
        ACTIVATION=activation or "",
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        EVEN_N=n % config.block_n == 0,
        num_warps=config.num_warps,
    )
    return out
