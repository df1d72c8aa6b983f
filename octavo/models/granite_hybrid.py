"""Granite-MoE with shared experts, and Granite-hybrid: the same with Mamba 2 in most layers, or without routed experts."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.mlp import GATED_ACTIVATIONS, GatedMLP
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.rope import Rope
from octavo.models.hybrid import HYBRID_RENAMES, HybridForCausalLM, HybridLayer
from octavo.models.mixtral import GraniteMoeForCausalLM


class GraniteHybridLayer(HybridLayer):
    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        width = int(cfg.get("shared_intermediate_size", 0))
        if not cfg.num_experts:
            return GatedMLP(cfg.hidden_size, width, cfg.choose("hidden_act", list(GATED_ACTIVATIONS), "silu"))
        routing = Routing(cfg.num_experts_per_token, renormalize=True)
        return MoE.of(cfg, routing, "intermediate_size", shared_width=width)


class GraniteHybridForCausalLM(HybridForCausalLM):
    layer_class = GraniteHybridLayer

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        shared = ".mlp.shared_experts." if cfg.num_experts else ".mlp."
        self.renames = {
            r"\.shared_mlp\.input_linear\.": f"{shared}gate_up_proj.",
            r"\.shared_mlp\.output_linear\.": f"{shared}down_proj.",
            **GraniteMoeForCausalLM.renames,
            **HYBRID_RENAMES,
        }

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        recurrent = cfg.model_type == "granitemoehybrid"
        return {"layer_types": cfg.get("layer_types", ["mamba" if recurrent else "attention"] * cfg.num_layers)}

    @classmethod
    def layer_ropes(cls, cfg: HFConfig) -> Sequence[Rope | None]:
        cfg.choose("position_embedding_type", ["rope", "nope"], "nope")
        rotates = cfg.model_type != "granitemoehybrid" or cfg.get("position_embedding_type") == "rope"
        return super().layer_ropes(cfg) if rotates else [None] * cfg.num_layers
