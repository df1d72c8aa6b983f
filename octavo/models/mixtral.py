"""Mixtral: Mistral whose layers have experts in place of the MLP."""

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.mlp import GATED_ACTIVATIONS
from octavo.layers.moe.experts import STACKED_RENAMES, expert_packing
from octavo.layers.moe.layer import MoE, Routing
from octavo.models.llama import LlamaForCausalLM, LlamaLayer


class MixtralLayer(LlamaLayer):
    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        activation = cfg.choose("hidden_act", list(GATED_ACTIVATIONS), "silu")
        routing = Routing(int(cfg.require("num_experts_per_tok")), renormalize=True)
        return MoE(cfg.hidden_size, cfg.intermediate_size, cfg.num_experts, activation, routing)


class MixtralForCausalLM(LlamaForCausalLM):
    layer_class = MixtralLayer
    renames = {r"\.block_sparse_moe\.": ".mlp.", **STACKED_RENAMES}

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.packing = {**LlamaForCausalLM.packing, **expert_packing(cfg.num_experts, "w1", "w3", "w2")}
