"""`Sampler`: from logits to token ids, with everything SamplingParams asks for.

    logits → (raw log probabilities) → processors → temperature, min_p, top_k, top_p → Gumbel-max → ids

Rows that ask for nothing but temperature and filters are *plain*: one operator, no host work that grows with the batch, and
capturable in a graph (`sample_plain`). What does not belong here: features that change logits (`logits_processors.py`).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from octavo.ops.logits import apply_token_bitmask, top_logprobs
from octavo.ops.sampling import filter_logits, sample
from octavo.types.outputs import TokenLogprobs
from octavo.types.step import ModelRunnerOutput, NewRow
from octavo.worker.logits_processors import LogitsProcessor, ProcessorChain, ProcessorStep
from octavo.worker.row_params import RowParams
from octavo.worker.rows import upload
from octavo.worker.thinking_budget import ThinkingBudget

NO_TOKEN_ERROR = (
    "the model's logits for this request hold no finite maximum: they are NaN, or every token is forbidden."
)


@dataclass(slots=True)
class SampledLogprobs:
    """Log probabilities of the rows that asked, on the device or (after `to_host`) on the host."""

    indices: list[int]  # in the step's logits
    counts: list[int]  # how many of the top tokens each asked for
    chosen: torch.Tensor  # [n] float32
    ranks: torch.Tensor  # [n] int32
    top_ids: torch.Tensor  # [n, max(counts)] int32
    top: torch.Tensor  # [n, max(counts)] float32

    def to_host(self) -> "SampledLogprobs":
        """Start the copy to the host."""
        moved = (_to_host(t) for t in (self.chosen, self.ranks, self.top_ids, self.top))
        return SampledLogprobs(self.indices, self.counts, *moved)

    def entries(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        """By index in the step's logits, once the copy has arrived; `token_ids` are the step's."""
        columns = (self.chosen.tolist(), self.ranks.tolist(), self.top_ids.tolist(), self.top.tolist())
        return {
            i: TokenLogprobs([token_ids[i], *ids[:count]], [chosen, *values[:count]], rank)
            for i, count, chosen, rank, ids, values in zip(self.indices, self.counts, *columns, strict=True)
        }


@dataclass(slots=True)
class SamplerOutput:
    """One token a row of logits, on the device or (after `to_host`) on the host."""

    token_ids: torch.Tensor  # [num] int32
    is_bad: torch.Tensor | None = None  # [num] bool: the row had no token to choose; its id is 0
    logprobs: SampledLogprobs | None = None
    errors: dict[int, str] = field(default_factory=dict)  # index in the logits -> what the host knows to be wrong

    def to_host(self) -> "SamplerOutput":
        """Start the copy to the host."""
        return SamplerOutput(
            _to_host(self.token_ids),
            None if self.is_bad is None else _to_host(self.is_bad),
            None if self.logprobs is None else self.logprobs.to_host(),
            self.errors,
        )

    def fill(self, output: ModelRunnerOutput, samples: list[bool]) -> None:
        """Put tokens, log probabilities and errors at the places of the step where `samples` holds.

        Called on the host's copy once it has arrived. A row in error gets no token.
        """
        places = [i for i, wanted in enumerate(samples) if wanted]
        token_ids = self.token_ids.tolist()
        for place, token_id in zip(places, token_ids, strict=True):
            output.sampled_token_ids[place] = [token_id]
        errors = dict(self.errors)
        if self.is_bad is not None and self.is_bad.any():
            for i in np.flatnonzero(self.is_bad.numpy()).tolist():
                errors.setdefault(i, NO_TOKEN_ERROR)
        for i in errors:
            output.sampled_token_ids[places[i]] = []
        if errors:
            output.errors = {places[i]: message for i, message in errors.items()}
        if self.logprobs is not None:
            entries = self.logprobs.entries(token_ids)
            output.logprobs = {places[i]: [entry] for i, entry in entries.items() if i not in errors}


class Sampler:
    """Keeps the sampling parameters of `num_rows` permanent rows (the scratch row included) and samples."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[LogitsProcessor] = (),
    ):
        self.vocab_size, self.device = vocab_size, device
        stage, _, kind = logprobs_mode.partition("_")
        self._wants_processed, self._normalizes = stage == "processed", kind == "logprobs"
        self.params = RowParams(
            num_rows,
            device,
            {
                "temperature": (torch.float32, 0.0),  # a row that nobody owns is greedy
                "top_k": (torch.int32, 0),
                "top_p": (torch.float32, 1.0),
                "min_p": (torch.float32, 0.0),
                "seed": (torch.int64, 0),
            },
        )
        # A budget has the last word: the token that it forces stands, whatever the others make of it.
        self.chain = ProcessorChain.builtin(
            num_rows, vocab_size, device, [*processors, ThinkingBudget(num_rows, device)]
        )
        self._random_rows: set[int] = set()
        self._filtered_rows: set[int] = set()
        self._logprob_rows: dict[int, int] = {}  # row -> number of top tokens
        self._failed_rows: dict[int, str] = {}
        self._logprob_indices_for: list[int] | None = None
        self._logprob_indices = torch.empty(0)

    def add_row(self, row: int, new: NewRow) -> None:
        """Take a request's parameters. One that cannot be taken is reported as an error by the steps that sample it."""
        p = new.sampling_params
        seed = p.seed if p.seed is not None else _seed_of(new.request_id)
        self.params.set(row, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, seed=seed)
        if not p.is_greedy:
            self._random_rows.add(row)
            if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0:
                self._filtered_rows.add(row)
        if p.logprobs is not None:
            self._logprob_rows[row] = min(p.logprobs, self.vocab_size) if p.logprobs >= 0 else self.vocab_size
            self._logprob_indices_for = None
        error = self.chain.add_row(row, new)
        if error is not None:
            self._failed_rows[row] = error

    def remove_row(self, row: int) -> None:
        """Forget a request; a row that has none may be removed too."""
        self.params.reset(row)
        self._random_rows.discard(row)
        self._filtered_rows.discard(row)
        if self._logprob_rows.pop(row, None) is not None:
            self._logprob_indices_for = None
        self._failed_rows.pop(row, None)
        self.chain.remove_row(row)

    def flush(self) -> None:
        """Send changed parameters to the device: before replaying a graph that holds `sample_plain`."""
        self.params.flush()

    @property
    def all_greedy(self) -> bool:
        """Whether no resident row draws at random."""
        return not self._random_rows

    @property
    def any_filter(self) -> bool:
        """Whether some resident row has top_k, top_p or min_p."""
        return bool(self._filtered_rows)

    def is_plain(self, rows_cpu: list[int]) -> bool:
        """Whether `sample_plain` does all that these rows ask for."""
        return (
            not (self._logprob_rows and not self._logprob_rows.keys().isdisjoint(rows_cpu))
            and not (self._failed_rows and not self._failed_rows.keys().isdisjoint(rows_cpu))
            and not self.chain.active(rows_cpu)
        )

    def sample_plain(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        all_greedy: bool = False,
        any_filter: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token_ids [num] int32, is_bad [num] bool) for logits [num, vocab], by temperature and filters alone.

        Reads only device memory that stays in place. A graph captured with the defaults serves any mix of rows; the
        properties of the same names tell when one captured with a narrower promise may run.
        """
        p = self.params
        return sample(
            logits, rows, seq_lens, p["temperature"], p["top_k"], p["top_p"], p["min_p"], p["seed"],
            all_greedy, any_filter,
        )  # fmt: skip

    def sample(
        self,
        logits: torch.Tensor,
        rows_cpu: list[int],
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        token_ids: torch.Tensor,
        num_prompt: torch.Tensor,
        bitmask: torch.Tensor | None = None,
        bitmask_indices: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Choose the next token of each row of logits [num, vocab]; `rows` [num] int32 is `rows_cpu` on the device.

        seq_lens [num] int32 counts the tokens a row holds, so it is the index of the token to be chosen; token_ids and
        num_prompt are the permanent rows'. A grammar's bitmask masks rows bitmask_indices [n] of the logits.
        The logits are left as they were.
        """
        self.flush()
        raw = logits
        errors = {}
        if self._failed_rows:
            errors = {i: self._failed_rows[row] for i, row in enumerate(rows_cpu) if row in self._failed_rows}
        active = self.chain.active(rows_cpu)
        if active or bitmask is not None:
            logits = logits.to(torch.float32, copy=True)
            if bitmask is not None:
                apply_token_bitmask(logits, bitmask, bitmask_indices)
            step = ProcessorStep(rows_cpu, rows, seq_lens, token_ids, num_prompt)
            errors = self.chain.apply(active, logits, step) | errors
        sampled, is_bad = self.sample_plain(logits, rows, seq_lens, self.all_greedy, self.any_filter)
        logprobs = None
        if self._logprob_rows and not self._logprob_rows.keys().isdisjoint(rows_cpu):
            logprobs = self._logprobs(logits if self._wants_processed else raw, rows_cpu, rows, sampled)
        return SamplerOutput(sampled, is_bad, logprobs, errors)

    def _logprobs(
        self, logits: torch.Tensor, rows_cpu: list[int], rows: torch.Tensor, sampled: torch.Tensor
    ) -> SampledLogprobs:
        """Score the rows that asked; the others' logits are not even read."""
        indices = [i for i, row in enumerate(rows_cpu) if row in self._logprob_rows]
        counts = [self._logprob_rows[rows_cpu[i]] for i in indices]
        if self._logprob_indices_for != rows_cpu:
            self._logprob_indices = upload(np.array(indices, dtype=np.int64), self.device)
            self._logprob_indices_for = list(rows_cpu)
        index = self._logprob_indices
        logits = logits[index]
        if self._wants_processed:
            row, p = rows[index].long(), self.params
            logits = filter_logits(logits, p["temperature"][row], p["top_k"][row], p["top_p"][row], p["min_p"][row])
        scores = top_logprobs(logits, max(counts), sampled[index], self._normalizes)
        return SampledLogprobs(indices, counts, *scores)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy into pinned memory; on the CPU, the tensor itself."""
    return tensor.to("cpu", non_blocking=True)


def _seed_of(request_id: str) -> int:
    """A seed for a request whose front drew none: still a function of the request alone, so a resumed one goes on alike."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little", signed=True)
