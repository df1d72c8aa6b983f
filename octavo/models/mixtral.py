"""Mixtral: Mistral whose layers have experts in place of the MLP; Granite-MoE: Granite, the same way."""

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.moe.experts import STACKED_RENAMES
from octavo.layers.moe.layer import MoE, Routing
from octavo.models.llama import LlamaForCausalLM, LlamaLayer


class MixtralLayer(LlamaLayer):
    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        return MoE.of(cfg, Routing(cfg.num_experts_per_token, renormalize=True), "intermediate_size")


class MixtralForCausalLM(LlamaForCausalLM):
    layer_class = MixtralLayer
    renames = {r"\.block_sparse_moe\.": ".mlp.", **STACKED_RENAMES}
    expert_names = ("w1", "w3", "w2")


class GraniteMoeForCausalLM(MixtralForCausalLM):
    # Its checkpoints stack the experts, under names of their own.
    renames = {
        r"\.block_sparse_moe\.router\.(layer\.)?": ".mlp.gate.",
        r"\.block_sparse_moe\.input_linear\.weight$": ".mlp.experts.gate_up_proj",
        r"\.block_sparse_moe\.output_linear\.weight$": ".mlp.experts.down_proj",
        **MixtralForCausalLM.renames,
    }
