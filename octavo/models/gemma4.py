"""Gemma 4 (text). Gemma 3, but for:

attention      full layers have wider heads, fewer of keys, and may use keys as values; values are normalised; the last
               `num_kv_shared_layers` keep nothing and read what the last layer of their kind before them kept
per-layer      every layer adds a projection of a small embedding of its own, gated by the hidden states
experts        beside the MLP, in the larger models; their router has a norm of its own
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.errors import ConfigError
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.causal_lm import keep_output_rows
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear, RowLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe.experts import STACKED_RENAMES, Experts
from octavo.layers.moe.layer import Router, Routing
from octavo.layers.norm import RMSNorm, UnitNorm
from octavo.layers.rope import Rope
from octavo.models.gemma import GemmaForCausalLM, SandwichLayer
from octavo.models.llama import LlamaModel
from octavo.models.qwen3 import Qwen3Attention


def first_shared_layer(cfg: HFConfig) -> int:
    """From which layer on nothing is kept."""
    return cfg.num_layers - int(cfg.get("num_kv_shared_layers", 0))


class Gemma4Attention(Qwen3Attention):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        self.v_norm = UnitNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.head_dim = cfg.head_dim

    def adjust(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        *_, v_width = self.qkv_proj.out_sizes
        v = self.v_norm(qkv[:, -v_width:].unflatten(-1, (-1, self.head_dim)))
        return torch.cat((qkv[:, :-v_width], v.flatten(1)), -1)


class ReadingAttention(nn.Module):
    """Queries alone, for the keys and values of `source`, an earlier layer."""

    def __init__(self, cfg: HFConfig, rope: Rope):
        super().__init__()
        width = cfg.num_heads * cfg.head_dim
        self.q_proj = Linear(cfg.hidden_size, width, bool(cfg.get("attention_bias", False)))
        self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.o_proj = RowLinear(width, cfg.hidden_size, bool(cfg.get("attention_bias", False)))
        self.rope = rope
        self.source: tuple[PagedAttention, ...] = ()  # in a tuple, so that it is no part of this

    def forward(self, positions, hidden_states, norm, residual, scale):
        attended = self.source[0].read(self.q_proj(hidden_states, norm), positions, self.rope, self.q_norm)
        return self.o_proj(attended, residual=residual, scale=scale)


class Gemma4Experts(nn.Module):
    """The chosen experts of x, which router and experts normalise each in their own way."""

    def __init__(self, cfg: HFConfig):
        super().__init__()
        routing = Routing(int(cfg.require("top_k_experts")), renormalize=True)
        self.router = Router(cfg.hidden_size, cfg.num_experts, routing)
        self.router_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.per_expert_scale = nn.Parameter(torch.empty(cfg.num_experts), requires_grad=False)
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.experts = Experts(cfg.num_experts, cfg.hidden_size, int(cfg.require("moe_intermediate_size")), "gelu_tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = self.router(x, self.router_norm)
        weights = weights * self.per_expert_scale[chosen.long()].float()
        return self.experts(self.norm(x), weights, chosen)


class Gemma4Layer(SandwichLayer):
    attention_class = Gemma4Attention

    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        size, eps = cfg.hidden_size, cfg.rms_norm_eps
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.moe = None
        if cfg.get("enable_moe_block", False):
            self.moe = Gemma4Experts(cfg)
            self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(size, eps)
        if width := per_layer_width(cfg):
            self.per_layer_input_gate = Linear(size, width)
            self.per_layer_projection = Linear(width, size)
            self.post_per_layer_input_norm = RMSNorm(size, eps)

    def make_attention(self, cfg: HFConfig, index: int, rope: Rope) -> nn.Module:
        own = cfg.for_layers(cfg.require("layer_types")[index])
        return Gemma4Attention(own, index, rope) if index < first_shared_layer(cfg) else ReadingAttention(own, rope)

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        is_wide = cfg.get("use_double_wide_mlp", False) and index >= first_shared_layer(cfg)
        activation = cfg.choose("hidden_act", ["gelu_pytorch_tanh"])
        return GatedMLP(cfg.hidden_size, cfg.intermediate_size * (2 if is_wide else 1), activation)

    def feed_forward(self, x):
        if self.moe is None:
            return super().feed_forward(x)
        dense = self.post_feedforward_layernorm_1(self.mlp(x, self.pre_feedforward_layernorm))
        both = self.post_feedforward_layernorm_2(self.moe(x), dense)
        return self.post_feedforward_layernorm(both, x)

    def forward(self, positions, x, own_input=None):
        x = super().forward(positions, x)
        if own_input is not None:
            own_input = keep_output_rows(own_input) if self.is_last else own_input
            gated = nn.functional.gelu(self.per_layer_input_gate(x), approximate="tanh") * own_input
            x = self.post_per_layer_input_norm(self.per_layer_projection(gated), x)
        return x * self.layer_scalar


def per_layer_width(cfg: HFConfig) -> int:
    """Of the embedding that each layer has for itself; 0 without."""
    return int(cfg.get("hidden_size_per_layer_input", 0))


class Gemma4Model(LlamaModel):
    def __init__(self, cfg: HFConfig, layer_class: type[nn.Module], ropes):
        super().__init__(cfg, layer_class, ropes)
        self.per_layer_width = width = per_layer_width(cfg)
        if width:
            scale = float(torch.tensor(width**0.5, dtype=torch.get_default_dtype()))
            all_widths = cfg.num_layers * width
            self.embed_tokens_per_layer = Embedding(int(cfg.require("vocab_size_per_layer_input")), all_widths, scale)
            self.per_layer_model_projection = Linear(cfg.hidden_size, all_widths)
            self.per_layer_projection_norm = RMSNorm(width, cfg.rms_norm_eps)
        kinds, first = cfg.require("layer_types"), first_shared_layer(cfg)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        for attention, kind in zip(attentions[first:], kinds[first:], strict=True):
            attention.source = (attentions[first - 1 - kinds[:first][::-1].index(kind)].attn,)

    def forward(self, input_ids, positions, inputs_embeds=None):
        if not self.per_layer_width:
            return super().forward(input_ids, positions, inputs_embeds)
        if inputs_embeds is not None:
            raise ConfigError(
                "enable_prompt_embeds: every layer of this model embeds the tokens anew, and prompts of embeddings have none."
            )
        x = self.embed_tokens(input_ids)
        projected = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (-1, self.per_layer_width)))
        own = (projected + self.embed_tokens_per_layer(input_ids).view_as(projected)) * 2**-0.5
        for i, layer in enumerate(self.layers):
            x = layer(positions, x, own[:, i])
        return x


class Gemma4ForCausalLM(GemmaForCausalLM):
    layer_class = Gemma4Layer
    model_class = Gemma4Model
    renames = {
        r"\.router\.proj\.": ".moe.router.",
        r"\.router\.scale$": ".moe.router_norm.weight",
        r"\.router\.per_expert_scale$": ".moe.per_expert_scale",
        r"\.experts\.": ".moe.experts.",
        r"\.pre_feedforward_layernorm_2\.": ".moe.norm.",
        **STACKED_RENAMES,
    }

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.hidden_size = cfg.hidden_size
        self.keys_are_values = bool(cfg.get("attention_k_eq_v", False))
        self.kinds = cfg.require("layer_types")
        # Some checkpoints have projections of keys and values that no layer reads.
        reading = "|".join(str(i) for i in range(first_shared_layer(cfg), cfg.num_layers))
        if reading:
            self.ignored = (*self.ignored, rf"layers\.({reading})\.self_attn\.[kv]_(proj|norm)\.")

    @staticmethod
    def read(cfg: HFConfig) -> HFConfig:
        cfg.choose("use_bidirectional_attention", [False, "vision"], False)  # of images
        words = {"use_bidirectional_attention": None, "attention_multiplier": 1.0}
        return HFConfig({**GemmaForCausalLM.read(HFConfig({**cfg.data, **words})).data, **words})

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Norms multiply by their weights as they are; where keys are values, one projection makes both."""
        if name.endswith(".router_norm.weight"):
            tensor = tensor * self.hidden_size**-0.5
        yield name, tensor
        if self.keys_are_values and ".k_proj." in name:
            index = int(name.split(".layers.")[1].split(".")[0])
            if self.kinds[index] == "full_attention":
                yield name.replace(".k_proj.", ".v_proj."), tensor
