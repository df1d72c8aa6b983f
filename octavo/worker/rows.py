"""Permanent rows: everything the device keeps about a running request, one row each for the request's life.

`apply` brings a scheduler's differences in; `prepare_inputs` (ops/inputs.py) reads the rows on the device. The counters have
a twin on the host in NumPy, which the host advances by the same rule, so nothing is ever read back.
"""

import numpy as np
import torch

from octavo.types.kv_spec import CrossAttentionSpec, KVCacheConfig
from octavo.types.step import NewBlocks, NewRow


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, without waiting for it: through pinned memory that the allocator recycles safely."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Rows:
    """`max_rows` rows and one scratch row (the last), where padding requests read and write."""

    def __init__(self, max_rows: int, max_len: int, device: torch.device, max_encoder_len: int = 0):
        self.device = device
        self.max_rows, self.max_len, self.max_encoder_len = max_rows, max_len, max_encoder_len
        self.scratch = max_rows
        self.token_ids = torch.zeros(max_rows + 1, max_len, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.num_prompt = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.num_computed_np = np.zeros(max_rows + 1, dtype=np.int32)
        self.num_prompt_np = np.zeros(max_rows + 1, dtype=np.int32)
        # Of encoder-decoder models: positions of the encoder's output. The scratch row reads one of the null block.
        self.encoder_lens = torch.ones(max_rows + 1, dtype=torch.int32, device=device)
        self.encoder_lens_np = np.ones(max_rows + 1, dtype=np.int32)
        self.cross_groups: list[int] = []  # the KV groups that keep it
        self.block_tables: list[torch.Tensor] = []
        self.block_sizes: list[int] = []

    def make_block_tables(self, config: KVCacheConfig) -> None:
        """Allocate a block table a KV group."""
        for index, group in enumerate(config.groups):
            size = group.spec.block_size
            if isinstance(group.spec, CrossAttentionSpec):
                self.cross_groups.append(index)
            # One block of slack: with two steps in flight a request may be given one token past its end.
            width = -(-max(self.max_len, self.max_encoder_len) // size) + 1
            self.block_tables.append(torch.zeros(self.max_rows + 1, width, dtype=torch.int32, device=self.device))
            self.block_sizes.append(size)

    def fill(self, new_rows: list[NewRow]) -> None:
        """Set rows up for requests: all that the host knows of them goes over in one copy, however many they are."""
        counters = np.array(
            [
                [new.row for new in new_rows],
                [new.num_computed_tokens for new in new_rows],
                [new.num_prompt_tokens for new in new_rows],
                [new.num_encoder_positions for new in new_rows],
            ],
            dtype=np.int32,
        )
        sections = [counters.ravel()]
        for new in new_rows:
            sections.append(np.array(new.token_ids, dtype=np.int32))
            sections.extend(np.array(ids, dtype=np.int32) for ids in new.block_ids)
        sent = upload(np.concatenate(sections), self.device)
        at = counters.size
        for new in new_rows:
            for table, ids in zip((self.token_ids, *self.block_tables), (new.token_ids, *new.block_ids), strict=True):
                table[new.row, : len(ids)] = sent[at : at + len(ids)]
                at += len(ids)
        rows, computed, prompt, encoder_lens = sent[: counters.size].view(4, -1)
        index = rows.long()
        self.num_computed[index] = computed
        self.num_prompt[index] = prompt
        if self.cross_groups:
            self.encoder_lens[index] = encoder_lens
        self.num_computed_np[counters[0]] = counters[1]
        self.num_prompt_np[counters[0]] = counters[2]
        self.encoder_lens_np[counters[0]] = counters[3]

    def add_blocks(self, new_blocks: list[NewBlocks]) -> None:
        """Write the blocks that rows got in this step: one scattered write a group, however many rows."""
        for group, table in enumerate(self.block_tables):
            changes = [change for change in new_blocks if change.group == group]
            if not changes:
                continue
            index = np.array(
                [(c.row, c.start + i, block) for c in changes for i, block in enumerate(c.block_ids)], dtype=np.int32
            )
            moved = upload(np.ascontiguousarray(index.T), self.device)
            table[moved[0].long(), moved[1].long()] = moved[2]
