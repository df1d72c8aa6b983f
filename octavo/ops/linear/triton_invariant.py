"""Provider "triton_invariant" of `linear`: a token's result does not depend, in any bit, on how many tokens there are.

What fixes the bits is the order of the sums. K is cut into as many parts as N and K alone demand; a part is summed up by
matrix instructions of 16 products each, in the order of K; the parts are added up in their order. How a product is spread
over the device may then follow the number of tokens: which tile a token shares with others changes nothing for it, and parts
may be summed up by programs side by side (few tokens) or by one after the other (many), with the same additions.

The weights are the left operand, which gives the matrix instruction its 64 rows even for a single token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.activation import gated_activation
from octavo.ops.linear import linear
from octavo.ops.norm import rms_norm
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import counters, launch, scratch

# Part of what fixes the bits, as are the parts that `num_parts` gives.
BLOCK_K = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
_PART_TILE = 64
_MAX_PARTS = 8
# Tiles of tokens that share their weights in L2 are computed side by side.
_NEIGHBOURS = 8


@triton.jit
def _sum_part(
    wp,
    xp,
    first_k,
    ks,
    live,
    w_live,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """W · x over the SPAN columns from first_k on, [BLOCK_N, TOKENS] float32; columns from K on count as zeros."""
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for k in tl.range(first_k, first_k + SPAN, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x_tile = tl.load(xp + k, mask=live, other=0.0)
            if EVEN_N:
                w_tile = tl.load(wp + k)
            else:
                w_tile = tl.load(wp + k, mask=w_live, other=0.0)
        else:
            inside = (ks < K - k)[None, :]
            x_tile = tl.load(xp + k, mask=live & inside, other=0.0)
            w_tile = tl.load(wp + k, mask=w_live & inside, other=0.0)
        acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]
    residual,  # [M, N]
    out,  # [M, N]
    partials,  # [PARTS, M, N] float32, SIDE_BY_SIDE
    arrivals,  # [tiles of N * tiles of M] int32, zero, SIDE_BY_SIDE
    M,
    N,
    scale,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N outputs of TOKENS tokens, or one part of their sums. Grid (tiles, PARTS or 1)."""
    if PDL:
        gdc_launch_dependents()
    num_n = tl.cdiv(N, BLOCK_N)
    num_m = tl.cdiv(M, TOKENS)
    # NEIGHBOURS tiles of tokens for each tile of weights, then the next tile of weights.
    tile = tl.program_id(0)
    group = tile // (NEIGHBOURS * num_n)
    group_size = tl.minimum(num_m - group * NEIGHBOURS, NEIGHBOURS)
    inner = tile % (NEIGHBOURS * num_n)
    ms = (group * NEIGHBOURS + inner % group_size) * TOKENS + tl.arange(0, TOKENS)
    ns = inner // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    SPAN: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + PARTS - 1) // PARTS * BLOCK_K
    EVEN_K: tl.constexpr = K % (BLOCK_K * PARTS) == 0
    live = (ms < M)[:, None]
    w_live = (ns < N)[:, None]
    wp = weight + ns.to(tl.int64)[:, None] * K + ks[None, :]
    xp = x + ms.to(tl.int64)[:, None] * K + ks[None, :]
    at = ms.to(tl.int64)[:, None] * N + ns[None, :]
    inside = live & (ns < N)[None, :]
    if PDL:
        gdc_wait()
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    if SIDE_BY_SIDE:
        part = tl.program_id(1)
        acc = _sum_part(
            wp, xp, part * SPAN, ks, live, w_live, K, SPAN, BLOCK_N, TOKENS, BLOCK_K, EVEN_K, EVEN_N, STAGES,
        )  # fmt: skip
        tl.store(partials + part.to(tl.int64) * M * N + at, acc.T, mask=inside)
        # All threads' sums must be written before one thread announces them.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            y = tl.zeros([TOKENS, BLOCK_N], tl.float32)
            for p in tl.static_range(PARTS):
                y += tl.load(partials + tl.cast(p, tl.int64) * M * N + at, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(y, bias, residual, out, ns, at, inside, N, scale, HAS_BIAS, HAS_RESIDUAL)
            tl.store(arrivals + tile, 0)
    else:
        for part in tl.static_range(PARTS):
            total += _sum_part(
                wp, xp, part * SPAN, ks, live, w_live, K, SPAN, BLOCK_N, TOKENS, BLOCK_K, EVEN_K, EVEN_N, STAGES,
            )  # fmt: skip
        _finish(total.T, bias, residual, out, ns, at, inside, N, scale, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _finish(y, bias, residual, out, ns, at, inside, N, scale, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Bias, residual and the store; fused multiplications are spelt out, so that every compilation rounds alike."""
    if HAS_BIAS:
        y += tl.load(bias + ns, mask=ns < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        r = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.fma(y, scale + tl.zeros_like(y), r)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def num_parts(n: int, k: int, block_k: int) -> int:
    """Parts that K is cut into: about 256 programs for one tile of tokens, of at least four steps each."""
    parts, tiles = 1, -(-n // _PART_TILE)
    while parts < _MAX_PARTS and tiles * parts < 192 and k >= 4 * block_k * 2 * parts:
        parts *= 2
    return parts


@dataclass(frozen=True, slots=True)
class Spread:
    """How a product is spread over the device; none of it changes a bit."""

    tokens: int
    block_n: int
    num_stages: int
    num_warps: int
    side_by_side: bool


def spread_for(m: int, n: int, dtype: torch.dtype) -> Spread:
    """The spread for m tokens and n results."""
    if dtype == torch.float32:
        # Products of float32 run on the CUDA cores with both operands in registers; larger tiles spill.
        return Spread(16, 32, 2, 4, side_by_side=m <= 64)
    for tokens, num_stages in ((16, 6), (32, 5), (64, 4)):
        if m <= tokens:
            return Spread(tokens, 64, num_stages, 4, side_by_side=True)
    if m <= 128:
        return Spread(128, 64, 4, 4, side_by_side=True)
    # Parts go side by side as long as there are fewer tiles than multiprocessors.
    return Spread(128, 128, 4, 8, side_by_side=-(-m // 128) * -(-n // 128) < 132)


def _accepts(x, weight, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0) -> bool:
    tensors = [t for t in (x, weight, bias, norm_weight, residual) if t is not None]
    return (
        x.dim() == 2
        and runs_on_triton(x)
        and x.dtype in BLOCK_K
        and all(t.dtype == x.dtype and t.is_contiguous() for t in tensors)
    )


@linear.register("triton_invariant", supported=has_triton, accepts=_accepts, by_name_only=True)
def linear_triton_invariant(
    x, weight, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0, spread=None
):
    """Norm, product and activation one after the other, so that each rounds alike for every number of tokens."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    m, n = x.shape[0], weight.shape[0]
    added = residual if activation is None else None
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m:
        spread = spread or spread_for(m, n, x.dtype)
        _product(x, weight, bias, added, 1.0 if added is None else scale, out, spread)
    if activation is None:
        return out
    y = gated_activation(out, activation)
    return y if residual is None else torch.add(residual, y, alpha=scale)


def _product(x, weight, bias, residual, scale: float, out, spread: Spread) -> None:
    (m, k), n = x.shape, weight.shape[0]
    parts = num_parts(n, k, BLOCK_K[x.dtype])
    side_by_side = spread.side_by_side and parts > 1
    tiles = triton.cdiv(n, spread.block_n) * triton.cdiv(m, spread.tokens)
    partials = arrivals = x
    if side_by_side:
        partials = scratch("linear_parts", parts * m * n, x.device)
        arrivals = counters(tiles, x.device)
    launch(
        _linear_kernel,
        (tiles, parts if side_by_side else 1),
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        partials,
        arrivals,
        m,
        n,
        scale,
        K=k,
        PARTS=parts,
        SIDE_BY_SIDE=side_by_side,
        TOKENS=spread.tokens,
        BLOCK_N=spread.block_n,
        BLOCK_K=BLOCK_K[x.dtype],
        STAGES=spread.num_stages,
        NEIGHBOURS=_NEIGHBOURS,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        EVEN_N=n % spread.block_n == 0,
        num_warps=spread.num_warps,
    )
