"""Embeddings that come with a request take the place of looked-up tokens, in the steps that compute such positions.

Those are prefill steps: they run by the model's own code with `inputs_embeds`, in which the rows of tokens are looked up
as always. A row is forgotten with the chunk that reaches the end of its embeddings, so decode steps know nothing of them.
"""

from collections.abc import Iterable

import numpy as np
import torch

from octavo.context import StepContext
from octavo.errors import ConfigError
from octavo.layers.causal_lm import CausalLM
from octavo.types.prompts import PromptEmbeds
from octavo.types.step import NewRow, SchedulerOutput
from octavo.worker.rows import upload


class InputEmbeds:
    """The rows whose next chunk begins inside their embeddings."""

    def __init__(self, model: CausalLM, dtype: torch.dtype, device: torch.device):
        self._model = model
        self._dtype, self._device = dtype, device
        self._given: dict[int, PromptEmbeds] = {}

    def add_row(self, new: NewRow) -> None:
        if new.prompt_embeds is not None and new.num_computed_tokens < new.prompt_embeds.num_tokens:
            self._given[new.row] = new.prompt_embeds

    def remove_row(self, row: int) -> None:
        self._given.pop(row, None)

    def concerns(self, rows: Iterable[int]) -> bool:
        """Whether a step of these rows computes given embeddings."""
        return bool(self._given) and not self._given.keys().isdisjoint(rows)

    def collect(self, step: SchedulerOutput, input_ids: torch.Tensor, context: StepContext) -> torch.Tensor | None:
        """What enters the first layer [tokens, hidden]; None when it is the tokens' embeddings throughout."""
        if not self.concerns(step.rows):
            return None
        starts, ends = context.query_start_loc_cpu, context.seq_lens_cpu
        assert starts is not None and ends is not None
        embeds = self._model.embed(input_ids[: context.num_tokens])
        for index, row in enumerate(step.rows):
            given = self._given.get(row)
            if given is None:
                continue
            first, last = ends[index] - step.num_scheduled_tokens[index], min(ends[index], given.num_tokens)
            embeds[starts[index] : starts[index] + last - first] = self._upload(given, first, last)
            if ends[index] >= given.num_tokens:
                del self._given[row]
        return embeds

    def _upload(self, given: PromptEmbeds, first: int, last: int) -> torch.Tensor:
        """Positions `first` to `last` on the device."""
        row_bytes = len(given.data) // given.num_tokens
        part = np.frombuffer(given.data, np.uint8)[first * row_bytes : last * row_bytes].copy()
        embeds = upload(part, self._device).view(self._dtype).view(last - first, -1)
        return embeds if self._model.given_embeds_scale == 1.0 else embeds * self._model.given_embeds_scale

    def worst_case(self, input_ids: torch.Tensor, hidden_size: int) -> torch.Tensor:
        """What `collect` makes of a step with nothing but given embeddings; ConfigError for a model that cannot have any."""
        embeds = self._model.embed(input_ids)
        if embeds.shape[1] != hidden_size:
            raise ConfigError(
                f"enable_prompt_embeds needs embeddings as wide as the hidden states, but this model's have "
                f"{embeds.shape[1]} and {hidden_size} numbers."
            )
        embeds.copy_(torch.zeros_like(embeds))
        return embeds
