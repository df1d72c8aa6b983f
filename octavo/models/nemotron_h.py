"""Nemotron-H: every layer is one mixer behind a norm: Mamba 2, attention without positions, an MLP, or experts.

MLPs are down(relu(up(x))²), experts too; where `moe_latent_size` is given, experts work in a narrower space of their own.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.linear import Linear, RowLinear
from octavo.layers.mlp import MLP
from octavo.layers.moe.experts import Experts
from octavo.layers.moe.layer import MoE
from octavo.layers.norm import RMSNorm
from octavo.models.deepseek import DeepseekLayer
from octavo.models.hybrid import mamba2_mixer
from octavo.models.llama import LlamaAttention, LlamaForCausalLM
from octavo.models.mamba import MambaForCausalLM, MixerLayer, mamba2_words

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


class LatentMoE(MoE):
    """Experts of `width` that read and write `latent` numbers a token, made of it by projections around them."""

    def __init__(self, hidden_size: int, latent: int, width: int, num_experts: int, **options: Any):
        super().__init__(hidden_size, width, num_experts, **options)
        self.experts = Experts(num_experts, latent, width, self.experts.activation)
        self.fc1_latent_proj = Linear(hidden_size, latent)
        self.fc2_latent_proj = RowLinear(latent, hidden_size)

    def forward(self, x: torch.Tensor, norm: RMSNorm, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden, weights, chosen = self.gate(x, norm)
        assert self.shared_experts is not None
        residual = self.shared_experts(hidden, residual=residual, scale=scale)
        y = self.experts(self.fc1_latent_proj(hidden), weights, chosen)
        return self.fc2_latent_proj(y, residual=residual, scale=scale)


class NemotronHLayer(MixerLayer):
    def make_mixer(self, cfg: HFConfig, index: int) -> nn.Module:
        kind = cfg.require("layer_types")[index]
        if kind == "full_attention":
            return LlamaAttention(cfg, index, None)
        if kind in ("mlp", "moe"):
            activation = cfg.choose("mlp_hidden_act", ["relu2"], "relu2")
            cfg.choose("mlp_bias", [False], False)
            if kind == "moe":
                return self.make_experts(cfg, activation)
            return MLP(cfg.hidden_size, cfg.intermediate_size, activation)
        cfg.choose("mamba_hidden_act", ["silu"], "silu")
        return mamba2_mixer(cfg)

    @staticmethod
    def make_experts(cfg: HFConfig, activation: str) -> MoE:
        """DeepSeek-V3's choice of experts."""
        latent = cfg.get("moe_latent_size")
        make = MoE if latent is None else partial(LatentMoE, latent=int(latent))
        return make(
            cfg.hidden_size,
            width=int(cfg.require("moe_intermediate_size")),
            num_experts=cfg.num_experts,
            activation=activation,
            routing=DeepseekLayer.routing(cfg),
            choice_bias=True,
            shared_width=int(cfg.require("moe_shared_expert_intermediate_size")),
        )

    def mix(self, positions, x):
        if isinstance(self.mixer, (MLP, MoE)):
            return self.mixer(x, self.norm, x)
        return super().mix(positions, x)


class NemotronHForCausalLM(MambaForCausalLM):
    layer_class = NemotronHLayer
    renames = {
        **MambaForCausalLM.renames,
        r"experts\.up_proj$": "experts.gate_up_proj.weight",
        r"experts\.down_proj$": "experts.down_proj.weight",
    }
    ignored = (*MambaForCausalLM.ignored, r"^mtp\.")

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        each = range(cfg.num_experts)
        self.packing = {
            "qkv_proj": LlamaForCausalLM.packing["qkv_proj"],
            "experts.gate_up_proj": tuple(f"experts.{i}.up_proj" for i in each),
            "experts.down_proj": tuple(f"experts.{i}.down_proj" for i in each),
        }

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        kinds = cfg.get("layers_block_type", cfg.get("layer_types"))
        if kinds is None:
            kinds = [KINDS[letter] for letter in cfg.require("hybrid_override_pattern")]
        return {
            **mamba2_words(cfg, "mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
            "layer_types": [OLDER_KINDS.get(kind, kind) for kind in kinds],
            "num_hidden_layers": len(kinds),
        }
