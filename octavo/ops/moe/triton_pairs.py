"""The experts of a few tokens on the CUDA cores: every pair reads its own expert's weights, two kernels in all.

    gate_up  a program holds some rows of a pair's gate and gated matrices, or of its only one  → [pairs, width]
    down     a program holds the same rows of all experts of a token, sums them with the weights → [tokens, hidden]

Pairs that share an expert find its weights in L2. The second kernel asks for its weights before the first has finished
(PDL): which experts were chosen is known by then, because the first waits before it lets its successor start.
"""
# Triton has no star expressions, and types its tuples by itself.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.moe import UNGATED
from octavo.ops.moe.triton_gates import gate_and_up
from octavo.ops.triton_device import apply_gate
from octavo.ops.triton_utils import launch


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Launch shape of one kernel: rows a program, columns of a tile."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class PairsConfig:
    """Both kernels."""

    gate_up: RowsConfig
    down: RowsConfig


@triton.jit
def _gate_up_kernel(
    hidden,  # [tokens, K]
    chosen,  # [tokens, TOP_K]
    weight,  # [experts, 2 * N, K]: the gates' rows, then the gated ones; [experts, N, K] unless GATED
    bias,  # [experts, 2 * N] or [experts, N]
    out,  # [pairs, N]
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N results of one pair. Grid (cdiv(N, BLOCK_N), pairs)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    NUM_CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(chosen + pair).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last one again instead of being masked: the loads stay plain.
    read_rows = (rows if EVEN_N else tl.minimum(rows, N - 1)).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    first_row = expert * (1 + GATED) * N + read_rows
    gp = weight + first_row[:, None] * K + ks[None, :]
    up = gp + tl.cast(N, tl.int64) * K
    xp = hidden + pair // TOP_K * K + ks
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for c in tl.static_range(NUM_CHUNKS):
        if (c + 1) * BLOCK_K <= K:
            g_tile = tl.load(gp + c * BLOCK_K)
            if GATED:
                u_tile = tl.load(up + c * BLOCK_K)
            x = tl.load(xp + c * BLOCK_K).to(tl.float32)
        else:
            inside = ks < K - c * BLOCK_K
            g_tile = tl.load(gp + c * BLOCK_K, mask=inside[None, :], other=0.0)
            if GATED:
                u_tile = tl.load(up + c * BLOCK_K, mask=inside[None, :], other=0.0)
            x = tl.load(xp + c * BLOCK_K, mask=inside, other=0.0).to(tl.float32)
        acc += g_tile.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += u_tile.to(tl.float32) * x[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(bias + first_row).to(tl.float32)
    if GATED:
        u = tl.sum(acc_up, axis=1)
        if HAS_BIAS:
            u += tl.load(bias + first_row + N).to(tl.float32)
        y = gate_and_up(y, u, ACTIVATION)
    else:
        y = apply_gate(y, ACTIVATION)
    tl.store(out + pair * N + rows, y.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def _down_kernel(
    inner,  # [pairs, K]
    weights,  # [tokens, TOP_K] float32
    chosen,  # [tokens, TOP_K]
    weight,  # [experts, N, K]
    bias,  # [experts, N]
    residual,  # [tokens, N]
    out,  # [tokens, N]
    N,
    scale,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N results of one token. Grid (cdiv(N, BLOCK_N), tokens)."""
    if PDL:
        gdc_launch_dependents()
    NUM_CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read_rows = (rows if EVEN_N else tl.minimum(rows, N - 1)).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    tiles = ()
    for j in tl.static_range(TOP_K):
        expert = tl.load(chosen + token * TOP_K + j).to(tl.int64)
        wp = weight + (expert * N + read_rows)[:, None] * K + ks[None, :]
        for c in tl.static_range(NUM_CHUNKS):
            if (c + 1) * BLOCK_K <= K:
                tiles = tiles + (tl.load(wp + c * BLOCK_K),)
            else:
                tiles = tiles + (tl.load(wp + c * BLOCK_K, mask=(ks < K - c * BLOCK_K)[None, :], other=0.0),)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.static_range(TOP_K):
        share = tl.load(weights + token * TOP_K + j)
        xp = inner + (token * TOP_K + j) * K + ks
        for c in tl.static_range(NUM_CHUNKS):
            if (c + 1) * BLOCK_K <= K:
                x = tl.load(xp + c * BLOCK_K).to(tl.float32)
            else:
                x = tl.load(xp + c * BLOCK_K, mask=ks < K - c * BLOCK_K, other=0.0).to(tl.float32)
            acc += tiles[j * NUM_CHUNKS + c].to(tl.float32) * (x * share)[None, :]
        if HAS_BIAS:
            expert = tl.load(chosen + token * TOP_K + j).to(tl.int64)
            biases += share * tl.load(bias + expert * N + read_rows).to(tl.float32)
    y = (tl.sum(acc, axis=1) + biases) * scale
    if HAS_RESIDUAL:
        y += tl.load(residual + token * N + read_rows).to(tl.float32)
    tl.store(out + token * N + rows, y.to(out.dtype.element_ty), mask=rows < N)


# A thread of the second kernel holds at most this many weights, in half as many registers.
_MAX_THREAD_VALUES = 192
_MAX_WARPS = 8


def _padded(k: int, block_k: int) -> int:
    return -(-k // block_k) * block_k


def _best_block_k(k: int) -> int:
    """The largest power of two between 128 and 2048 that wastes a tenth more lanes than need be, at most."""
    sizes = (2048, 1024, 512, 256, 128)
    least = min(_padded(k, block_k) for block_k in sizes)
    return next(block_k for block_k in sizes if _padded(k, block_k) <= 1.1 * least)


def default_pairs_config(hidden: int, width: int, top_k: int) -> PairsConfig:
    """A choice for shapes nobody has measured: about 16 Ki weights a program, loads of 16 bytes."""

    def rows(k: int, copies: int) -> RowsConfig:
        block_k = _best_block_k(k)
        block_n = 1
        while block_n < 8 and _padded(k, block_k) * copies * block_n * 2 <= 16384:
            block_n *= 2
        # Eight values, 16 bytes, a thread and tile.
        return RowsConfig(block_n, block_k, max(1, min(_MAX_WARPS, block_n * block_k // 256)))

    return PairsConfig(rows(hidden, 2), rows(width, top_k))


def fits(width: int, top_k: int) -> bool:
    """Whether the second kernel can hold its weights in registers: a row of every chosen expert."""
    return _padded(width, _best_block_k(width)) * top_k <= _MAX_THREAD_VALUES * 32 * _MAX_WARPS


def pair_experts(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    residual: torch.Tensor | None,
    scale: float,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    config: PairsConfig,
) -> torch.Tensor:
    """`experts` for a few tokens; all tensors contiguous."""
    tokens, k = hidden.shape
    top_k, width = chosen.shape[1], down.shape[2]
    inner = torch.empty(tokens * top_k, width, dtype=hidden.dtype, device=hidden.device)
    shape = config.gate_up
    launch(
        _gate_up_kernel,
        (triton.cdiv(width, shape.block_n), tokens * top_k),
        hidden,
        chosen,
        gate_up,
        gate_up if gate_up_bias is None else gate_up_bias,
        inner,
        width,
        K=k,
        TOP_K=top_k,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        ACTIVATION=activation,
        GATED=activation not in UNGATED,
        HAS_BIAS=gate_up_bias is not None,
        EVEN_N=width % shape.block_n == 0,
        num_warps=shape.num_warps,
    )
    out = torch.empty_like(hidden)
    shape = config.down
    launch(
        _down_kernel,
        (triton.cdiv(k, shape.block_n), tokens),
        inner,
        weights,
        chosen,
        down,
        down if down_bias is None else down_bias,
        out if residual is None else residual,
        out,
        k,
        scale,
        K=width,
        TOP_K=top_k,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        HAS_BIAS=down_bias is not None,
        HAS_RESIDUAL=residual is not None,
        EVEN_N=k % shape.block_n == 0,
        num_warps=shape.num_warps,
    )
    return out
