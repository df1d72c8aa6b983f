"""Pairs sorted by expert, and cut into blocks of rows that share an expert: what grouped products work through.

    order  [pairs]               the pair at each row; rows of an expert stand together
    blocks [1 + 3 * max_blocks]  number of blocks, then for each: expert, first row, number of rows (1 … block_m)

Everything stays on the device; the grids that use it have room for the most blocks there can be.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton_utils import counters, launch, next_power_of_2, scratch

# One program sorts this many pairs; more are counted and placed by many.
_MAX_SINGLE_PAIRS = 4096
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's docstring."""

    order: torch.Tensor
    blocks: torch.Tensor
    block_m: int
    max_blocks: int


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    experts,  # [num_pairs]
    counts,  # [EXPERTS] int32
    num_pairs,
    PADDED_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program counts CHUNK pairs. Grid (cdiv(num_pairs, CHUNK),)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pairs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = pairs < num_pairs
    count = tl.histogram(tl.load(experts + pairs, mask=inside, other=0), PADDED_EXPERTS, mask=inside)
    tl.atomic_add(counts + tl.arange(0, PADDED_EXPERTS), count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_pairs"])
def _plan_kernel(
    experts,  # [num_pairs]
    counts,  # [EXPERTS] int32; zero again afterwards
    cursors,  # [EXPERTS] int32: the next free row of each expert
    order,  # [num_pairs]
    blocks,
    num_pairs,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: where each expert's rows begin, and the blocks; SINGLE counts and places the pairs as well."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    es = tl.arange(0, PADDED_EXPERTS)
    if SINGLE:
        pairs = tl.arange(0, PADDED_PAIRS)
        live = pairs < num_pairs
        ids = tl.load(experts + pairs, mask=live, other=0)
        count = tl.histogram(ids, PADDED_EXPERTS, mask=live)
    else:
        count = tl.load(counts + es, mask=es < EXPERTS, other=0)
        tl.store(counts + es, 0, mask=es < EXPERTS)
    first = tl.cumsum(count, axis=0) - count
    tl.store(cursors + es, first, mask=es < EXPERTS)
    num_blocks = (count + BLOCK_M - 1) // BLOCK_M
    block = tl.cumsum(num_blocks, axis=0) - num_blocks
    tl.store(blocks, tl.sum(num_blocks, axis=0))
    for i in range(tl.max(num_blocks, axis=0)):
        place = blocks + 1 + 3 * (block + i)
        inside = i < num_blocks
        tl.store(place, es, mask=inside)
        tl.store(place + 1, first + i * BLOCK_M, mask=inside)
        tl.store(place + 2, tl.minimum(count - i * BLOCK_M, BLOCK_M), mask=inside)
    if SINGLE:
        tl.debug_barrier()  # the cursors are read by other threads than wrote them
        # In whatever order pairs of an expert arrive: every row's result depends on itself alone.
        row = tl.atomic_add(cursors + ids, 1, mask=live, sem="relaxed")
        tl.store(order + row, pairs, mask=live)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    experts,  # [num_pairs]
    cursors,  # [EXPERTS] int32
    order,  # [num_pairs]
    num_pairs,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program places CHUNK pairs. Grid (cdiv(num_pairs, CHUNK),)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pairs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = pairs < num_pairs
    ids = tl.load(experts + pairs, mask=inside, other=0)
    row = tl.atomic_add(cursors + ids, 1, mask=inside, sem="relaxed")
    tl.store(order + row, pairs, mask=inside)


def make_plan(chosen: torch.Tensor, num_experts: int, block_m: int) -> Plan:
    """Sort the pairs of `chosen` [tokens, top_k] and cut them into blocks of up to `block_m` rows."""
    num_pairs, device = chosen.numel(), chosen.device
    # Each expert that is used has one block; every further one needs block_m more pairs.
    max_blocks = min(num_pairs, num_experts + max(0, num_pairs - num_experts) // block_m)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    blocks = torch.empty(1 + 3 * max_blocks, dtype=torch.int32, device=device)
    counts = counters(num_experts, device)
    cursors = scratch("expert_cursors", num_experts, device, torch.int32)
    padded_experts = next_power_of_2(num_experts)
    single = num_pairs <= _MAX_SINGLE_PAIRS
    grid = (triton.cdiv(num_pairs, _CHUNK),)
    if not single:
        launch(_count_kernel, grid, chosen, counts, num_pairs, PADDED_EXPERTS=padded_experts, CHUNK=_CHUNK)
    launch(
        _plan_kernel,
        (1,),
        chosen,
        counts,
        cursors,
        order,
        blocks,
        num_pairs,
        EXPERTS=num_experts,
        PADDED_EXPERTS=padded_experts,
        PADDED_PAIRS=max(16, next_power_of_2(num_pairs)) if single else 16,
        BLOCK_M=block_m,
        SINGLE=single,
        num_warps=8,
    )
    if not single:
        launch(_place_kernel, grid, chosen, cursors, order, num_pairs, CHUNK=_CHUNK)
    return Plan(order, blocks, block_m, max_blocks)
