"""A few tokens (2 to 64) times a weight matrix, with what surrounds the product, on the tensor cores.

Tokens are padded to a multiple of 16. K is split among programs until the device is full; the last program to arrive at a
tile adds the partial sums in a fixed order, so the result does not depend on timing. The RMSNorm rides along: gamma is
applied to x as it is loaded, 1 / rms to the finished sums, from squares summed in the same pass.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton_device import apply_gate, prefetch_l2
from octavo.ops.triton_utils import counters, launch, scratch

MAX_ROWS = 64


@triton.jit
def _finish(
    acc,  # [PADDED_M, BLOCK_N] float32: W · (gamma * x), the gate's part if there is one
    acc_up,
    squares,  # [PADDED_M] float32: sum of x²
    bias,
    residual,
    out,
    rows,
    offsets,
    inside,
    N,
    eps,
    scale,
    K: tl.constexpr,
    PRESCALE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """The epilogue of one finished tile."""
    GATED: tl.constexpr = ACTIVATION != ""
    if HAS_NORM:
        rstd = tl.rsqrt(squares / K + eps) / PRESCALE
        acc = acc * rstd[:, None]
        if GATED:
            acc_up = acc_up * rstd[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias + N + rows).to(tl.float32)[None, :]
    if GATED:
        acc = apply_gate(acc, ACTIVATION) * acc_up
    if HAS_RESIDUAL:
        acc = tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32) + scale * acc
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    x,  # [M, K]
    weight,  # [N, K], or [2 * N, K] with an activation: the gate's rows, then the gated ones
    bias,  # [N] or [2 * N]
    gamma,  # [K]
    residual,  # [M, N]
    out,  # [M, N]
    partials,  # [SPLIT, 1 or 2, PADDED_M, N] float32
    partial_squares,  # [SPLIT, tiles, PADDED_M] float32
    arrivals,  # [tiles] int32, zero
    M,
    N,
    eps,
    scale,
    K: tl.constexpr,
    PADDED_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRESCALE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program sums one of SPLIT parts of K for BLOCK_N outputs of all tokens. Grid (cdiv(N, BLOCK_N), SPLIT).

    SWAP makes the weights the left operand, which is what wgmma wants (64 or 128 rows). PREFETCH: bytes of each weight row
    asked into L2 before the wait. PRESCALE keeps gamma * x inside float16.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION != ""
    SPAN: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT) == 0
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last one again instead of being masked: the loads stay plain.
    read_rows = rows if EVEN_N else tl.minimum(rows, N - 1)
    ms = tl.arange(0, PADDED_M)
    ks = tl.arange(0, BLOCK_K)
    first_k = split * SPAN
    wp = weight + read_rows.to(tl.int64)[:, None] * K + first_k
    second_half = tl.cast(N, tl.int64) * K
    if PDL:
        if EVEN_K and PREFETCH > 0:
            # 64 two-byte values are the 128 bytes one prefetch brings.
            lines = (tl.arange(0, PREFETCH // 128) * 64)[None, :]
            prefetch_l2(wp + lines)
            if GATED:
                prefetch_l2(wp + second_half + lines)
        gdc_wait()
    wp = wp + ks[None, :]
    xp = x + ms[:, None] * K + first_k + ks[None, :]
    live = (ms < M)[:, None]
    if SWAP:
        acc = tl.zeros([BLOCK_N, PADDED_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, PADDED_M], tl.float32)
    else:
        acc = tl.zeros([PADDED_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([PADDED_M, BLOCK_N], tl.float32)
    squares = tl.zeros([PADDED_M], tl.float32)
    for k in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w_tile = tl.load(wp + k, eviction_policy="evict_first")
            x_tile = tl.load(xp + k, mask=live, other=0.0)
            if HAS_NORM:
                g = tl.load(gamma + first_k + k + ks)
        else:
            inside_k = first_k + k + ks < K
            w_tile = tl.load(wp + k, mask=inside_k[None, :], other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(xp + k, mask=live & inside_k[None, :], other=0.0)
            if HAS_NORM:
                g = tl.load(gamma + first_k + k + ks, mask=inside_k, other=0.0)
        if HAS_NORM:
            wide = x_tile.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            x_tile = x_tile * (g.to(tl.float32) * PRESCALE).to(x_tile.dtype)[None, :]
        if SWAP:
            acc = tl.dot(w_tile, x_tile.T, acc)
        else:
            acc = tl.dot(x_tile, w_tile.T, acc)
        if GATED:
            if EVEN_K:
                u_tile = tl.load(wp + second_half + k, eviction_policy="evict_first")
            else:
                u_tile = tl.load(wp + second_half + k, mask=inside_k[None, :], other=0.0, eviction_policy="evict_first")
            if SWAP:
                acc_up = tl.dot(u_tile, x_tile.T, acc_up)
            else:
                acc_up = tl.dot(x_tile, u_tile.T, acc_up)
    if SWAP:
        acc = acc.T
        acc_up = acc_up.T
    offsets = ms[:, None] * N + rows[None, :]
    inside = live if EVEN_N else live & (rows < N)[None, :]
    if SPLIT == 1:
        _finish(
            acc, acc_up, squares, bias, residual, out, read_rows, offsets, inside, N, eps, scale,
            K, PRESCALE, ACTIVATION, HAS_NORM, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
    else:
        PARTS: tl.constexpr = 2 if GATED else 1
        num_tiles = tl.num_programs(0)
        mine = partials + split * PARTS * PADDED_M * N + offsets
        tl.store(mine, acc, mask=inside)
        if GATED:
            tl.store(mine + PADDED_M * N, acc_up, mask=inside)
        if HAS_NORM:
            tl.store(partial_squares + (split * num_tiles + tile) * PADDED_M + ms, squares)
        # All threads' partial sums must be written before one thread announces them.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([PADDED_M, BLOCK_N], tl.float32)
            total_up = tl.zeros([PADDED_M, BLOCK_N], tl.float32)
            total_squares = tl.zeros([PADDED_M], tl.float32)
            for s in tl.static_range(SPLIT):
                theirs = partials + s * PARTS * PADDED_M * N + offsets
                total += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(theirs + PADDED_M * N, mask=inside, other=0.0, cache_modifier=".cg")
                if HAS_NORM:
                    total_squares += tl.load(
                        partial_squares + (s * num_tiles + tile) * PADDED_M + ms, cache_modifier=".cg"
                    )
            _finish(
                total, total_up, total_squares, bias, residual, out, read_rows, offsets, inside, N, eps, scale,
                K, PRESCALE, ACTIVATION, HAS_NORM, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip
            tl.store(arrivals + tile, 0)


@dataclass(frozen=True, slots=True)
class DotConfig:
    """Launch shape of the tensor-core kernel."""

    block_n: int
    block_k: int
    split: int
    num_stages: int
    swap: bool = False
    num_warps: int = 4
    prefetch: int = 512


def default_dot_config(n: int, k: int, rows: int, gated: bool) -> DotConfig:
    """A choice for shapes nobody has measured: about 240 programs, and a pipeline that fits two of them on a multiprocessor."""
    block_n = 64 if n // 64 >= 60 else 32
    block_k = 128
    split = 1
    while -(-n // block_n) * split < 240 and split < 8 and k >= 2 * block_k * (split * 2):
        split *= 2
    num_stages = 3 if gated or rows > 32 else 4
    return DotConfig(block_n, block_k, split, num_stages, swap=gated and block_n == 64)


def dot(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: DotConfig,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """`linear` for x [M, K], M <= 64; all tensors contiguous."""
    m, k = x.shape
    gated = activation is not None
    n = weight.shape[0] // (2 if gated else 1)
    padded_m = 16 if m <= 16 else 32 if m <= 32 else 64
    tiles = triton.cdiv(n, config.block_n)
    partials = partial_squares = arrivals = x
    if config.split > 1:
        partials = scratch("linear", config.split * (2 if gated else 1) * padded_m * n, x.device)
        partial_squares = scratch("linear_squares", config.split * tiles * padded_m, x.device)
        arrivals = counters(tiles, x.device)
    # A split's share of a row must hold what is prefetched of it.
    span_bytes = k // config.split * x.element_size()
    prefetch = min(config.prefetch, 1 << (span_bytes.bit_length() - 1)) // 128 * 128
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    launch(
        _dot_kernel,
        (tiles, config.split),
        x,
        weight,
        x if bias is None else bias,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        out,
        partials,
        partial_squares,
        arrivals,
        m,
        n,
        eps,
        scale,
        K=k,
        PADDED_M=padded_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT=config.split,
        STAGES=config.num_stages,
        SWAP=config.swap,
        PREFETCH=prefetch,
        # float16 ends at 65504: gamma * x, not yet divided by its rms, is kept 32 times further from it.
        PRESCALE=1 / 32 if x.dtype == torch.float16 else 1.0,
        ACTIVATION=activation or "",
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        EVEN_N=n % config.block_n == 0,
        num_warps=config.num_warps,
    )
    return out
