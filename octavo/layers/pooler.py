"""Models that make vectors, classes or scores: what encoders offer the runner, and the heads behind the hidden states.

Heads are computed in float32 whatever the model's data type is: they are small, and a score is read to its last digits.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def float32_linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """A linear of a head."""
    return nn.Linear(in_features, out_features, bias, dtype=torch.float32).requires_grad_(False)


class Encoder(nn.Module):
    """Base of the encoders: `forward` gives the last hidden states; a request is computed whole.

    The class attributes are the checkpoint's side of the story, as in `CausalLM`.
    """

    packing: dict[str, tuple[str, ...]] = {}
    renames: dict[str, str] = {}
    ignored: tuple[str, ...] = ()
    tied: dict[str, str] = {}

    classifier: nn.Module | None  # [rows, hidden] float32 → [rows, labels]
    projection: nn.Module | None  # [rows, hidden] float32 → [rows, width of an embedding]
    has_token_types = False  # whether the two texts of a pair are told apart
    pools_texts = False  # `forward` gives a row a request, through the classifier already

    def __init__(self) -> None:
        super().__init__()
        self.classifier = self.projection = None

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens], positions [tokens] → hidden states [tokens, hidden]."""
        raise NotImplementedError

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Encoders end with their last norm, if they have one."""
        return hidden_states

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Rewrite one checkpoint tensor where a table cannot say it."""
        return ((name, tensor),)


class ClassifierHead(nn.Module):
    """out_proj(norm(activation(dense(x)))), of which dense and norm may be missing."""

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        activation: str | None = None,
        norm: nn.Module | None = None,
        bias: bool = True,
    ):
        super().__init__()
        self.dense = None if activation is None else float32_linear(hidden_size, hidden_size, bias)
        self.norm = norm
        self.out_proj = float32_linear(hidden_size, num_labels)
        self.activation = activation or "identity"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            x = ACTIVATIONS[self.activation](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.out_proj(x)


class Dense(nn.Module):
    """A `Dense` of sentence-transformers: activation(linear(x))."""

    def __init__(self, in_features: int, out_features: int, bias: bool, activation: str):
        super().__init__()
        self.linear = float32_linear(in_features, out_features, bias)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation](self.linear(x))
