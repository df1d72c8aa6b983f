"""`prepare_inputs` and `store_sampled` as one small Triton kernel each, so that a decode step's inputs cost one launch."""

import triton
import triton.language as tl

from octavo.ops.inputs import prepare_inputs, store_sampled
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import launch

TOKENS_AT_ONCE = 256
TABLE_AT_ONCE = 512


@triton.jit
def _prepare_kernel(
    rows,  # [requests]
    starts,  # [requests + 1]
    num_computed,  # [max_rows + 1]
    token_ids,  # [max_rows + 1, max_len]
    table,  # [max_rows + 1, width]
    input_ids,  # [tokens]
    positions,  # [tokens]
    seq_lens,  # [requests]
    slots,  # [tokens]
    step_table,  # [requests, width]
    max_len,
    width,
    scratch,
    block_size,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One request: its tokens' ids, positions and slots, its length, its block table. FIRST: also what all groups share."""
    r = tl.program_id(0)
    row = tl.load(rows + r).to(tl.int64)
    start = tl.load(starts + r)
    count = tl.load(starts + r + 1) - start
    computed = tl.load(num_computed + row)
    valid = row < scratch
    length = tl.where(valid, computed + count, 0)
    for at in range(0, count, TOKENS):
        i = at + tl.arange(0, TOKENS)
        live = i < count
        position = computed + i
        block = tl.load(table + row * width + position // block_size, mask=live, other=0).to(tl.int64)
        slot = tl.where(valid, block * block_size + position % block_size, -1)
        tl.store(slots + start + i, slot, mask=live)
        if FIRST:
            token = tl.load(token_ids + row * max_len + position, mask=live, other=0)
            tl.store(input_ids + start + i, token.to(tl.int64), mask=live)
            tl.store(positions + start + i, position.to(tl.int64), mask=live)
    used = tl.cdiv(length, block_size)
    for at in range(0, used, COLUMNS):
        c = at + tl.arange(0, COLUMNS)
        block = tl.load(table + row * width + c, mask=c < used, other=0)
        tl.store(step_table + r.to(tl.int64) * width + c, block, mask=c < used)
    if FIRST:
        tl.store(seq_lens + r, length)
        tl.store(num_computed + row, length)


@prepare_inputs.register("triton", supported=has_triton, accepts=lambda rows, *_: runs_on_triton(rows))
def _prepare_inputs_triton(
    rows,
    token_request,
    query_start_loc,
    num_computed,
    token_ids,
    block_tables,
    block_sizes,
    input_ids,
    positions,
    seq_lens,
    slot_mappings,
    step_tables,
):
    # The first group's launch advances the counters, so it comes last.
    for group in reversed(range(len(block_tables))):
        table = block_tables[group]
        launch(
            _prepare_kernel,
            (rows.shape[0],),
            rows,
            query_start_loc,
            num_computed,
            token_ids,
            table,
            input_ids,
            positions,
            seq_lens,
            slot_mappings[group],
            step_tables[group],
            token_ids.shape[1],
            table.shape[1],
            num_computed.shape[0] - 1,
            block_sizes[group],
            FIRST=group == 0,
            TOKENS=TOKENS_AT_ONCE,
            COLUMNS=TABLE_AT_ONCE,
        )


@triton.jit
def _store_kernel(sampled, rows, seq_lens, token_ids, num, max_len, scratch, BLOCK: tl.constexpr):
    """BLOCK requests: token_ids[row, seq_len] = sampled; out-of-range ones go to the scratch row."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < num
    length = tl.load(seq_lens + i, mask=live, other=0)
    row = tl.load(rows + i, mask=live, other=0)
    fits = length < max_len
    row = tl.where(fits, row, scratch).to(tl.int64)
    token = tl.load(sampled + i, mask=live, other=0)
    tl.store(token_ids + row * max_len + tl.where(fits, length, 0), token.to(tl.int32), mask=live)


@store_sampled.register("triton", supported=has_triton, accepts=lambda sampled, *_: runs_on_triton(sampled))
def _store_sampled_triton(sampled, rows, seq_lens, token_ids):
    num = sampled.shape[0]
    launch(
        _store_kernel,
        (triton.cdiv(num, 128),),
        sampled,
        rows,
        seq_lens,
        token_ids,
        num,
        token_ids.shape[1],
        token_ids.shape[0] - 1,
        BLOCK=128,
    )
