"""What the front counts about requests, for whoever shows it: numbers here, no metric library.

A stat logger gets both records of a step in one call. Times are seconds; token counts are tokens.
"""

from dataclasses import dataclass, field
from typing import Protocol

from octavo.types.stats import SchedulerStats


@dataclass(slots=True)
class FinishedRequest:
    """One answer that ended; a request with n > 1 gives n of these."""

    finish_reason: str  # stop, length, abort or error
    index: int  # of the n answers; 0 stands for the request where something is counted once
    n: int
    max_tokens: int | None
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    e2e_seconds: float = 0.0  # arrival to end
    queue_seconds: float = 0.0  # arrival to first scheduled
    prefill_seconds: float = 0.0  # first scheduled to first token
    decode_seconds: float = 0.0  # first token to last token
    inference_seconds: float = 0.0  # first scheduled to last token

    @property
    def seconds_per_output_token(self) -> float:
        """Mean over the tokens after the first; 0 for an answer of one token."""
        return self.decode_seconds / (self.num_generation_tokens - 1) if self.num_generation_tokens > 1 else 0.0


@dataclass(slots=True)
class IterationStats:
    """What one step meant for requests."""

    num_prompt_tokens: int = 0  # of requests whose first token came in this step, once for all n answers
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_generation_tokens: int = 0
    time_to_first_token: list[float] = field(default_factory=list)  # one entry an answer that started
    inter_token_latency: list[float] = field(default_factory=list)  # one entry an answer that went on
    finished: list[FinishedRequest] = field(default_factory=list)
    num_engine_restarts: int = 0


class StatLogger(Protocol):
    """Shows statistics. `record` is called on the event loop after every step and must be quick."""

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        """Take in one step. Either may be missing: an abort between steps has no scheduler statistics."""

    def log(self) -> None:
        """Say what there is to say; called every `log_stats_interval` seconds while the engine is open."""
