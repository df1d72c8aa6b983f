"""Token embedding and output head."""

import torch
from torch import nn

from octavo.context import get_step_context
from octavo.layers.linear import Linear, LinearMethod
from octavo.layers.norm import RMSNorm
from octavo.ops.embedding import embedding


class Embedding(nn.Module):
    """Rows of a table, times `scale`. `method` is the weight format that took the table over, if one did."""

    method: LinearMethod | None = None

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.method is not None:
            return self.method.embed(self, input_ids)
        return embedding(input_ids, self.weight, self.scale)


class LMHead(Linear):
    """Hidden states to logits. Where a model ties it to its embedding, the loader lets both share one table.

    The final norm is its prologue: only the rows that need logits are normalised.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, bias: bool = False, logits_scale: float = 1.0, softcap: float = 0.0
    ):
        super().__init__(hidden_size, vocab_size, bias)
        self.logits_scale = logits_scale
        self.softcap = softcap

    def forward(self, hidden_states: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:  # type: ignore[override]
        logits = self.method.apply(self, hidden_states, norm, None, None, 1.0)
        if self.logits_scale != 1.0:
            logits = logits * self.logits_scale
        if self.softcap > 0:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


class TokenTypeEmbedding(Embedding):
    """What is added to a token for the text of a pair that it belongs to: all are of the first where nobody says."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        types = get_step_context().token_types
        return self.weight[0] if types is None else super().forward(types)
