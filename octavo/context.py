"""`StepContext`: what layers with state need to know about the running step.

The runner fills one and sets it around the forward pass; only attention, recurrent-state and head layers read it.
All tensors are views of the runner's persistent buffers (or padded to a graph's size), never fresh allocations.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class GroupMetadata:
    """One KV group's view of the step."""

    block_table: torch.Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * block_size + offset; -1: do not write
    block_size: int


@dataclass(slots=True)
class EncoderOutputs:
    """What cross-attention reads, for each token of the step: the whole output of its request's encoder."""

    block_tables: dict[int, torch.Tensor]  # KV group → [num_tokens, max_blocks] int32
    query_start_loc: torch.Tensor  # [num_tokens + 1] int32: every token by itself
    seq_lens: torch.Tensor  # [num_tokens] int32: positions of the output
    max_seq_len: int  # upper bound


@dataclass(slots=True)
class StepContext:
    """The ragged batch. Request r's tokens are rows query_start_loc[r] … query_start_loc[r + 1] of the inputs."""

    num_reqs: int
    num_tokens: int
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32: tokens in the cache once this step's are written
    max_query_len: int
    max_seq_len: int  # upper bound; exact on the CPU, the graph's bound under capture
    groups: list[GroupMetadata]
    # Host copies for kernels that loop over requests on the CPU; None inside a captured graph.
    query_start_loc_cpu: list[int] | None = None
    seq_lens_cpu: list[int] | None = None
    # [n] rows of the hidden states that will be asked for logits, when the step needs no others; None: all rows.
    output_rows: torch.Tensor | None = None
    # [num_tokens] int64: of encoders that tell the two texts of a pair apart, which text each token is of; None: the first.
    token_types: torch.Tensor | None = None
    # [num_reqs] int32: the worker's row of each request, under which recurrent layers keep their states.
    rows: torch.Tensor | None = None
    encoder: EncoderOutputs | None = None  # of the decoder of an encoder-decoder model
    in_chunks: "StepContext | None" = None  # as chunked attention sees the step; made by the first such layer


_current: StepContext | None = None


def get_step_context() -> StepContext:
    """The running step's context; outside a step that is a programming error."""
    assert _current is not None, "no step is running: wrap the forward pass in set_step_context(...)"
    return _current


@contextlib.contextmanager
def set_step_context(context: StepContext) -> Iterator[None]:
    """Make `context` current for the forward pass."""
    global _current
    previous, _current = _current, context
    try:
        yield
    finally:
        _current = previous
