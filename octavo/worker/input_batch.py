"""`InputBatch`: the persistent buffers one step's inputs live in, the same ones for graphs and eager steps.

The host fills one pinned staging buffer and sends it in one copy; everything else is computed on the device from the
permanent rows. Staging buffers rotate, since the device may still be reading the last one.
"""

import numpy as np
import torch

from octavo.context import EncoderOutputs, GroupMetadata, StepContext
from octavo.ops.inputs import prepare_inputs
from octavo.worker.rows import Rows

# Two steps may be in flight while a third is prepared.
NUM_STAGING = 3


class InputBatch:
    """Buffers for up to `max_requests` requests and `max_tokens` tokens."""

    def __init__(self, rows: Rows, max_requests: int, max_tokens: int):
        self.rows_state = rows
        self.max_requests, self.max_tokens = max_requests, max_tokens
        device = rows.device

        def ints(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # One buffer in the order of the host: rows, query_start_loc, token_request, logits_index, sampling rows.
        self.sent = ints(4 * max_requests + 1 + max_tokens)
        pin = device.type != "cpu"
        self._staging = [torch.zeros(len(self.sent), dtype=torch.int32, pin_memory=pin) for _ in range(NUM_STAGING)]
        self._turn = 0
        self.arange = torch.arange(max(max_requests, max_tokens) + 1, dtype=torch.int32, device=device)
        self.decode_rows = ints(max_requests)
        self._decode_rows_host: list[int] | None = None
        self.input_ids = ints(max_tokens, torch.int64)
        self.positions = ints(max_tokens, torch.int64)
        self.seq_lens = ints(max_requests)
        self.slot_mappings = [ints(max_tokens, torch.int64) for _ in rows.block_tables]
        self.step_tables = [
            torch.zeros(max_requests, table.shape[1], dtype=torch.int32, device=device) for table in rows.block_tables
        ]
        self.logits_index: torch.Tensor | None = None
        self.sampling_rows = self.decode_rows

    def prepare_mixed(self, rows: list[int], query_lens: list[int], sampling: list[int]) -> StepContext:
        """Fill the buffers for any mix of chunks and decodes; `sampling` are the indices of requests that need logits."""
        num, total = len(rows), sum(query_lens)
        starts = np.zeros(num + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        self._turn = (self._turn + 1) % NUM_STAGING
        staging = self._staging[self._turn].numpy()
        rows_np = np.array(rows, dtype=np.int32)
        sections = (
            rows_np,
            starts,
            np.repeat(np.arange(num, dtype=np.int32), query_lens),
            starts[1:][sampling] - 1,
            rows_np[sampling],
        )
        views, at = [], 0
        for section in sections:
            staging[at : at + len(section)] = section
            views.append(self.sent[at : at + len(section)])
            at += len(section)
        self.sent[:at].copy_(self._staging[self._turn][:at], non_blocking=True)
        row_view, start_view, request_view, self.logits_index, self.sampling_rows = views
        state = self.rows_state
        lens = state.num_computed_np[rows_np] + np.diff(starts)
        self._gather(row_view, request_view, start_view, num, total)
        state.num_computed_np[rows_np] = lens
        context = self.context(num, total, start_view, max(query_lens), int(lens.max()), starts.tolist(), lens.tolist())
        context.rows = row_view
        if state.cross_groups:
            token_rows = row_view.index_select(0, request_view)
            context.encoder = self._encoder_outputs(token_rows, int(state.encoder_lens_np[rows_np].max()))
        return context

    def prepare_dummy(self, num_tokens: int, num_requests: int) -> StepContext:
        """Fill the buffers for made-up prompts of `num_tokens` tokens in all, each of which needs logits."""
        lens = [num_tokens // num_requests + (i < num_tokens % num_requests) for i in range(num_requests)]
        scratch = self.rows_state.scratch
        context = self.prepare_mixed([scratch] * num_requests, lens, list(range(num_requests)))
        # The scratch row reports length 0; attention must do a real chunk's work.
        context.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        context.seq_lens_cpu = lens
        context.max_seq_len = max(lens)
        self.rows_state.num_computed_np[scratch] = 0
        return context

    def prepare_decode_rows(self, rows: list[int], padded: int) -> None:
        """Send the rows of a decode step (one token each) if they differ from the last decode step's, padded with scratch."""
        state = self.rows_state
        state.num_computed_np[rows] += 1
        wanted = rows + [state.scratch] * (padded - len(rows))
        if wanted != self._decode_rows_host:
            self._turn = (self._turn + 1) % NUM_STAGING
            staging = self._staging[self._turn]
            staging.numpy()[:padded] = wanted
            self.decode_rows[:padded].copy_(staging[:padded], non_blocking=True)
            self._decode_rows_host = wanted

    def gather_decode(self, num: int, max_seq_len: int) -> StepContext:
        """The device's part of a decode step of `num` requests: graph-capturable, nothing from the host but `decode_rows`."""
        starts = self.arange[: num + 1]
        self._gather(self.decode_rows[:num], self.arange[:num], starts, num, num)
        self.logits_index = None
        self.sampling_rows = self.decode_rows[:num]
        context = self.context(num, num, starts, 1, max_seq_len, None, None)
        context.rows = self.decode_rows[:num]
        if self.rows_state.cross_groups:
            context.encoder = self._encoder_outputs(context.rows, self.rows_state.max_encoder_len)
        return context

    def _encoder_outputs(self, token_rows: torch.Tensor, max_len: int) -> EncoderOutputs:
        """Where each token's encoder output lies; `token_rows` [tokens] are the tokens' rows."""
        state = self.rows_state
        return EncoderOutputs(
            {group: state.block_tables[group].index_select(0, token_rows) for group in state.cross_groups},
            self.arange[: len(token_rows) + 1],
            state.encoder_lens.index_select(0, token_rows),
            max_len,
        )

    def _gather(self, rows, token_request, starts, num: int, total: int) -> None:
        state = self.rows_state
        prepare_inputs(
            rows,
            token_request,
            starts,
            state.num_computed,
            state.token_ids,
            state.block_tables,
            state.block_sizes,
            self.input_ids[:total],
            self.positions[:total],
            self.seq_lens[:num],
            [slots[:total] for slots in self.slot_mappings],
            [table[:num] for table in self.step_tables],
        )

    def context(
        self,
        num: int,
        total: int,
        starts: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        starts_cpu: list[int] | None,
        lens_cpu: list[int] | None,
    ) -> StepContext:
        """A `StepContext` over the buffers."""
        groups = [
            GroupMetadata(table[:num], slots[:total], size)
            for table, slots, size in zip(
                self.step_tables, self.slot_mappings, self.rows_state.block_sizes, strict=True
            )
        ]
        return StepContext(
            num, total, starts, self.seq_lens[:num], max_query_len, max_seq_len, groups, starts_cpu, lens_cpu
        )
