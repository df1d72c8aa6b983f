"""Whose tokens a step has and where their states lie; cutting them into chunks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, repr=False)
class Requests:
    """Request r's tokens are query_start_loc[r] … query_start_loc[r + 1], its states lie in row rows[r]."""

    rows: torch.Tensor  # [num] int32
    query_start_loc: torch.Tensor  # [num + 1] int32
    seq_lens: torch.Tensor  # [num] int32: tokens of the request once this step's are done
    max_query_len: int
    query_start_loc_cpu: Sequence[int] | None = None  # None inside a captured graph

    def __repr__(self) -> str:
        return f"{len(self.rows)} requests of at most {self.max_query_len} tokens"

    def load(self, states: torch.Tensor) -> torch.Tensor:
        """states [rows, …] → the requests' own [num, …] in float32: zeros for those that begin in this step."""
        is_new = self.seq_lens <= self.query_start_loc.diff()
        kept = states.index_select(0, self.rows).float()
        return kept.masked_fill_(is_new.view(-1, *[1] * (states.dim() - 1)), 0.0)

    def store(self, states: torch.Tensor, new: torch.Tensor) -> None:
        """Write the requests' states back."""
        states.index_copy_(0, self.rows.long(), new.to(states.dtype))

    def chunks(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """The first `size` tokens of every request, then the next `size` of those that have more, and so on.

        Yields (requests [n], their tokens [n, ≤ size], which of these there are, bool; None: all of them).
        """
        device = self.rows.device
        if self.max_query_len == 1:
            each = torch.arange(len(self.rows), device=device)
            yield each, each[:, None], None
            return
        starts = torch.tensor(self.query_start_loc_cpu or self.query_start_loc.tolist())
        lens = starts.diff()
        for first in range(0, self.max_query_len, size):
            active = torch.nonzero(lens > first)[:, 0]
            place = torch.arange(first, min(first + size, self.max_query_len))
            inside = place < lens[active, None]
            tokens = starts[active, None] + torch.where(inside, place, 0)
            yield active.to(device), tokens.to(device), inside.to(device)


# (state [n, …], which tokens there are, inputs [n, tokens, …] each) → (outputs [n, tokens, …], state after)
ChunkStep = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def scan_chunks(
    requests: Requests,
    states: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    size: int,
    step: ChunkStep,
    out: torch.Tensor,
) -> torch.Tensor:
    """Run `step` over the chunks of all requests, each from the state the last left. inputs [tokens, …]; fills `out`."""
    state = requests.load(states)
    for active, tokens, inside in requests.chunks(size):
        every = len(active) == len(state)
        y, new = step(state if every else state[active], inside, *(x[tokens] for x in inputs))
        if every:
            state = new
        else:
            state[active] = new
        if inside is None:
            out[tokens] = y.to(out.dtype)
        else:
            out[tokens[inside]] = y[inside].to(out.dtype)
    requests.store(states, state)
    return out


# (tokens before, new tokens) of a decode step's requests, and of a mixed one's: for operators' inputs.
LENS = (((9, 1), (0, 1), (3, 1)), ((0, 70), (7, 2), (5, 1), (0, 1), (2, 3)))


def make_requests(device: str, *lens: tuple[int, int]) -> Requests:
    """Of (tokens before, new tokens) each, in rows in reverse order."""
    starts = [0]
    for _, new in lens:
        starts.append(starts[-1] + new)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    seq_lens = ints([before + new for before, new in lens])
    return Requests(ints(range(len(lens))[::-1]), ints(starts), seq_lens, max(new for _, new in lens), starts)
