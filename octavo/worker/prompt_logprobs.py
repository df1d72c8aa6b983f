"""Log probabilities of prompt tokens, for the rows that ask: computed chunk by chunk beside the prefill."""

from dataclasses import dataclass

import torch

from octavo.context import StepContext
from octavo.layers.causal_lm import CausalLM
from octavo.ops.logits import top_logprobs
from octavo.types.outputs import TokenLogprobs
from octavo.types.sampling_params import SamplingParams
from octavo.types.step import SchedulerOutput
from octavo.worker.rows import Rows

# Positions whose logits are held at once: bounds the memory to this many rows of the vocabulary.
ROWS_AT_ONCE = 256


@dataclass(slots=True)
class PromptScores:
    """Scores of one step: for each request's index, chosen ids and log probabilities of its chunk's positions."""

    pieces: dict[int, list[tuple[torch.Tensor, ...]]]  # (chosen ids, chosen logprobs, ranks, top ids, top logprobs)

    def to_host(self) -> "PromptScores":
        """Start the copy to the host."""
        return PromptScores(
            {i: [tuple(t.to("cpu", non_blocking=True) for t in piece) for piece in p] for i, p in self.pieces.items()}
        )

    def entries(self) -> dict[int, list[TokenLogprobs]]:
        """As plain data, once the copy has arrived."""
        return {
            index: [
                TokenLogprobs([chosen, *ids], [logprob, *logprobs], rank)
                for piece in pieces
                for chosen, logprob, rank, ids, logprobs in zip(*(t.tolist() for t in piece), strict=True)
            ]
            for index, pieces in self.pieces.items()
        }


class PromptLogprobs:
    """Knows which rows want scores for their prompt, and how many."""

    def __init__(self, model: CausalLM, rows: Rows):
        self.model = model
        self.rows = rows
        self.wanted: dict[int, int] = {}  # row -> k

    def add_row(self, row: int, params: SamplingParams) -> None:
        if params.prompt_logprobs is not None:
            self.wanted[row] = params.prompt_logprobs

    def remove_row(self, row: int) -> None:
        self.wanted.pop(row, None)

    def collect(self, step: SchedulerOutput, hidden_states: torch.Tensor, context: StepContext) -> PromptScores | None:
        """Score the chunk's prompt positions; position p is scored by the logits of p - 1, so a prompt's first has none."""
        if not self.wanted:
            return None
        starts, ends = context.query_start_loc_cpu, context.seq_lens_cpu
        assert starts is not None and ends is not None
        pieces: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        for index, row in enumerate(step.rows):
            if row not in self.wanted:
                continue
            first = ends[index] - step.num_scheduled_tokens[index]  # position of the chunk's first token
            count = min(ends[index], int(self.rows.num_prompt_np[row]) - 1) - first
            for at in range(0, count, ROWS_AT_ONCE):
                size = min(ROWS_AT_ONCE, count - at)
                begin = starts[index] + at
                logits = self.model.logits(hidden_states[begin : begin + size])
                chosen = self.rows.token_ids[row, first + at + 1 : first + at + size + 1]
                pieces.setdefault(index, []).append(_scores(logits, self.wanted[row], chosen))
        return PromptScores(pieces) if pieces else None


def _scores(logits: torch.Tensor, k: int, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
    k = logits.shape[-1] if k == -1 else k
    chosen_logprob, rank, top_ids, top = top_logprobs(logits, k, chosen)
    return chosen.clone(), chosen_logprob, rank, top_ids, top
