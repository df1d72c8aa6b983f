"""`ChunkedAttention`: a token sees those of its own chunk of the sequence alone (Llama 4).

A request's new tokens are cut where chunks begin. To the operators each piece is a request of its own, whose block table
begins with its chunk's first block: what serves full attention serves this as it is.
"""

import dataclasses

import torch

from octavo.context import GroupMetadata, StepContext, get_step_context
from octavo.errors import ConfigError
from octavo.layers.attention.layer import PagedAttention
from octavo.types.kv_spec import KVSpec, SlidingWindowSpec


class ChunkedAttention(PagedAttention):
    """Causal self-attention over the `chunk` tokens from the last multiple of `chunk` on."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, chunk: int):
        super().__init__(num_heads, num_kv_heads, head_dim)
        self.chunk = chunk

    def kv_spec(self, block_size: int, dtype: str) -> KVSpec:
        """What this layer keeps: no token sees further back than the length of a chunk."""
        if self.chunk % block_size:
            raise ConfigError(
                f"block_size={block_size} does not divide the model's attention_chunk_size={self.chunk}; use one that does.",
                param="block_size",
            )
        return SlidingWindowSpec(self.num_kv_heads, self.head_dim, dtype, block_size, self.chunk)

    def step_context(self) -> StepContext:
        context = get_step_context()
        if context.in_chunks is None:
            context.in_chunks = cut_into_chunks(context, self.chunk)
        return context.in_chunks


def cut_into_chunks(context: StepContext, chunk: int) -> StepContext:
    """The same step with its requests in pieces, each within one chunk and with that chunk's keys alone.

    On the device, and of a shape that only the counts of the step decide: every request becomes as many pieces as the
    longest may have, the surplus ones empty.
    """
    count = -(-(context.max_query_len - 1) // chunk) + 1
    starts, lens, begins = _pieces(context.query_start_loc, context.seq_lens, chunk, count)
    starts_cpu = lens_cpu = None
    if context.query_start_loc_cpu is not None and context.seq_lens_cpu is not None:
        known_starts, known_lens = torch.tensor(context.query_start_loc_cpu), torch.tensor(context.seq_lens_cpu)
        starts_cpu, lens_cpu = (pieces.tolist() for pieces in _pieces(known_starts, known_lens, chunk, count)[:2])
    groups = []
    for group in context.groups:
        size, table = group.block_size, group.block_table
        columns = begins[:, :, None] // size + torch.arange(chunk // size, device=table.device)
        blocks = table.gather(1, columns.clamp(max=table.shape[1] - 1).flatten(1)).view(len(lens), -1)
        groups.append(GroupMetadata(blocks, group.slot_mapping, size))
    return dataclasses.replace(
        context,
        num_reqs=len(lens),
        query_start_loc=starts,
        seq_lens=lens,
        max_query_len=min(context.max_query_len, chunk),
        max_seq_len=min(context.max_seq_len, chunk),
        groups=groups,
        query_start_loc_cpu=starts_cpu,
        seq_lens_cpu=lens_cpu,
    )


def _pieces(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, chunk: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the pieces' tokens start [requests * count + 1], how far each reaches into its chunk [requests * count], and the
    positions where their chunks begin [requests, count]."""
    first = (seq_lens - query_start_loc.diff()).clamp(min=0)[:, None]
    begins = first // chunk * chunk + chunk * torch.arange(count, dtype=first.dtype, device=first.device)
    ends = seq_lens[:, None]
    starts = query_start_loc[:-1, None] + begins.maximum(first).minimum(ends) - first
    lens = (ends - begins).clamp(0, chunk)
    return torch.cat((starts.flatten(), query_start_loc[-1:])), lens.flatten(), begins
