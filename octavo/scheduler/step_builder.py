"""A step while the scheduler puts it together."""

from octavo.scheduler.request import Request
from octavo.types.step import NewBlocks, NewRow, SchedulerOutput


class StepBuilder:
    """Collects rows; rows of one token come first in the finished step, chunks behind them."""

    __slots__ = (
        "budget",
        "chunk_requests",
        "chunk_samples",
        "chunk_sizes",
        "is_short",
        "new_blocks",
        "new_rows",
        "requests",
        "rows",
        "samples",
        "step_id",
    )

    def __init__(self, step_id: int, budget: int):
        self.step_id = step_id
        self.budget = budget  # tokens left
        self.is_short = False  # somebody did not find the blocks it needed free
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[NewBlocks] = []
        # Rows of one token, in parallel. The scheduler's inner loop appends to the first two itself.
        self.requests: list[Request] = []
        self.rows: list[int] = []
        self.samples: list[bool] = []
        # Rows of more tokens, in parallel.
        self.chunk_requests: list[Request] = []
        self.chunk_sizes: list[int] = []
        self.chunk_samples: list[bool] = []

    def add(self, request: Request, num_tokens: int, samples: bool) -> None:
        """Let `request` compute `num_tokens` tokens, and sample one if `samples`."""
        self.budget -= num_tokens
        if num_tokens == 1:
            self.requests.append(request)
            self.rows.append(request.row)
            self.samples.append(samples)
        else:
            self.chunk_requests.append(request)
            self.chunk_sizes.append(num_tokens)
            self.chunk_samples.append(samples)

    def holds(self, request: Request) -> bool:
        """Whether `request` is in the step."""
        return any(other is request for other in self.requests + self.chunk_requests)

    @property
    def is_empty(self) -> bool:
        return not self.requests and not self.chunk_requests

    def _samples_a_grammar(self) -> bool:
        requests, samples = self.requests + self.chunk_requests, self.samples + self.chunk_samples
        return any(wanted and request.grammar is not None for request, wanted in zip(requests, samples, strict=True))

    def build(self, freed_rows: list[int], has_grammars: bool) -> SchedulerOutput:
        """The finished step. `has_grammars`: some running request follows one."""
        num_single = len(self.rows)
        return SchedulerOutput(
            step_id=self.step_id,
            freed_rows=freed_rows,
            new_rows=self.new_rows,
            new_blocks=self.new_blocks,
            rows=self.rows + [request.row for request in self.chunk_requests],
            num_scheduled_tokens=[1] * num_single + self.chunk_sizes,
            samples=self.samples + self.chunk_samples,
            total_num_scheduled_tokens=num_single + sum(self.chunk_sizes),
            awaits_masks=has_grammars and self._samples_a_grammar(),
        )
