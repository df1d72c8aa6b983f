"""How a step is cut where chunks begin; that attention in chunks is right is tests/models' business."""

import pytest
import torch

from octavo.context import GroupMetadata, StepContext
from octavo.errors import ConfigError
from octavo.layers.attention.chunked import ChunkedAttention, cut_into_chunks


def context(starts: list[int], seq_lens: list[int], max_query_len: int) -> StepContext:
    table = torch.arange(1, 1 + 6 * len(seq_lens), dtype=torch.int32).view(-1, 6)
    groups = [GroupMetadata(table, torch.arange(starts[-1]), 4)]
    ints = (torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, seq_lens))
    return StepContext(len(seq_lens), starts[-1], *ints, max_query_len, 24, groups, starts, seq_lens)


def test_pieces_of_a_mixed_step():
    """A decode, a chunk from inside one chunk into the third, and a prompt that ends with its chunk."""
    cut = cut_into_chunks(context([0, 1, 14, 22], [9, 19, 8], 13), 8)
    assert cut.query_start_loc.tolist() == cut.query_start_loc_cpu == [0, 1, 1, 1, 3, 11, 14, 22, 22, 22]
    assert cut.seq_lens.tolist() == cut.seq_lens_cpu == [1, 0, 0, 8, 8, 3, 8, 0, 0]
    assert (cut.num_reqs, cut.max_query_len, cut.max_seq_len) == (9, 8, 8)
    tables = cut.groups[0].block_table
    assert [tables[i].tolist() for i in (0, 3, 4, 5, 6)] == [[3, 4], [7, 8], [9, 10], [11, 12], [13, 14]]


def test_a_decode_step_keeps_its_shape_and_its_padding():
    cut = cut_into_chunks(context([0, 1, 2], [16, 0], 1), 8)
    assert (cut.query_start_loc.tolist(), cut.seq_lens.tolist()) == ([0, 1, 2], [8, 0])
    assert cut.groups[0].block_table[0].tolist() == [3, 4]


def test_blocks_that_lie_in_two_chunks_are_refused():
    with pytest.raises(ConfigError, match="block_size=16 does not divide the model's attention_chunk_size=24"):
        ChunkedAttention(4, 2, 16, chunk=24).kv_spec(16, "float32")
