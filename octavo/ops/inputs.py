"""Step inputs gathered from the permanent rows, and sampled tokens put back: all on the device, nothing read back.

The last row of every row tensor is a scratch row that no request owns; a graph's padding requests point at it.
"""

import torch

from octavo.ops.registry import op


@op
def prepare_inputs(
    rows: torch.Tensor,
    token_request: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    token_ids: torch.Tensor,
    block_tables: list[torch.Tensor],
    block_sizes: list[int],
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mappings: list[torch.Tensor],
    step_tables: list[torch.Tensor],
) -> None:
    """Fill one step's inputs and advance the rows' counters.

    Read: rows [requests] int32, the permanent row of each request; token_request [tokens] int32, the request of each
    token; query_start_loc [requests + 1] int32; the rows' num_computed [max_rows + 1] int32, token_ids [max_rows + 1,
    max_len] int32 and, for each KV group, block_tables [max_rows + 1, max_blocks] int32 with `block_sizes` tokens a block.
    Written: input_ids, positions [tokens] int64; seq_lens [requests] int32; slot_mappings [tokens] int64 and step_tables
    [requests, max_blocks] int32 for each group; num_computed of the rows becomes seq_lens. Padding gets length 0, slot -1.
    """
    row = rows.long()
    valid = rows < num_computed.shape[0] - 1
    computed = num_computed[row]
    torch.mul(computed + query_start_loc[1:] - query_start_loc[:-1], valid, out=seq_lens)
    request = token_request.long()
    token_row = row[request]
    index = torch.arange(token_request.shape[0], device=rows.device, dtype=torch.int32)
    positions.copy_(computed[request] + index - query_start_loc[request])
    input_ids.copy_(token_ids[token_row, positions])
    for table, size, slots, step_table in zip(block_tables, block_sizes, slot_mappings, step_tables, strict=True):
        block = table[token_row, positions // size].long()
        slots.copy_(torch.where(valid[request], block * size + positions % size, -1))
        torch.index_select(table, 0, row, out=step_table)
    num_computed[row] = seq_lens


@op
def store_sampled(sampled: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Append sampled [n] to the token ids of rows [n] at index seq_lens [n], where the next step finds it.

    A token past the row's end (the request has reached the context's length) goes to the scratch row.
    """
    fits = seq_lens < token_ids.shape[1]
    row = torch.where(fits, rows, token_ids.shape[0] - 1).long()
    token_ids[row, (seq_lens * fits).long()] = sampled.to(token_ids.dtype)
