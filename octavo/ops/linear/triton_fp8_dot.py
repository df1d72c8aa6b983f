"""E4M3 activations times an E4M3 weight matrix, with what follows the product, on the tensor cores.

The weights are the left operand, since wgmma wants 64 rows or more there and eight tokens will do on the right. For few
tokens K is split among programs until the device is full; the last program to arrive at a tile adds the partial sums in a
fixed order, so the result does not depend on timing. Scales by row multiply the finished sums; with scales by block every
128 products are scaled and added up in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.linear.fp8 import BLOCK
from octavo.ops.triton_device import apply_gate, prefetch_l2
from octavo.ops.triton_utils import counters, launch, scratch


@triton.jit
def _finish(
    acc,  # [BLOCK_M, BLOCK_N] float32, the gate's part if there is one
    acc_up,
    x_scale,  # [M, 1]
    weight_scale,  # [N] or [2 * N]
    bias,
    residual,
    out,
    ms,
    rows,
    offsets,
    inside,
    N,
    scale,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROW_SCALES: tl.constexpr,
):
    """The epilogue of one finished tile; `ms` and `rows` are safe to read."""
    GATED: tl.constexpr = ACTIVATION != ""
    if ROW_SCALES:
        xs = tl.load(x_scale + ms)[:, None]
        acc = acc * xs * tl.load(weight_scale + rows)[None, :]
        if GATED:
            acc_up = acc_up * xs * tl.load(weight_scale + N + rows)[None, :]
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
def _fp8_dot_kernel(
    x,  # [M, K] E4M3
    x_scale,  # [M, 1], or [M, K / SCALE_BLOCK]
    weight,  # [N, K] E4M3, or [2 * N, K] with an activation: the gate's rows, then the gated ones
    weight_scale,  # [N] or [2 * N]; by block [rows / SCALE_BLOCK, K / SCALE_BLOCK]
    bias,  # [N] or [2 * N]
    residual,  # [M, N]
    out,  # [M, N]
    partials,  # [SPLIT, 1 or 2, M padded, N] float32
    arrivals,  # [tiles] int32, zero
    M,
    N,
    scale,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program sums one of SPLIT equal parts of K for BLOCK_N outputs of BLOCK_M tokens.

    Grid (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N), SPLIT), tokens first: neighbours share their weights. SCALE_BLOCK 0: scales by
    row; else it is BLOCK_K. PREFETCH: bytes of each weight row asked into L2 before the wait.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION != ""
    SPAN: tl.constexpr = K // SPLIT
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile_n = tile // tiles_m
    ms = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Tokens and rows past the end read the last one again instead of being masked: the loads stay plain.
    read_ms = tl.minimum(ms, M - 1)
    read_rows = rows if EVEN_N else tl.minimum(rows, N - 1)
    ks = tl.arange(0, BLOCK_K)
    first_k = split * SPAN
    wp = weight + read_rows.to(tl.int64)[:, None] * K + first_k
    second_half = tl.cast(N, tl.int64) * K
    if PDL:
        if PREFETCH > 0:
            lines = (tl.arange(0, PREFETCH // 128) * 128)[None, :]
            prefetch_l2(wp + lines)
            if GATED:
                prefetch_l2(wp + second_half + lines)
        gdc_wait()
    wp = wp + ks[None, :]
    xp = x + read_ms.to(tl.int64)[:, None] * K + first_k + ks[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SCALE_BLOCK > 0:
        scale_row = weight_scale + tile_n * BLOCK_N // SCALE_BLOCK * (K // SCALE_BLOCK)
        scale_row_up = scale_row + N // SCALE_BLOCK * (K // SCALE_BLOCK)
    for k in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        w_tile = tl.load(wp + k, eviction_policy="evict_first")
        x_tile = tl.load(xp + k)
        if SCALE_BLOCK > 0:
            block = (first_k + k) // SCALE_BLOCK
            xs = tl.load(x_scale + read_ms * (K // SCALE_BLOCK) + block)
            acc += tl.dot(w_tile, x_tile.T) * (xs * tl.load(scale_row + block))[None, :]
            if GATED:
                u_tile = tl.load(wp + second_half + k, eviction_policy="evict_first")
                acc_up += tl.dot(u_tile, x_tile.T) * (xs * tl.load(scale_row_up + block))[None, :]
        else:
            acc = tl.dot(w_tile, x_tile.T, acc)
            if GATED:
                u_tile = tl.load(wp + second_half + k, eviction_policy="evict_first")
                acc_up = tl.dot(u_tile, x_tile.T, acc_up)
    acc = acc.T
    acc_up = acc_up.T
    offsets = ms.to(tl.int64)[:, None] * N + rows[None, :]
    live = (ms < M)[:, None]
    inside = live if EVEN_N else live & (rows < N)[None, :]
    if SPLIT == 1:
        _finish(
            acc, acc_up, x_scale, weight_scale, bias, residual, out, read_ms, read_rows, offsets, inside, N, scale,
            ACTIVATION, HAS_BIAS, HAS_RESIDUAL, SCALE_BLOCK == 0,
        )  # fmt: skip
    else:
        PARTS: tl.constexpr = 2 if GATED else 1
        part = tl.cast(tiles_m, tl.int64) * BLOCK_M * N
        mine = partials + split * PARTS * part + offsets
        tl.store(mine, acc, mask=inside)
        if GATED:
            tl.store(mine + part, acc_up, mask=inside)
        # All threads' partial sums must be written before one thread announces them.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            total_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for s in tl.static_range(SPLIT):
                theirs = partials + s * PARTS * part + offsets
                total += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(theirs + part, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(
                total, total_up, x_scale, weight_scale, bias, residual, out, read_ms, read_rows, offsets, inside, N,
                scale, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, SCALE_BLOCK == 0,
            )  # fmt: skip
            tl.store(arrivals + tile, 0)


@dataclass(frozen=True, slots=True)
class Fp8DotConfig:
    """Launch shape of the tensor-core kernel. `block_k` times `split` divides the width of the layer."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    num_stages: int
    num_warps: int = 4
    prefetch: int = 256


