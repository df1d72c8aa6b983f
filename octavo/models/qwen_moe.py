"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in place of the MLP, in some layers or all.

Qwen2-MoE has a shared expert beside them, weighed by a gate of its own.
"""

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.moe.experts import STACKED_RENAMES
from octavo.layers.moe.layer import MoE, Routing
from octavo.models.llama import LlamaForCausalLM, LlamaLayer
from octavo.models.qwen3 import Qwen3Layer


def qwen_mlp(layer: LlamaLayer, cfg: HFConfig, index: int) -> nn.Module:
    """The experts of layer `index`, or its MLP where the layer is dense."""
    is_sparse = index not in (cfg.get("mlp_only_layers") or []) and (index + 1) % cfg.get("decoder_sparse_step", 1) == 0
    if not cfg.num_experts or not is_sparse:
        return LlamaLayer.make_mlp(layer, cfg, index)
    routing = Routing(cfg.num_experts_per_token, renormalize=bool(cfg.get("norm_topk_prob", False)))
    shared_width = int(cfg.get("shared_expert_intermediate_size", 0))
    return MoE.of(cfg, routing, shared_width=shared_width, gate_shared=shared_width > 0)


class Qwen2MoeLayer(LlamaLayer):
    make_mlp = qwen_mlp


class Qwen3MoeLayer(Qwen3Layer):
    make_mlp = qwen_mlp


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    layer_class: type[LlamaLayer] = Qwen2MoeLayer
    renames = {**STACKED_RENAMES, r"\.shared_expert\.": ".shared_experts."}


class Qwen3MoeForCausalLM(Qwen2MoeForCausalLM):
    layer_class = Qwen3MoeLayer
