"""From hidden states to what pooling requests are computed for: the rows, the heads, and the last touches on the host.

    hidden states of a step ─► a text: its last, first or mean row ─┐
                               each token's row ────────────────────┴► projection or classifier ─► host: cut, activate

A prompt may come in chunks: what its earlier ones contribute stays on the device with the request's row. Heads run once a
step over all rows that are complete; what differs from request to request is done on the host, in float32.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from octavo.config.engine import PoolingConfig
from octavo.context import StepContext
from octavo.types.outputs import Pooled
from octavo.types.pooling_params import PoolingParams
from octavo.types.step import ModelRunnerOutput, NewRow, SchedulerOutput
from octavo.worker.rows import Rows

# Token rows that go through a head at once: bounds the memory their logits take.
ROWS_AT_ONCE = 4096


@dataclass(slots=True)
class _RowState:
    """A request on its way."""

    params: PoolingParams
    task: str
    token_ids: list[int]
    pooling: str  # "all", "mean", "last" or "cls"
    pieces: list[torch.Tensor] = field(default_factory=list)  # what its chunks contribute, [n, hidden] each

    def take(self, chunk: torch.Tensor) -> None:
        """Take in a chunk's hidden states [tokens, hidden]."""
        if self.pooling == "all":
            self.pieces.append(chunk)
        elif self.pooling == "mean":
            self.pieces = [sum(self.pieces, start=chunk.float().sum(0, keepdim=True))]
        elif self.pooling == "last":
            self.pieces = [chunk[-1:]]
        elif not self.pieces:
            self.pieces = [chunk[:1]]

    def rows(self, step_tag_id: int | None) -> torch.Tensor:
        """The rows [n, hidden] that go through a head, once the prompt is complete."""
        if self.pooling == "mean":
            return self.pieces[0] / len(self.token_ids)
        rows = torch.cat(self.pieces)
        if self.pooling == "all" and step_tag_id is not None:
            rows = rows[[i for i, token_id in enumerate(self.token_ids) if token_id == step_tag_id]]
        return rows


@dataclass(slots=True)
class PooledStep:
    """A step's results: for each complete request its index in the step, its state, and its rows [n, width] float32."""

    config: PoolingConfig
    found: list[tuple[int, _RowState, torch.Tensor]]

    def to_host(self) -> "PooledStep":
        """Start the copy to the host."""
        found = [(index, state, rows.to("cpu", non_blocking=True)) for index, state, rows in self.found]
        return PooledStep(self.config, found)

    def fill(self, output: ModelRunnerOutput) -> None:
        """Write the results, once the copy has arrived. A request whose numbers are not finite fails."""
        output.pooled, output.errors = {}, {}
        for index, state, rows in self.found:
            values = finish(rows.numpy(), state.task, state.params, self.config)
            if np.isfinite(values).all():
                shown = values if state.pooling == "all" else values[0]
                output.pooled[index] = Pooled(list(shown.shape), shown.astype("<f4", copy=False).tobytes())
            else:
                output.errors[index] = "the model's output is not finite; a wider data type (dtype) may help."


class Pooler:
    """Owns what rows keep between the chunks of a prompt."""

    def __init__(self, model: Any, config: PoolingConfig, rows: Rows):
        self._model = model
        self._config = config
        self._rows = rows
        self._states: dict[int, _RowState] = {}

    def add_row(self, new: NewRow) -> None:
        """Begin a request, or begin it again."""
        params = new.pooling_params
        assert params is not None
        task = params.task or self._config.tasks[0]
        pooling = "all" if task.startswith("token") else self._config.pooling
        if self._model.pools_texts:
            pooling = "last"  # of one row
        self._states[new.row] = _RowState(params, task, new.token_ids, pooling)

    def remove_row(self, row: int) -> None:
        self._states.pop(row, None)

    def token_types(self, step: SchedulerOutput) -> np.ndarray | None:
        """[tokens] of a step of whole prompts: which text of a pair each token is of; None: all of the first."""
        starts = [self._states[row].params.segment_start for row in step.rows]
        if all(start is None for start in starts):
            return None
        types = [np.zeros(length, dtype=np.int64) for length in step.num_scheduled_tokens]
        for of_request, start in zip(types, starts, strict=True):
            of_request[len(of_request) if start is None else start :] = 1
        return np.concatenate(types)

    def collect(self, step: SchedulerOutput, hidden_states: torch.Tensor, context: StepContext) -> PooledStep:
        """Take in a step's hidden states [tokens, hidden]; the results of the requests whose prompts are complete."""
        starts, ends = context.query_start_loc_cpu, context.seq_lens_cpu
        assert starts is not None and ends is not None
        complete: list[tuple[int, _RowState, torch.Tensor]] = []
        for index, row in enumerate(step.rows):
            state = self._states[row]
            if self._model.pools_texts:
                state.take(hidden_states[index : index + 1])
            else:
                state.take(hidden_states[starts[index] : starts[index + 1]])
            if ends[index] == int(self._rows.num_prompt_np[row]):
                tag = state.params.step_tag_id
                if tag is None and self._config.token_pooling == "step":
                    tag = self._config.step_tag_id
                complete.append((index, state, state.rows(tag)))
        return PooledStep(self._config, self._through_heads(complete))

    def _through_heads(
        self, complete: list[tuple[int, _RowState, torch.Tensor]]
    ) -> list[tuple[int, _RowState, torch.Tensor]]:
        """The same with the heads' outputs: one call for all requests of a kind."""
        done = []
        for is_classified in (False, True):
            group = [entry for entry in complete if entry[1].task.endswith("classify") is is_classified]
            if not group:
                continue
            head = self._model.classifier if is_classified else self._model.projection
            rows = torch.cat([rows for _, _, rows in group]).float()
            if head is not None:
                rows = torch.cat([head(part) for part in rows.split(ROWS_AT_ONCE)])
            parts = rows.split([len(rows) for _, _, rows in group])
            done += [(index, state, part) for (index, state, _), part in zip(group, parts, strict=True)]
        return done


def finish(rows: np.ndarray, task: str, params: PoolingParams, config: PoolingConfig) -> np.ndarray:
    """What the client gets of the rows [n, width] a head gave: cut, calibrated, activated."""
    if task.endswith("embed"):
        dimensions = params.dimensions or config.dimensions
        return activate(rows[:, :dimensions], _activation(params, config, "normalize"))
    columns = params.returned_token_ids or config.returned_token_ids
    if columns is not None:
        rows = rows[:, columns]
    if config.logit_mean is not None:
        rows = rows - np.float32(config.logit_mean)
    if config.logit_sigma is not None:
        rows = rows / np.float32(config.logit_sigma)
    return activate(rows, _activation(params, config, "sigmoid" if rows.shape[1] == 1 else "softmax"))


def _activation(params: PoolingParams, config: PoolingConfig, usual: str) -> str:
    if params.use_activation is None:
        return config.activation
    if not params.use_activation:
        return "identity"
    return usual if config.activation == "identity" else config.activation


def activate(rows: np.ndarray, activation: str) -> np.ndarray:
    """Each row normalised to length 1, or made probabilities."""
    with np.errstate(over="ignore"):  # exp of a very negative logit: its sigmoid is 0
        if activation == "normalize":
            return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), np.float32(1e-12))
        if activation == "sigmoid":
            return 1 / (1 + np.exp(-rows))
        if activation == "softmax":
            exponents = np.exp(rows - rows.max(-1, keepdims=True))
            return exponents / exponents.sum(-1, keepdims=True)
    return rows
