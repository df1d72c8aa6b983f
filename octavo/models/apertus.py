"""Arcee and Apertus: Llama whose MLP has no gate, with a squared ReLU or the learned xIELU; Apertus normalises heads, too."""

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.mlp import MLP
from octavo.models.llama import LlamaForCausalLM, LlamaLayer
from octavo.models.qwen3 import Qwen3Attention


class ArceeLayer(LlamaLayer):
    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        activation = cfg.choose("hidden_act", ["relu2"], "relu2")
        return MLP(cfg.hidden_size, cfg.intermediate_size, activation, bool(cfg.get("mlp_bias", False)))


class ArceeForCausalLM(LlamaForCausalLM):
    layer_class = ArceeLayer


class XIELU(nn.Module):
    """A parabola above zero and an integrated ELU below, whose curvatures are learned (Huang and Schlag 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1), requires_grad=False) for _ in range(2))
        self.beta, self.eps = (nn.Parameter(torch.empty(()), requires_grad=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above = nn.functional.softplus(self.alpha_p) * x * x
        below = (torch.expm1(torch.minimum(x, self.eps)) - x) * (self.beta + nn.functional.softplus(self.alpha_n))
        return torch.where(x > 0, above, below) + self.beta * x


class ApertusLayer(LlamaLayer):
    attention_class = Qwen3Attention

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        cfg.choose("hidden_act", ["xielu"], "xielu")
        mlp = MLP(cfg.hidden_size, cfg.intermediate_size, "relu2", bool(cfg.get("mlp_bias", False)))
        mlp.activation = XIELU()
        return mlp


class ApertusForCausalLM(LlamaForCausalLM):
    layer_class = ApertusLayer
    renames = {
        r"\.attention_layernorm\.": ".input_layernorm.",
        r"\.feedforward_layernorm\.": ".post_attention_layernorm.",
        r"\.act_fn\.": ".activation.",
    }
