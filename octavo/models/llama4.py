"""Llama 4 (text): most layers rotate and attend in chunks, the others see everything and know no positions; experts of
which a token has one, and scales its input, beside an MLP that all tokens pass."""

from collections.abc import Iterable

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.attention.chunked import ChunkedAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe.experts import STACKED_RENAMES
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.norm import UnitNorm
from octavo.layers.rope import Rope
from octavo.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class Llama4Attention(LlamaAttention):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        chunk = int(cfg.get("attention_chunk_size", 0))
        if self.rope is None:
            if cfg.get("attn_temperature_tuning", True):
                self.query_growth = float(cfg.get("attn_scale", 0.1))
                self.growth_period, self.growth_start = int(cfg.get("floor_scale", 8192)), 1
            return
        if 0 < chunk < (cfg.get("max_model_len") or cfg.max_position_embeddings or 0):
            self.attn = ChunkedAttention(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, chunk)
        if cfg.get("use_qk_norm", True):
            # Norms without weights, and after the rotation, which lengthens nothing: before it they are the same.
            self.q_norm = self.k_norm = UnitNorm(cfg.head_dim, cfg.rms_norm_eps)


class Llama4MoE(MoE):
    def forward(self, x, norm, residual, scale=1.0):
        hidden, weights, chosen = self.gate(x, norm)
        assert self.shared_experts is not None
        residual = self.shared_experts(hidden, residual=residual, scale=scale)
        scaled = hidden * weights.to(hidden.dtype)
        return self.experts(scaled, torch.ones_like(weights), chosen, residual, scale)


class Llama4Layer(LlamaLayer):
    attention_class = Llama4Attention

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        cfg.choose("hidden_act", ["silu"], "silu")
        step = int(cfg.get("interleave_moe_layer_step", 1))
        if index not in cfg.get("moe_layers", range(step - 1, cfg.num_layers, step)):
            return GatedMLP(cfg.hidden_size, int(cfg.require("intermediate_size_mlp")), "silu")
        routing = Routing(cfg.choose("num_experts_per_tok", [1], 1), "sigmoid")
        return Llama4MoE.of(cfg, routing, "intermediate_size", shared_width=cfg.intermediate_size)


class Llama4ForCausalLM(LlamaForCausalLM):
    layer_class = Llama4Layer
    renames = {
        r"\.feed_forward\.": ".mlp.",
        r"\.mlp\.router\.": ".mlp.gate.",
        r"\.shared_expert\.": ".shared_experts.",
        **STACKED_RENAMES,
    }

    def __init__(self, cfg: HFConfig):
        every = int(cfg.get("no_rope_layer_interval", 4))
        rotates = [int(i % every != 0) for i in range(1, cfg.num_layers + 1)]
        super().__init__(HFConfig({**cfg.data, "no_rope_layers": cfg.get("no_rope_layers") or rotates}))

    @staticmethod
    def make_rope(cfg: HFConfig) -> Rope:
        return Rope.of(cfg, cfg.get("max_model_len"), interleaved=True)

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Stacked experts are stored [experts, in, out]."""
        is_stacked = tensor.dim() == 3 and ".experts." in name
        yield name, tensor.transpose(1, 2) if is_stacked else tensor
