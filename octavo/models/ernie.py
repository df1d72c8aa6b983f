"""Ernie 4.5: Llama whose rotation pairs neighbours; its mixtures have a shared expert and a choice bias."""

from collections.abc import Iterable

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.moe.experts import STACKED_RENAMES
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.rope import Rope
from octavo.models.llama import LlamaForCausalLM, LlamaLayer


class Ernie45MoeLayer(LlamaLayer):
    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        first, last = cfg.get("moe_layer_start_index", 0), cfg.get("moe_layer_end_index", -1)
        last = cfg.num_layers - 1 if last == -1 else last
        if not first <= index <= last or (index + 1) % cfg.get("moe_layer_interval", 1):
            return super().make_mlp(cfg, index)
        shared_width = int(cfg.require("moe_intermediate_size")) * int(cfg.get("moe_num_shared_experts", 0))
        routing = Routing(cfg.num_experts_per_token, renormalize=True)
        return MoE.of(cfg, routing, choice_bias=True, shared_width=shared_width)


class Ernie45ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def make_rope(cfg: HFConfig) -> Rope:
        return Rope.of(cfg, cfg.get("max_model_len"), interleaved=True)


class Ernie45MoeForCausalLM(Ernie45ForCausalLM):
    layer_class = Ernie45MoeLayer
    renames = {r"\.moe_statics\.": ".gate.", r"\.gate\.gate\.": ".gate.", **STACKED_RENAMES}

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        # Stored as one row of a matrix.
        yield name, tensor.flatten() if name.endswith("e_score_correction_bias") else tensor
