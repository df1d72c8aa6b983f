"""The experts of many tokens on the tensor cores: pairs sorted by expert, then two grouped products and a sum.

    plan     rows of one expert stand together, in blocks (`triton_plan`)
    gate_up  act(gate(h)) * up(h) or act(up(h)) of a block's rows, h gathered by token → [pairs, width], sorted
    down     weight * down(·) of a block's rows, scattered back                     → [pairs, hidden], by pair
    combine  residual + scale * the sum of a token's pairs, in the order of choice  → [tokens, hidden]

A decode step reads every chosen expert once: blocks are short (16 rows) and the weights may be the left operand (`swap`),
which is what wgmma wants. Prefill is bound by arithmetic and takes tall blocks.
"""
# Triton branches on constants at compile time only where they stand alone in an `if`.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.moe import UNGATED
from octavo.ops.moe.triton_gates import gate_and_up
from octavo.ops.moe.triton_plan import make_plan
from octavo.ops.triton_device import apply_gate
from octavo.ops.triton_utils import launch, next_power_of_2


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch shape of one grouped product."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    swap: bool = False


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Both products; `block_m` rows a block."""

    block_m: int
    gate_up: TileConfig
    down: TileConfig


@triton.jit
def _grouped_kernel(
    x,  # [tokens, K] gathered by pair (ACTIVATION), or [pairs, K] in sorted order
    weight,  # [experts, N, K], or [experts, 2 * N, K] if GATED: the gates' rows, then the gated ones
    bias,  # [experts, N] or [experts, 2 * N]
    pair_weights,  # [pairs] float32
    order,  # [pairs]
    blocks,  # see triton_plan
    out,  # [pairs, N]: sorted if ACTIVATION, else by pair
    N,
    num_n_tiles,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N results of a block's rows. Grid (max_blocks * num_n_tiles,), a block's tiles together.

    ACTIVATION: of the first product; none: the second one, whose results are weighted.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    FIRST: tl.constexpr = ACTIVATION != ""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    block = tl.program_id(0) // num_n_tiles
    if block >= tl.load(blocks):
        return
    tile = tl.program_id(0) % num_n_tiles
    expert = tl.load(blocks + 1 + 3 * block).to(tl.int64)
    first = tl.load(blocks + 2 + 3 * block)
    count = tl.load(blocks + 3 + 3 * block)
    ms = tl.arange(0, BLOCK_M)
    live = ms < count
    sorted_rows = (first + ms).to(tl.int64)
    pairs = tl.load(order + sorted_rows, mask=live, other=0).to(tl.int64)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last one again instead of being masked: the loads stay plain.
    read_rows = (rows if EVEN_N else tl.minimum(rows, N - 1)).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    if FIRST:
        xp = x + (pairs // TOP_K)[:, None] * K + ks[None, :]
    else:
        xp = x + sorted_rows[:, None] * K + ks[None, :]
    first_row = expert * (1 + GATED) * N + read_rows
    wp = weight + first_row[:, None] * K + ks[None, :]
    up = tl.cast(N, tl.int64) * K
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x_tile = tl.load(xp + k, mask=live[:, None], other=0.0)
            w_tile = tl.load(wp + k)
        else:
            inside = (ks < K - k)[None, :]
            x_tile = tl.load(xp + k, mask=live[:, None] & inside, other=0.0)
            w_tile = tl.load(wp + k, mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, w_tile.T, acc, input_precision="ieee")
        if GATED:
            if EVEN_K:
                u_tile = tl.load(wp + up + k)
            else:
                u_tile = tl.load(wp + up + k, mask=inside, other=0.0)
            if SWAP:
                acc_up = tl.dot(u_tile, x_tile.T, acc_up, input_precision="ieee")
            else:
                acc_up = tl.dot(x_tile, u_tile.T, acc_up, input_precision="ieee")
    if SWAP:
        acc = acc.T
        acc_up = acc_up.T
    if HAS_BIAS:
        acc += tl.load(bias + first_row).to(tl.float32)[None, :]
    if FIRST:
        if GATED:
            if HAS_BIAS:
                acc_up += tl.load(bias + first_row + N).to(tl.float32)[None, :]
            acc = gate_and_up(acc, acc_up, ACTIVATION)
        else:
            acc = apply_gate(acc, ACTIVATION)
        out_rows = sorted_rows
    else:
        acc = acc * tl.load(pair_weights + pairs, mask=live, other=0.0)[:, None]
        out_rows = pairs
    inside_out = live[:, None] if EVEN_N else live[:, None] & (rows < N)[None, :]
    tl.store(out + out_rows[:, None] * N + rows[None, :], acc.to(out.dtype.element_ty), mask=inside_out)


@triton.jit
def _combine_kernel(
    y,  # [tokens, TOP_K, N], weighted
    residual,  # [tokens, N]
    out,  # [tokens, N]
    N,
    scale,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program sums BLOCK columns of one token. Grid (tokens, cdiv(N, BLOCK))."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(y + (token * TOP_K + j) * N + columns, mask=inside, other=0.0).to(tl.float32)
    total = total * scale
    if HAS_RESIDUAL:
        total += tl.load(residual + token * N + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * N + columns, total.to(out.dtype.element_ty), mask=inside)


def default_grouped_config(pairs_per_expert: float, itemsize: int) -> GroupedConfig:
    """A choice for shapes nobody has measured; a pipeline that fits two programs on a multiprocessor."""
    if itemsize == 4:
        return GroupedConfig(16, TileConfig(32, 32, 2, 4), TileConfig(32, 32, 2, 4))
    if pairs_per_expert <= 24:
        return GroupedConfig(16, TileConfig(64, 128, 3, 4, True), TileConfig(64, 128, 4, 4, True))
    if pairs_per_expert <= 96:
        return GroupedConfig(64, TileConfig(64, 64, 4, 4), TileConfig(128, 64, 4, 4))
    return GroupedConfig(128, TileConfig(128, 64, 3, 8), TileConfig(128, 64, 4, 8))


def grouped_experts(
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
    config: GroupedConfig,
) -> torch.Tensor:
    """`experts` for any number of tokens; all tensors contiguous."""
    tokens, width = hidden.shape
    top_k, num_experts = chosen.shape[1], gate_up.shape[0]
    plan = make_plan(chosen, num_experts, config.block_m)
    inner, by_pair = (
        torch.empty(tokens * top_k, n, dtype=hidden.dtype, device=hidden.device) for n in (down.shape[2], width)
    )
    for x, weight, bias, out, tile, gate in (
        (hidden, gate_up, gate_up_bias, inner, config.gate_up, activation),
        (inner, down, down_bias, by_pair, config.down, ""),
    ):
        n, k = out.shape[1], weight.shape[2]
        num_n_tiles = triton.cdiv(n, tile.block_n)
        launch(
            _grouped_kernel,
            (plan.max_blocks * num_n_tiles,),
            x,
            weight,
            weight if bias is None else bias,
            weights,
            plan.order,
            plan.blocks,
            out,
            n,
            num_n_tiles,
            K=k,
            TOP_K=top_k,
            BLOCK_M=config.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            STAGES=tile.num_stages,
            SWAP=tile.swap,
            ACTIVATION=gate,
            GATED=gate not in ("", *UNGATED),
            HAS_BIAS=bias is not None,
            EVEN_N=n % tile.block_n == 0,
            num_warps=tile.num_warps,
        )
    result = torch.empty_like(hidden)
    block = min(1024, next_power_of_2(width))
    launch(
        _combine_kernel,
        (tokens, triton.cdiv(width, block)),
        by_pair,
        by_pair if residual is None else residual,
        result,
        width,
        scale,
        TOP_K=top_k,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
    )
    return result
