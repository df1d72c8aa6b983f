"""Provider "triton" of `norm_route`: from the block's input to chosen experts in one kernel for a few tokens, else in two.

Programs share the router's rows among them; the last to finish a token (or tile of tokens) sees all its logits and chooses.
Few tokens: a program holds its rows in registers, asked for before the predecessor ends, and the norm rides along as in
`linear.triton_gemv`. Many: the norm is a kernel of its own, and the product runs on the tensor cores.
"""
# Triton has no star expressions, types its tuples by itself, and branches on constants only where they stand alone.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.moe import Routing, norm_route
from octavo.ops.norm import rms_norm
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import counters, is_recording, launch, next_power_of_2, scratch

# Up to this many tokens every program reads the router's rows for one token; above, re-reading them costs more than padding.
MAX_SINGLE_TOKENS = 32
_MAX_EXPERTS = 1024
_MAX_WIDTH = 1 << 14
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _choose(
    logits,  # [ROWS, PADDED_EXPERTS] float32
    choice_bias,
    tokens,  # [ROWS]
    live,  # [ROWS]
    weights,
    experts,
    scale,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
):
    """Choose and store, see `ops.moe.choose_experts`."""
    LOW: tl.constexpr = float("-inf")
    es = tl.arange(0, PADDED_EXPERTS)
    is_expert = (es < EXPERTS)[None, :]
    logits = tl.where(is_expert, logits, LOW)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
    choice = scores
    if HAS_CHOICE_BIAS:
        choice += tl.load(choice_bias + es, mask=es < EXPERTS, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(is_expert, choice, LOW)
    if GROUPS > 1:
        group = (es // (EXPERTS // GROUPS))[None, :]
        worth = tl.full([ROWS, PADDED_EXPERTS], LOW, tl.float32)  # of each expert's group
        for g in tl.static_range(GROUPS):
            inside = tl.where((group == g) & is_expert, choice, LOW)
            best = tl.max(inside, axis=1)
            if TOP2:
                first = tl.argmax(inside, axis=1)
                best += tl.max(tl.where(es[None, :] == first[:, None], LOW, inside), axis=1)
            worth = tl.where((group == g) & is_expert, best[:, None], worth)
        allowed = tl.zeros([ROWS, PADDED_EXPERTS], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            taken = (tl.argmax(worth, axis=1) // (EXPERTS // GROUPS))[:, None] == group
            allowed = tl.where(taken, 1, allowed)
            worth = tl.where(taken, LOW, worth)
        choice = tl.where(allowed > 0, choice, LOW)
    ks = tl.arange(0, PADDED_K)[None, :]
    chosen = tl.zeros([ROWS, PADDED_K], tl.int32)
    chosen_scores = tl.zeros([ROWS, PADDED_K], tl.float32)
    for j in tl.static_range(TOP_K):
        # Clamped: among logits that are not numbers, the padding could win and point outside the weights.
        best = tl.minimum(tl.argmax(choice, axis=1), EXPERTS - 1)[:, None]
        here = es[None, :] == best
        chosen = tl.where(ks == j, best, chosen)
        chosen_scores = tl.where(ks == j, tl.sum(tl.where(here, scores, 0.0), axis=1)[:, None], chosen_scores)
        choice = tl.where(here, LOW, choice)
    if RENORMALIZE:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=1) + 1e-20)[:, None]
    place = tokens[:, None] * TOP_K + ks
    inside = live[:, None] & (ks < TOP_K)
    tl.store(experts + place, chosen, mask=inside)
    tl.store(weights + place, chosen_scores * scale, mask=inside)


@triton.jit
def _norm_route_kernel(
    x,  # [tokens, K]
    gamma,  # [K]
    router,  # [EXPERTS, K]
    router_bias,  # [EXPERTS]
    choice_bias,  # [EXPERTS]
    hidden,  # [tokens, K]: x normalised
    logits,  # [tokens, EXPERTS] float32
    weights,  # [tokens, TOP_K]
    experts,  # [tokens, TOP_K]
    arrivals,  # [tokens] int32, zero
    eps,
    scale,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    HAS_ROUTER_BIAS: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_E logits of one token. Grid (cdiv(EXPERTS, BLOCK_E), tokens)."""
    if PDL:
        gdc_launch_dependents()
    NUM_CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    es = part * BLOCK_E + tl.arange(0, BLOCK_E)
    read_es = tl.minimum(es, EXPERTS - 1).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    w_tiles = ()
    gammas = ()
    for c in tl.static_range(NUM_CHUNKS):
        inside = ks < K - c * BLOCK_K
        w_tiles = w_tiles + (
            tl.load(router + read_es[:, None] * K + c * BLOCK_K + ks[None, :], mask=inside[None, :], other=0.0),
        )
        gammas = gammas + (tl.load(gamma + c * BLOCK_K + ks, mask=inside, other=0.0),)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for c in tl.static_range(NUM_CHUNKS):
        xv = tl.load(x + token * K + c * BLOCK_K + ks, mask=ks < K - c * BLOCK_K, other=0.0).to(tl.float32)
        squares += xv * xv
        acc += w_tiles[c].to(tl.float32) * (xv * gammas[c].to(tl.float32))[None, :]
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    y = tl.sum(acc, axis=1) * rstd
    if HAS_ROUTER_BIAS:
        y += tl.load(router_bias + read_es).to(tl.float32)
    tl.store(logits + token * EXPERTS + es, y, mask=es < EXPERTS)
    if part == 0:
        for c in tl.static_range(NUM_CHUNKS):
            inside = ks < K - c * BLOCK_K
            xv = tl.load(x + token * K + c * BLOCK_K + ks, mask=inside, other=0.0).to(tl.float32)
            normed = xv * rstd * gammas[c].to(tl.float32)
            tl.store(hidden + token * K + c * BLOCK_K + ks, normed.to(hidden.dtype.element_ty), mask=inside)
    # All threads' logits must be written before one thread announces them.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + token, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        all_es = tl.arange(0, PADDED_EXPERTS)[None, :]
        row = token + tl.arange(0, 1)
        found = tl.load(
            logits + row[:, None] * EXPERTS + all_es, mask=all_es < EXPERTS, other=0.0, cache_modifier=".cg"
        )
        _choose(
            found, choice_bias, row, row >= 0, weights, experts, scale, EXPERTS, PADDED_EXPERTS, 1, TOP_K, PADDED_K,
            SIGMOID, RENORMALIZE, GROUPS, TOP_GROUPS, TOP2, HAS_CHOICE_BIAS,
        )  # fmt: skip
        tl.store(arrivals + token, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    hidden,  # [num_tokens, K], normalised
    router,  # [EXPERTS, K]
    router_bias,  # [EXPERTS]
    choice_bias,  # [EXPERTS]
    logits,  # [num_tokens, EXPERTS] float32
    weights,  # [num_tokens, TOP_K]
    experts,  # [num_tokens, TOP_K]
    arrivals,  # [cdiv(num_tokens, ROWS)] int32, zero
    num_tokens,
    scale,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    HAS_ROUTER_BIAS: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_E logits of ROWS tokens. Grid (cdiv(EXPERTS, BLOCK_E), cdiv(num_tokens, ROWS))."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    tile = tl.program_id(1)
    es = part * BLOCK_E + tl.arange(0, BLOCK_E)
    read_es = tl.minimum(es, EXPERTS - 1).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    live = rows < num_tokens
    wide_rows = rows.to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        inside = ks < K - k
        h = tl.load(hidden + wide_rows[:, None] * K + k + ks[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(router + read_es[:, None] * K + k + ks[None, :], mask=inside[None, :], other=0.0)
        if h.dtype != w.dtype:  # routers kept in float32 beside 16-bit activations
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
    if HAS_ROUTER_BIAS:
        acc += tl.load(router_bias + read_es).to(tl.float32)[None, :]
    tl.store(logits + wide_rows[:, None] * EXPERTS + es[None, :], acc, mask=live[:, None] & (es < EXPERTS)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        all_es = tl.arange(0, PADDED_EXPERTS)[None, :]
        found = tl.load(
            logits + wide_rows[:, None] * EXPERTS + all_es,
            mask=live[:, None] & (all_es < EXPERTS),
            other=0.0,
            cache_modifier=".cg",
        )
        _choose(
            found, choice_bias, wide_rows, live, weights, experts, scale, EXPERTS, PADDED_EXPERTS, ROWS, TOP_K, PADDED_K,
            SIGMOID, RENORMALIZE, GROUPS, TOP_GROUPS, TOP2, HAS_CHOICE_BIAS,
        )  # fmt: skip
        tl.store(arrivals + tile, 0)


def _accepts(x, norm_weight, eps, router, routing, router_bias=None, choice_bias=None) -> bool:
    tensors = [t for t in (x, norm_weight, router, router_bias, choice_bias) if t is not None]
    return (
        runs_on_triton(x)
        and x.dim() == 2
        and x.shape[0] > 0
        and x.shape[1] <= _MAX_WIDTH
        and router.shape[0] <= _MAX_EXPERTS
        and all(t.is_contiguous() and t.dtype in _FLOATS for t in tensors)
    )


@norm_route.register("triton", supported=has_triton, accepts=_accepts)
def norm_route_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    routing: Routing,
    router_bias: torch.Tensor | None = None,
    choice_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One kernel up to MAX_SINGLE_TOKENS; the norm apart above."""
    tokens, k = x.shape
    num_experts = router.shape[0]
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=x.device)
    # Where launches are only noted, experts that torch computes must still be told of some that exist.
    allocate = torch.zeros if is_recording() else torch.empty
    experts = allocate(tokens, routing.top_k, dtype=torch.int32, device=x.device)
    logits = scratch("router_logits", tokens * num_experts, x.device)
    constants: dict[str, Any] = {
        "K": k,
        "EXPERTS": num_experts,
        "PADDED_EXPERTS": next_power_of_2(num_experts),
        "TOP_K": routing.top_k,
        "PADDED_K": next_power_of_2(routing.top_k),
        "SIGMOID": routing.scoring == "sigmoid",
        "RENORMALIZE": routing.renormalize,
        "GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.top_groups,
        "TOP2": routing.group_rank == "top2",
        "HAS_ROUTER_BIAS": router_bias is not None,
        "HAS_CHOICE_BIAS": choice_bias is not None,
    }
    router_bias = router if router_bias is None else router_bias
    choice_bias = router if choice_bias is None else choice_bias
    if tokens <= MAX_SINGLE_TOKENS:
        hidden = torch.empty_like(x)
        block_k = min(2048, next_power_of_2(k))
        # About 16 Ki weights a program, 64 a thread of 8 warps: the whole router is asked for at once.
        block_e = max(1, min(16, 16384 // (-(-k // block_k) * block_k), num_experts // 16))
        block_e = 1 << (block_e.bit_length() - 1)
        launch(
            _norm_route_kernel,
            (triton.cdiv(num_experts, block_e), tokens),
            x,
            norm_weight,
            router,
            router_bias,
            choice_bias,
            hidden,
            logits,
            weights,
            experts,
            counters(tokens, x.device),
            eps,
            routing.scale,
            BLOCK_K=block_k,
            BLOCK_E=block_e,
            num_warps=8,
            **constants,
        )
        return hidden, weights, experts
    hidden = rms_norm(x, norm_weight, eps)
    # Small batches spread the router over more programs; large ones read each token once.
    rows, block_e = (16, 32) if tokens <= 1024 else (64, min(128, max(16, next_power_of_2(num_experts))))
    launch(
        _route_kernel,
        (triton.cdiv(num_experts, block_e), triton.cdiv(tokens, rows)),
        hidden,
        router,
        router_bias,
        choice_bias,
        logits,
        weights,
        experts,
        counters(triton.cdiv(tokens, rows), x.device),
        tokens,
        routing.scale,
        BLOCK_K=64 if x.dtype == torch.float32 or router.dtype == torch.float32 else 128,
        BLOCK_E=block_e,
        ROWS=rows,
        num_warps=4,
        **constants,
    )
    return hidden, weights, experts
