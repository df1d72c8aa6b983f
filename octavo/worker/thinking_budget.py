"""`thinking_token_budget`: reasoning that has used up its tokens is closed by force, one token of the end mark a step.

Everything is decided on the device: with two steps in flight the host does not know the latest tokens. A section counts
from the first token behind its opening; what forces it closed continues an end mark that the model has begun by itself.
"""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.types.sampling_params import ReasoningSection
from octavo.types.step import NewRow
from octavo.worker.logits_processors import LogitsProcessor, ProcessorStep
from octavo.worker.rows import upload

# States of a row besides the position that its section is open from.
_NOT_OPEN, _CLOSED = -1, -2
_NO_TOKEN = -1


class ThinkingBudget(LogitsProcessor):
    """The rows with a budget."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._opened_at = torch.full((num_rows,), _CLOSED, dtype=torch.int32, device=device)  # or a state
        self._sections: dict[int, tuple[int, ReasoningSection]] = {}  # row -> (budget, section)
        self._assembled_for: list[int] | None = None

    def add_row(self, row: int, new: NewRow) -> None:
        budget, section = new.sampling_params.thinking_token_budget, new.sampling_params.reasoning
        if section is None or budget is None or budget < 0:
            return
        self._opened_at[row] = _state(new.token_ids, new.num_prompt_tokens, section)
        self._sections[row] = budget, section
        self.rows.add(row)
        self._assembled_for = None

    def remove_row(self, row: int) -> None:
        super().remove_row(row)
        if self._sections.pop(row, None) is not None:
            self._assembled_for = None

    def apply(self, logits: torch.Tensor, step: ProcessorStep) -> None:
        if self._assembled_for != step.rows_cpu:
            self._assemble(step.rows_cpu)
        rows, ends = step.rows[self._indices].long(), step.seq_lens[self._indices]
        # The newest tokens first, one more than the longest mark; none from the prompt. [n, width + 1]
        back = torch.arange(1, self._width + 2, dtype=torch.int32, device=self.device)
        places = ends[:, None] - back
        newest = step.token_ids[rows[:, None], places.clamp(min=0).long()]
        newest = torch.where(places >= step.num_prompt[rows][:, None], newest, _NO_TOKEN - 1)

        opened_at = self._opened_at[rows]
        is_opening = _suffix_matches(newest, self._starts).gather(1, self._start_lengths[:, None])[:, 0]
        is_closing = (newest[:, :1] == self._closers).any(dim=1)
        is_closing &= _suffix_matches(newest[:, 1:], self._ends).gather(1, self._end_lengths[:, None] - 1)[:, 0]
        is_closing &= (opened_at >= 0) & (ends - opened_at >= self._end_lengths)
        opened_at = torch.where(is_opening & (opened_at == _NOT_OPEN), ends, opened_at)
        opened_at = torch.where(is_closing, _CLOSED, opened_at)
        self._opened_at[rows] = opened_at

        is_over = (opened_at >= 0) & (ends - opened_at >= self._budgets)
        written = _suffix_matches(newest, self._ends) & (self._lengths < self._end_lengths[:, None])
        num_written = (written * self._lengths).amax(dim=1, keepdim=True)
        forced = self._ends.gather(1, num_written).long()
        rows_of_logits = logits[self._indices]
        kept = torch.where(is_over[:, None], 0.0, rows_of_logits.gather(1, forced))
        rows_of_logits.masked_fill_(is_over[:, None], -float("inf")).scatter_(1, forced, kept)
        logits[self._indices] = rows_of_logits

    def _assemble(self, rows_cpu: list[int]) -> None:
        """What a step of these rows needs on the device."""
        found = [(i, *self._sections[row]) for i, row in enumerate(rows_cpu) if row in self.rows]
        sections = [section for _, _, section in found]
        self._width = max(max(len(s.start_token_ids), len(s.end_token_ids)) for s in sections)
        self._indices = self._send([i for i, _, _ in found]).long()
        self._budgets = self._send([budget for _, budget, _ in found])
        self._starts = self._send_padded([s.start_token_ids for s in sections], self._width)
        self._ends = self._send_padded([s.end_token_ids for s in sections], self._width)
        self._closers = self._send_padded([_closers(s) for s in sections], max(len(_closers(s)) for s in sections))
        self._start_lengths = self._send([len(s.start_token_ids) for s in sections]).long()
        self._end_lengths = self._send([len(s.end_token_ids) for s in sections]).long()
        self._lengths = torch.arange(self._width + 1, device=self.device)
        self._assembled_for = list(rows_cpu)

    def _send(self, values: Sequence[int]) -> torch.Tensor:
        return upload(np.array(values, dtype=np.int32), self.device)

    def _send_padded(self, lists: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        padded = [[*values, *[_NO_TOKEN] * (width - len(values))] for values in lists]
        return upload(np.array(padded, dtype=np.int32), self.device)


def _suffix_matches(newest: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """For each length k from 0, whether the newest k tokens are the first k of the mark. [n, width + 1]

    newest [n, at least width] has the newest token first, mark [n, width] is in reading order.
    """
    width = mark.shape[1]
    matches = [torch.ones_like(mark[:, 0], dtype=torch.bool)]
    matches += [(newest[:, :k].flip(1) == mark[:, :k]).all(dim=1) for k in range(1, width + 1)]
    return torch.stack(matches, dim=1)


def _closers(section: ReasoningSection) -> list[int]:
    """What may stand for the last token of the end mark."""
    return section.closing_token_ids or section.end_token_ids[-1:]


def _state(token_ids: Sequence[int], num_prompt: int, section: ReasoningSection) -> int:
    """The state of a row with these tokens: a resumed one has generated some."""
    start, end, closers = section.start_token_ids, section.end_token_ids, set(_closers(section))
    state = num_prompt if section.is_open else _NOT_OPEN
    for length in range(num_prompt + 1, len(token_ids) + 1):
        if state == _NOT_OPEN:
            if length - len(start) >= num_prompt and list(token_ids[length - len(start) : length]) == start:
                state = length
        elif (
            length - len(end) >= state
            and token_ids[length - 1] in closers
            and list(token_ids[length - len(end) : length - 1]) == end[:-1]
        ):
            return _CLOSED
    return state
