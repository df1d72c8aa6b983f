"""`EncoderRunner`: the encoders of the requests that begin in a step, before the decoder's step proper.

All of them are computed in one ragged pass, each whole, since an encoder looks both ways. Their output is kept as keys and
values in the blocks of cross-attention; nothing else of it is needed afterwards.
"""

from itertools import accumulate

import numpy as np
import torch

from octavo.context import StepContext, set_step_context
from octavo.layers.encoder_decoder import EncoderDecoder
from octavo.types.step import NewRow
from octavo.worker.rows import Rows, upload


class EncoderRunner:
    """Knows where the rows of one device keep the output of encoders. `max_len`: positions of the longest input."""

    def __init__(self, model: EncoderDecoder, rows: Rows, max_len: int):
        self.model = model
        self.rows = rows
        self.max_len = max_len

    def run(self, new_rows: list[NewRow]) -> None:
        """Encode what these rows bring; the rows are filled."""
        inputs = [(new.row, new.encoder_input.token_ids) for new in new_rows if new.encoder_input is not None]
        if inputs:
            self._encode([row for row, _ in inputs], [ids for _, ids in inputs])

    def run_dummy(self, num_tokens: int) -> None:
        """Encode made-up inputs of `num_tokens` positions in all, each as long as may be."""
        lens = [min(self.max_len, num_tokens - start) for start in range(0, num_tokens, self.max_len)]
        self._encode([self.rows.scratch] * len(lens), [[0] * length for length in lens])

    def _encode(self, rows: list[int], inputs: list[list[int]]) -> None:
        lens = [len(ids) for ids in inputs]
        starts = [0, *accumulate(lens)]
        sections = (
            np.concatenate([np.array(ids, dtype=np.int32) for ids in inputs]),
            np.concatenate([np.arange(length, dtype=np.int32) for length in lens]),
            np.repeat(np.array(rows, dtype=np.int32), lens),
            np.array(starts, dtype=np.int32),
            np.array(lens, dtype=np.int32),
        )
        sent = upload(np.concatenate(sections), self.rows.device)
        input_ids, positions, row, start, length = sent.split([len(section) for section in sections])
        context = StepContext(len(lens), starts[-1], start, length, max(lens), max(lens), [], starts, lens)
        with set_step_context(context):
            self.model.keep(self.model.encode(input_ids.long(), positions.long()), self._slots(row, positions))

    def _slots(self, row: torch.Tensor, positions: torch.Tensor) -> dict[int, torch.Tensor]:
        """Where the keys and values of each position go, in each group of cross-attention."""
        slots = {}
        for group in self.rows.cross_groups:
            size = self.rows.block_sizes[group]
            block = self.rows.block_tables[group][row.long(), (positions // size).long()].long()
            slots[group] = block * size + positions % size
        return slots