# What a pipeline may hold of a multiprocessor's 227 KiB of shared memory.
_SHARED_BYTES = 200 * 1024


def default_fp8_dot_config(n: int, k: int, rows: int, gated: bool, by_block: bool) -> Fp8DotConfig:
    """A choice for shapes nobody has measured: 64 rows a program and about 240 programs, larger tiles for many tokens."""
    block_k = next(b for b in (128, 64, 32) if k % b == 0)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    # A tile of 128 x 128 reuses what it loads twice as often; a gate beside it would not fit the registers.
    block_n = 128 if rows > 256 and not gated else 64
    num_warps = 8 if block_m * block_n > 64 * 64 else 4
    split = 1
    tiles = -(-n // block_n) * -(-rows // block_m)
    while tiles * split < 240 and split < 8 and k % (block_k * split * 2) == 0 and k >= 4 * block_k * split:
        split *= 2
    stage_bytes = (block_n * (2 if gated else 1) + block_m) * block_k
    num_stages = min(5 if rows <= 32 else 4, _SHARED_BYTES // stage_bytes)
    return Fp8DotConfig(block_m, block_n, block_k, split, num_stages, num_warps)


def fp8_dot(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    config: Fp8DotConfig,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """`linear_fp8` in `dtype` for x that `quantize_fp8` made; all tensors contiguous, scales by row or by block."""
    m, k = x.shape
    by_block = weight_scale.dim() == 2
    if k % (config.block_k * config.split) or (by_block and (config.block_k != BLOCK or BLOCK % config.block_n)):
        raise ValueError(f"{config} does not fit a width of {k}{' with scales by block' if by_block else ''}")
    n = weight.shape[0] // (1 if activation is None else 2)
    tiles_m, tiles_n = triton.cdiv(m, config.block_m), triton.cdiv(n, config.block_n)
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    partials = arrivals = x_scale
    if config.split > 1:
        parts = config.split * (1 if activation is None else 2)
        partials = scratch("linear", parts * tiles_m * config.block_m * n, x.device)
        arrivals = counters(tiles_m * tiles_n, x.device)
    # A split's share of a row must hold what is prefetched of it.
    prefetch = min(config.prefetch, 1 << ((k // config.split).bit_length() - 1)) // 128 * 128
    launch(
        _fp8_dot_kernel,
        (tiles_m * tiles_n, config.split),
        x,
        x_scale,
        weight,
        weight_scale,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        partials,
        arrivals,
        m,
        n,
        scale,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT=config.split,
        STAGES=config.num_stages,
        PREFETCH=prefetch,
        SCALE_BLOCK=BLOCK if by_block else 0,
        ACTIVATION=activation or "",
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        EVEN_N=n % config.block_n == 0,
        num_warps=config.num_warps,
    )
    return out
