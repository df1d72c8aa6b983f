"""Llama and the many that are Llama with a flag: Mistral, SmolLM, Qwen2, Granite, Yi, InternLM3, and others.

The model to read first. The flags, with who sets them:

    attention_bias, mlp_bias     Llama variants; Qwen2 has biases on q, k, v only; Seed-OSS says attention_out_bias apart
    qk norms                     Qwen3 (`qwen3.py` subclasses the attention)
    no_rope_layers               SmolLM3: layers without positions
    sliding_window, layer_types  Mistral (all layers), Qwen2 (some)
    attn_logit_softcapping, final_logit_softcapping                                    Gemma 2
    rope_parameters.llama_4_scaling_beta    Ministral 3: queries grow with the logarithm of their position
    embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling    Granite
"""

from collections.abc import Sequence

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.causal_lm import CausalLM, keep_output_rows
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import QKVLinear, RowLinear
from octavo.layers.mlp import GATED_ACTIVATIONS, GatedMLP
from octavo.layers.moe.experts import expert_packing
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope


def layer_window(cfg: HFConfig, index: int) -> int | None:
    """The sliding window of one layer, None for full attention."""
    window = cfg.get("sliding_window")
    if not window or cfg.get("use_sliding_window") is False:
        return None
    kinds = cfg.get("layer_types")
    if kinds is not None:
        return window if kinds[index] == "sliding_attention" else None
    if cfg.get("max_window_layers") is not None:  # Qwen2: the first layers attend fully
        return window if index >= cfg.get("max_window_layers") else None
    return window


# Whose `attention_bias` speaks of q, k and v alone.
NO_OUTPUT_BIAS = ("qwen2", "qwen2_moe", "glm", "glm4", "glm4_moe")


class LlamaAttention(nn.Module):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope | None):
        super().__init__()
        bias = bool(cfg.get("attention_bias", cfg.get("use_bias", False)))
        qkv_bias = bool(cfg.get("qkv_bias", True)) if cfg.model_type in ("qwen2", "qwen2_moe") else bias
        output_bias = bool(cfg.get("attention_out_bias", bias and cfg.model_type not in NO_OUTPUT_BIAS))
        self.qkv_proj = QKVLinear(cfg.hidden_size, cfg.head_dim, cfg.num_heads, cfg.num_kv_heads, bias=qkv_bias)
        self.o_proj = RowLinear(cfg.num_heads * cfg.head_dim, cfg.hidden_size, bias=output_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.query_growth = float(cfg.rope_parameters.get("llama_4_scaling_beta") or 0.0)
        self.growth_period = int(cfg.rope_parameters.get("original_max_position_embeddings") or 1)
        self.growth_start = 0
        has_rope = (cfg.get("no_rope_layers") or [1] * cfg.num_layers)[index]  # 1: this layer rotates
        self.rope = rope if has_rope else None
        self.attn = PagedAttention(
            cfg.num_heads,
            cfg.num_kv_heads,
            cfg.head_dim,
            scale=cfg.get("attention_multiplier"),
            window=layer_window(cfg, index),
            softcap=float(cfg.get("attn_logit_softcapping", 0.0)),
        )

    def forward(self, positions, hidden_states, norm, residual, scale):
        qkv = self.adjust(positions, self.qkv_proj(hidden_states, norm))
        attended = self.attn(qkv, positions, self.rope, self.q_norm, self.k_norm)
        return self.o_proj(attended, residual=residual, scale=scale)

    def adjust(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """What happens to queries, keys and values before the norms of heads and the rotation."""
        if not self.query_growth:
            return qkv
        factor = 1 + self.query_growth * torch.log1p((positions + self.growth_start) // self.growth_period)
        q_width = self.qkv_proj.out_sizes[0]
        return torch.cat((qkv[:, :q_width] * factor[:, None].to(qkv.dtype), qkv[:, q_width:]), -1)


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): norms and residuals are computed inside the linears."""

    attention_class: type[nn.Module] = LlamaAttention

    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = self.make_attention(cfg, index, rope)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = self.make_mlp(cfg, index)
        self.residual_scale = float(cfg.get("residual_multiplier", 1.0))
        self.is_last = index == cfg.num_layers - 1

    def make_attention(self, cfg: HFConfig, index: int, rope: Rope) -> nn.Module:
        """What mixes tokens; hybrid models put recurrent mixers here."""
        return self.attention_class(cfg, index, rope)

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        """What comes after attention; mixture-of-experts models put theirs here."""
        activation = cfg.choose("hidden_act", list(GATED_ACTIVATIONS), "silu")
        return GatedMLP(
            cfg.hidden_size, cfg.intermediate_size, activation, bool(cfg.get("mlp_bias", cfg.get("use_bias", False)))
        )

    def forward(self, positions, x):
        x = self.self_attn(positions, x, self.input_layernorm, x, self.residual_scale)
        if self.is_last:
            x = keep_output_rows(x)
        return self.mlp(x, self.post_attention_layernorm, x, self.residual_scale)


class LlamaModel(nn.Module):
    def __init__(self, cfg: HFConfig, layer_class: type[nn.Module], ropes: Sequence[Rope | None]):
        super().__init__()
        self.embed_tokens = Embedding(cfg.vocab_size, cfg.hidden_size, float(cfg.get("embedding_multiplier", 1.0)))
        self.layers = nn.ModuleList(layer_class(cfg, i, rope) for i, rope in enumerate(ropes))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, input_ids, positions, inputs_embeds=None):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(positions, x)
        return x


class LlamaForCausalLM(CausalLM):
    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    layer_class: type[nn.Module] = LlamaLayer
    model_class: type[LlamaModel] = LlamaModel
    expert_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # in mixtures' checkpoints

    def __init__(self, cfg: HFConfig):
        super().__init__()
        self.packing = {**self.packing, **expert_packing(cfg.num_experts, *self.expert_names)}
        self.model = self.model_class(cfg, self.layer_class, self.layer_ropes(cfg))
        self.given_embeds_scale = self.model.embed_tokens.scale
        self.lm_head = LMHead(
            cfg.hidden_size,
            cfg.vocab_size,
            logits_scale=1.0 / float(cfg.get("logits_scaling", 1.0)),
            softcap=float(cfg.get("final_logit_softcapping", 0.0)),
        )
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if cfg.tie_word_embeddings else {}

    @staticmethod
    def make_rope(cfg: HFConfig) -> Rope:
        """The table all layers share, or all of one kind."""
        return Rope.of(cfg, max_position=cfg.get("max_model_len"))

    @classmethod
    def layer_ropes(cls, cfg: HFConfig) -> Sequence[Rope | None]:
        """The table of each layer."""
        kinds = cfg.get("layer_types") or ["full_attention"] * cfg.num_layers
        if not any(kind in (cfg.get("rope_parameters") or {}) for kind in kinds):
            return [cls.make_rope(cfg)] * cfg.num_layers
        tables = {kind: cls.make_rope(cfg.for_layers(kind)) for kind in dict.fromkeys(kinds)}
        return [tables[kind] for kind in kinds]

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.model(input_ids, positions, inputs_embeds)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states, self.model.norm)
