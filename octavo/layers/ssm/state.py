"""`RowState`: what a recurrent layer keeps of a request: tensors of fixed shape, however long the request is.

A request keeps one row of the worker for its life, so its state lies under the row's number, and the scheduler has nothing to
hand out. A request that begins, or begins again after preemption, finds the last owner's state in its row; zeros are taken
in its place, the state before the first token. States of prefixes are not kept: prefix caching is off for models with
such layers.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from octavo.context import StepContext, get_step_context
from octavo.ops.ssm.requests import Requests

# (inputs [requests, tokens each, hidden], their states) → (outputs of the inputs' shape, their states after).
Recurrence = Callable[[torch.Tensor, list[torch.Tensor]], tuple[torch.Tensor, list[torch.Tensor]]]


class RowState(nn.Module):
    """The states of one layer. `layout` gives (shape, dtype) of each of its tensors, for one request."""

    def __init__(self, layout: Sequence[tuple[tuple[int, ...], torch.dtype]]):
        super().__init__()
        self.layout = list(layout)
        self.states: list[torch.Tensor] = []

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's state."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.layout)

    def allocate(self, num_rows: int, device: torch.device) -> None:
        """Make room for `num_rows` requests."""
        self.states = [torch.zeros(num_rows, *shape, dtype=dtype, device=device) for shape, dtype in self.layout]

    def run(self, recurrence: Recurrence, inputs: torch.Tensor) -> torch.Tensor:
        """A step's tokens [tokens, hidden] through a recurrence that knows nothing of ragged batches: all requests at once
        where each has one token, one after the other where not.
        """
        context = get_step_context()
        if context.max_query_len == 1:
            return self._run(context, slice(None), recurrence, inputs[:, None])[:, 0]
        starts = context.query_start_loc_cpu
        assert starts is not None
        parts = []
        for r, (start, end) in enumerate(itertools.pairwise(starts)):
            if start < end:
                parts.append(self._run(context, slice(r, r + 1), recurrence, inputs[None, start:end])[0])
        return torch.cat(parts)

    def _run(self, context: StepContext, requests: slice, recurrence: Recurrence, inputs: torch.Tensor) -> torch.Tensor:
        rows, is_new = self._rows(context, requests)
        states = [
            torch.where(is_new.view(-1, *[1] * (kept.dim() - 1)), 0, kept.index_select(0, rows)).to(kept.dtype)
            for kept in self.states
        ]
        out, states = recurrence(inputs, states)
        for kept, state in zip(self.states, states, strict=True):
            kept.index_copy_(0, rows, state.to(kept.dtype))
        return out

    @staticmethod
    def _rows(context: StepContext, requests: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Their rows, and which of them begin in this step."""
        assert context.rows is not None, "recurrent layers need to know the rows of a step's requests"
        starts = context.query_start_loc
        is_new = context.seq_lens <= starts[1:] - starts[:-1]
        return context.rows[requests].long(), is_new[requests]


def row_states(model: nn.Module) -> list[RowState]:
    """The states of a model's recurrent layers."""
    return [module for module in model.modules() if isinstance(module, RowState)]


def step_requests() -> Requests:
    """The running step as the recurrent operators take it."""
    context = get_step_context()
    assert context.rows is not None, "recurrent layers need to know the rows of a step's requests"
    return Requests(
        context.rows, context.query_start_loc, context.seq_lens, context.max_query_len, context.query_start_loc_cpu
    )
