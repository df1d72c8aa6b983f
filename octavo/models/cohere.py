"""Cohere's Command models: attention and MLP side by side behind one LayerNorm without a bias, neighbours rotate together.

Cohere 1    some checkpoints (Command R+) normalise each query and key head, by weights of its own
Cohere 2    three layers of four see a window and rotate, the fourth sees everything and has no positions
"""

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.rope import Rope
from octavo.models.layernorm import Attention, Layer, LayerNormForCausalLM, Style
from octavo.models.llama import LlamaForCausalLM


class HeadNorm(nn.Module):
    """LayerNorm of each head, by a weight of its own and without a bias."""

    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads * head_dim]."""
        heads = x.unflatten(-1, tuple(self.weight.shape)).float()
        normed = nn.functional.layer_norm(heads, self.weight.shape[-1:], eps=self.eps) * self.weight
        return normed.to(x.dtype).flatten(-2)


class CohereAttention(Attention):
    def __init__(self, cfg: HFConfig, style: Style, index: int, rope: Rope | None):
        kinds = cfg.get("layer_types")
        super().__init__(cfg, style, index, rope if kinds is None or kinds[index] == "sliding_attention" else None)
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if cfg.get("use_qk_norm"):
            self.q_norm = HeadNorm(cfg.num_heads, cfg.head_dim, style.norm_eps)
            self.k_norm = HeadNorm(cfg.num_kv_heads, cfg.head_dim, style.norm_eps)

    def forward(self, positions, hidden_states):
        qkv = self.qkv_proj(hidden_states)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split(self.qkv_proj.out_sizes, -1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), -1)
        return self.o_proj(self.attn(qkv, positions, self.rope))


class CohereLayer(Layer):
    attention_class = CohereAttention


class CohereForCausalLM(LayerNormForCausalLM):
    packing = LlamaForCausalLM.packing
    layer_class = CohereLayer

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        return Style(
            cfg.num_kv_heads,
            cfg.intermediate_size,
            cfg.choose("hidden_act", ["silu"], "silu"),
            float(cfg.get("layer_norm_eps", 1e-5)),
            bool(cfg.get("attention_bias", False)),
            False,
            output_bias=bool(cfg.get("attention_bias", False)),
            norm_bias=False,
            parallel=True,
            num_norms=1,
            interleaved=True,
            gated=True,
            logits_scale=float(cfg.get("logit_scale", 1.0)),
            tied=bool(cfg.get("tie_word_embeddings", True)),
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    def __init__(self, cfg: HFConfig):
        every = int(cfg.get("sliding_window_pattern", 4))
        pattern = ["full_attention" if i % every == 0 else "sliding_attention" for i in range(1, cfg.num_layers + 1)]
        super().__init__(HFConfig({**cfg.data, "layer_types": cfg.get("layer_types", pattern)}))
