"""Phi-3.5-MoE: LayerNorm before attention and experts, of which SparseMixer chooses two for a token."""

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.moe.experts import STACKED_RENAMES, Experts, expert_packing
from octavo.layers.moe.layer import Router, Routing
from octavo.models.layernorm import Layer, LayerNormForCausalLM, Style
from octavo.models.llama import LlamaForCausalLM


def sparse_mixer(logits: torch.Tensor, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] float32 → weights [tokens, 2], experts [tokens, 2] int32.

    The best expert weighs its share of the softmax over those nearly as good, the second likewise without the first (Liu
    et al. 2024; in training, `noise` decides between the nearly good).
    """
    nothing, left = float("-inf"), logits
    weights, chosen = [], []
    for _ in range(2):
        best, index = left.max(-1, keepdim=True)
        is_worse = (best - logits) / logits.abs().clamp(min=best) > 2 * noise
        weights.append(left.masked_fill(is_worse, nothing).softmax(-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, nothing)
    return torch.cat(weights, -1), torch.cat(chosen, -1).int()


class MixedExperts(nn.Module):
    def __init__(self, cfg: HFConfig, style: Style):
        super().__init__()
        top_k = cfg.choose("num_experts_per_tok", [2], 2)
        self.gate = Router(cfg.hidden_size, cfg.num_experts, Routing(top_k))
        self.experts = Experts(cfg.num_experts, cfg.hidden_size, style.width, style.activation)
        self.noise = float(cfg.get("router_jitter_noise", 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(x.float(), self.gate.weight.float())
        return self.experts(x, *sparse_mixer(logits, self.noise))


class PhimoeLayer(Layer):
    def make_mlp(self, cfg: HFConfig, style: Style) -> nn.Module:
        return MixedExperts(cfg, style)


class PhimoeForCausalLM(LayerNormForCausalLM):
    layer_class = PhimoeLayer
    renames = {r"\.block_sparse_moe\.": ".mlp.", r"\.mlp\.router\.": ".mlp.gate.", **STACKED_RENAMES}

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.packing = {**LlamaForCausalLM.packing, **expert_packing(cfg.num_experts, "w1", "w3", "w2")}

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        bias = bool(cfg.get("attention_bias", False))
        return Style(
            cfg.num_kv_heads,
            cfg.intermediate_size,
            cfg.choose("hidden_act", ["silu"], "silu"),
            cfg.rms_norm_eps,
            bias,
            bias,
            head_bias=bool(cfg.get("lm_head_bias", False)),
            tied=cfg.tie_word_embeddings,
        )
