"""States by row: chunks and batches give what one pass gives, and a new request never sees the last one's state."""

import torch

from octavo.context import StepContext, set_step_context
from octavo.layers.ssm.state import RowState

NUM_ROWS = 3


def decayed_sum(inputs: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y_t = s_t, where s_t = s_(t-1) / 2 + x_t."""
    (state,) = states
    outs = []
    for t in range(inputs.shape[1]):
        state = state / 2 + inputs[:, t]
        outs.append(state)
    return torch.stack(outs, 1), [state]


def make_state() -> RowState:
    state = RowState([((4,), torch.float32)])
    state.allocate(NUM_ROWS, torch.device("cpu"))
    state.states[0].fill_(100.0)  # what earlier requests left
    return state


def step(state: RowState, *requests: tuple[int, int, torch.Tensor]) -> list[torch.Tensor]:
    """Run (row, tokens before, new tokens) of some requests in one step."""
    lens = [len(new) for _, _, new in requests]
    starts = [0]
    for count in lens:
        starts.append(starts[-1] + count)
    seq_lens = [before + len(new) for _, before, new in requests]
    context = StepContext(
        len(requests),
        starts[-1],
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        max(lens),
        max(seq_lens),
        [],
        starts,
        seq_lens,
        rows=torch.tensor([row for row, _, _ in requests], dtype=torch.int32),
    )
    with set_step_context(context):
        out = state.run(decayed_sum, torch.cat([new for _, _, new in requests]))
    return list(out.split(lens))


def test_chunks_and_batches_give_what_one_pass_gives():
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(9, 4, generator=rng) for _ in range(2))
    want_a, want_b = (decayed_sum(x[None], [torch.zeros(1, 4)])[0][0] for x in (a, b))
    state = make_state()
    got_a, got_b = [], []
    for first, last in ((0, 3), (3, 4), (4, 5), (5, 9)):
        out = step(state, (2, first, a[first:last]), (0, first, b[first:last]))
        got_a.append(out[0])
        got_b.append(out[1])
    torch.testing.assert_close(torch.cat(got_a), want_a)
    torch.testing.assert_close(torch.cat(got_b), want_b)


def test_a_row_begins_anew_with_a_new_request():
    state = make_state()
    for _ in range(2):
        (out,) = step(state, (1, 0, torch.ones(1, 4)))
        torch.testing.assert_close(out, torch.ones(1, 4))
    assert (state.states[0][[0, 2]] == 100.0).all()
