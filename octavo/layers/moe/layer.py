"""`MoE`: what stands where a dense model has its MLP, called the same way."""

from typing import Any

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.linear import Linear
from octavo.layers.mlp import GATED_ACTIVATIONS, MLP, GatedMLP
from octavo.layers.moe.experts import Experts
from octavo.layers.norm import RMSNorm
from octavo.ops.moe import UNGATED, Routing, norm_route


class Router(nn.Module):
    """Chooses experts. Its weights stay in floating point whatever the other linears' format.

    `choice_bias`: a float32 bias, `e_score_correction_bias` in checkpoints, that counts for the choice and not for the weights.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, routing: Routing, bias: bool = False, choice_bias: bool = False
    ):
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_experts), requires_grad=False) if bias else None
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(num_experts, dtype=torch.float32), requires_grad=False) if choice_bias else None
        )

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The normalised x, and the weights and numbers of each token's experts."""
        return norm_route(x, norm.weight, norm.eps, self.weight, self.routing, self.bias, self.e_score_correction_bias)


class MoE(nn.Module):
    """residual + scale * (chosen experts + shared expert) of norm(x).

    `bias` gives biases to router and experts (GPT-OSS), `choice_bias` see `Router`; `shared_width` > 0 adds an MLP that
    every token passes; `gate_shared` weighs it by a sigmoid of its own (Qwen2-MoE).
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        num_experts: int,
        activation: str,
        routing: Routing,
        *,
        bias: bool = False,
        choice_bias: bool = False,
        shared_width: int = 0,
        gate_shared: bool = False,
    ):
        super().__init__()
        self.gate = Router(hidden_size, num_experts, routing, bias, choice_bias)
        self.experts = Experts(num_experts, hidden_size, width, GATED_ACTIVATIONS.get(activation, activation), bias)
        shared_class = MLP if activation in UNGATED else GatedMLP
        self.shared_experts = shared_class(hidden_size, shared_width, activation) if shared_width else None
        self.shared_expert_gate = Linear(hidden_size, 1) if gate_shared else None

    @classmethod
    def of(cls, cfg: HFConfig, routing: Routing, width_key: str = "moe_intermediate_size", **options: Any) -> "MoE":
        """The block a configuration describes; `width_key` holds an expert's width."""
        activation = cfg.choose("hidden_act", list(GATED_ACTIVATIONS), "silu")
        return cls(cfg.hidden_size, int(cfg.require(width_key)), cfg.num_experts, activation, routing, **options)

    def forward(self, x: torch.Tensor, norm: RMSNorm, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden, weights, chosen = self.gate(x, norm)
        if self.shared_experts is not None:
            # The normalised input is a tensor of its own, so the residual, which may be x, can be consumed from here on.
            if self.shared_expert_gate is None:
                residual = self.shared_experts(hidden, residual=residual, scale=scale)
            else:
                shared = self.shared_experts(hidden) * self.shared_expert_gate(hidden).sigmoid()
                residual = torch.add(residual, shared, alpha=scale)
        return self.experts(hidden, weights, chosen, residual, scale)
