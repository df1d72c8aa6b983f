"""The C++ kernels at both ends of a decode step: inputs gathered from the rows, a token chosen and stored."""

import ctypes

import torch

from octavo.ops.cpu.attention import _reads
from octavo.ops.cpu.runtime import call, count, empty, is_available, most, runtime
from octavo.ops.cpu.structs import BEST_BYTES, MAX_GROUPS, ArgmaxArgs, GatherArgs, SampleArgs, StoreArgs
from octavo.ops.inputs import prepare_inputs, store_sampled
from octavo.ops.sampling import sample


def _accepts_gather(
    rows, token_request, query_start_loc, num_computed, token_ids, block_tables, block_sizes,
    input_ids, positions, seq_lens, slot_mappings, step_tables,
) -> bool:  # fmt: skip
    # The same memory as request of each token and as start of each request: one token each.
    is_decode = token_request.data_ptr() == query_start_loc.data_ptr() and token_request.shape[0] == rows.shape[0]
    return (
        is_decode
        and len(block_tables) <= MAX_GROUPS
        and all(_reads(t, torch.int32) for t in (rows, num_computed, token_ids, seq_lens, *block_tables, *step_tables))
        and all(_reads(t, torch.int64) for t in (input_ids, positions, *slot_mappings))
    )


@prepare_inputs.register("cpu", supported=is_available, accepts=_accepts_gather)
def _gather_decode_cpu(
    rows, token_request, query_start_loc, num_computed, token_ids, block_tables, block_sizes,
    input_ids, positions, seq_lens, slot_mappings, step_tables,
):  # fmt: skip
    num_requests = count(rows.shape[0])
    args = GatherArgs(
        rows=rows.data_ptr(),
        requests=ctypes.addressof(num_requests),
        num_computed=num_computed.data_ptr(),
        scratch_row=num_computed.shape[0] - 1,
        token_ids=token_ids.data_ptr(),
        token_stride=token_ids.shape[1],
        input_ids=input_ids.data_ptr(),
        positions=positions.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        num_groups=len(block_tables),
    )
    for i, (table, size, slots, step_table) in enumerate(
        zip(block_tables, block_sizes, slot_mappings, step_tables, strict=True)
    ):
        group = args.groups[i]
        group.block_table, group.width, group.block_size = table.data_ptr(), table.shape[1], size
        group.slots, group.step_table = slots.data_ptr(), step_table.data_ptr()
    kept = (
        num_requests,
        rows,
        num_computed,
        token_ids,
        *block_tables,
        input_ids,
        positions,
        seq_lens,
        *slot_mappings,
        *step_tables,
    )
    call("gather_decode", args, *kept)


def _accepts_sample(
    logits, rows, positions, temperature, top_k, top_p, min_p, seeds, all_greedy=False, any_filter=True
) -> bool:
    return (
        logits.dtype == torch.float32
        and not logits.is_cuda
        and logits.stride(-1) == 1
        and all(_reads(t, torch.int32) for t in (rows, positions, top_k))
        and all(map(_reads, (temperature, top_p, min_p)))
        and _reads(seeds, torch.int64)
    )


@sample.register("cpu", supported=is_available, accepts=_accepts_sample)
def _sample_cpu(logits, rows, positions, temperature, top_k, top_p, min_p, seeds, all_greedy=False, any_filter=True):
    num, vocab_size = logits.shape
    run, num_rows = runtime(), count(num)
    token_ids, is_bad = empty((num,), torch.int32), empty((num,), torch.bool)
    if all_greedy:  # each row by all threads
        workspace = run.workspace(most(num) * run.num_threads * BEST_BYTES)
        args = ArgmaxArgs(
            logits.data_ptr(),
            logits.stride(0),
            ctypes.addressof(num_rows),
            vocab_size,
            token_ids.data_ptr(),
            is_bad.data_ptr(),
            workspace.data_ptr(),
        )
        call("argmax", args, num_rows, workspace)
        return token_ids, is_bad
    workspace = run.workspace(run.num_threads * vocab_size * 4)
    sample_args = SampleArgs(
        logits.data_ptr(),
        logits.stride(0),
        ctypes.addressof(num_rows),
        vocab_size,
        *(
            t.data_ptr()
            for t in (rows, positions, temperature, top_p, min_p, top_k, seeds, token_ids, is_bad, workspace)
        ),
    )
    call("sample", sample_args, num_rows, rows, positions, temperature, top_p, min_p, top_k, seeds, workspace)
    return token_ids, is_bad


def _accepts_store(sampled, rows, seq_lens, token_ids) -> bool:
    return all(_reads(t, torch.int32) for t in (sampled, rows, seq_lens, token_ids))


@store_sampled.register("cpu", supported=is_available, accepts=_accepts_store)
def _store_sampled_cpu(sampled, rows, seq_lens, token_ids):
    num = count(sampled.shape[0])
    args = StoreArgs(
        sampled.data_ptr(),
        rows.data_ptr(),
        seq_lens.data_ptr(),
        ctypes.addressof(num),
        token_ids.data_ptr(),
        token_ids.shape[1],
        token_ids.shape[0] - 1,
    )
    call("store_sampled", args, num, rows, seq_lens, token_ids)
