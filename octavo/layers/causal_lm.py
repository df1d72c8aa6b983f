"""What every decoder-only language model offers the runner, and what it tells the loader."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from octavo.context import get_step_context
from octavo.layers.embedding import LMHead


def keep_output_rows(hidden_states: torch.Tensor) -> torch.Tensor:
    """The rows [n, hidden] that will be asked for logits: what comes after the last attention is not computed for others.

    A model calls it in its last layer. The MLP of one layer is 2-3 % of a prompt's arithmetic.
    """
    rows = get_step_context().output_rows
    return hidden_states if rows is None else hidden_states[rows]


class CausalLM(nn.Module):
    """Base of the causal models: `forward` gives hidden states before the final norm, `logits` finishes chosen rows.

    The class attributes are the checkpoint's side of the story, read by the loader:
    `packing` maps a packed module's name to the checkpoint names of its shards, in order; `renames` maps
    regexes to replacements in checkpoint names; `ignored` are regexes of tensors the model does not need.
    """

    packing: dict[str, tuple[str, ...]] = {}
    renames: dict[str, str] = {}
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    tied: dict[str, str] = {}

    lm_head: LMHead
    # By which embeddings that somebody else looked up are multiplied: where it is not the table's own business.
    given_embeds_scale = 1.0

    # What a model that pools has in the head's place, see `Encoder`.
    classifier: Callable[[torch.Tensor], torch.Tensor] | None
    projection: nn.Module | None
    has_token_types = False
    pools_texts = False

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input_ids [tokens], positions [tokens] → hidden states [tokens, hidden], or those of the context's `output_rows`."""
        raise NotImplementedError

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens] → what enters the first layer in their place, a fresh tensor [tokens, hidden]."""
        return self.model.embed_tokens(input_ids)  # type: ignore[union-attr, operator]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [rows, hidden] → [rows, vocab] in the model's dtype."""
        raise NotImplementedError

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [rows, hidden] as heads other than the model's own read them."""
        return self.model.norm(hidden_states)  # type: ignore[arg-type, operator]

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Rewrite one checkpoint tensor where a table cannot say it."""
        return ((name, tensor),)
