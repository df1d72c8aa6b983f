"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions, gated MLPs, and windows in two layers of three."""

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.attention.encoder import EncoderAttention
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear, RowLinear
from octavo.layers.mlp import GATED_ACTIVATIONS
from octavo.layers.norm import LayerNorm
from octavo.layers.pooler import ACTIVATIONS, ClassifierHead, Encoder
from octavo.layers.rope import Rope

WINDOWED, FULL = "sliding_attention", "full_attention"


def layer_kinds(cfg: HFConfig) -> list[str]:
    """Which layers see a window; older configurations say how often one does not."""
    every = int(cfg.get("global_attn_every_n_layers", 3))
    return cfg.get("layer_types") or [WINDOWED if i % every else FULL for i in range(cfg.num_layers)]


def make_rope(cfg: HFConfig, kind: str) -> Rope:
    """The table of one kind of layers, in either spelling of the configuration."""
    theta = cfg.get("global_rope_theta", 160_000.0) if kind == FULL else cfg.get("local_rope_theta", 10_000.0)
    stated = (cfg.get("rope_parameters") or {}).get(kind) or {"rope_theta": theta}
    return Rope.of(HFConfig({**cfg.data, "rope_parameters": stated}), cfg.get("max_model_len"))


def make_norm(cfg: HFConfig) -> LayerNorm:
    return LayerNorm(cfg.hidden_size, float(cfg.get("norm_eps", 1e-5)), bool(cfg.get("norm_bias", False)))


class ModernBertLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the embeddings are normalised already, so the first norm is missing."""

    def __init__(self, cfg: HFConfig, index: int, rope: Rope, window: int | None):
        super().__init__()
        heads, bias = cfg.num_heads, bool(cfg.get("attention_bias", False))
        self.attn_norm = make_norm(cfg) if index else nn.Identity()
        self.Wqkv = Linear(cfg.hidden_size, 3 * cfg.hidden_size, bias)
        self.attn = EncoderAttention(heads, heads, cfg.head_dim, window=window)
        self.rope = rope
        self.attn_out = RowLinear(cfg.hidden_size, cfg.hidden_size, bias)
        self.mlp_norm = make_norm(cfg)
        bias = bool(cfg.get("mlp_bias", False))
        self.Wi = Linear(cfg.hidden_size, 2 * cfg.intermediate_size, bias)
        self.mlp_out = RowLinear(cfg.intermediate_size, cfg.hidden_size, bias)
        self.activation = GATED_ACTIVATIONS[cfg.choose("hidden_activation", list(GATED_ACTIVATIONS), "gelu")]

    def forward(self, positions, x):
        attended = self.attn(self.Wqkv(self.attn_norm(x)), positions, self.rope)
        x = self.attn_out(attended, residual=x)
        return self.mlp_out(self.Wi(self.mlp_norm(x), activation=self.activation), residual=x)


class ModernBertEncoder(Encoder):
    renames = {
        r"^model\.": "",
        r"\.attn\.Wqkv\.": ".Wqkv.",
        r"\.attn\.Wo\.": ".attn_out.",
        r"\.mlp\.Wi\.": ".Wi.",
        r"\.mlp\.Wo\.": ".mlp_out.",
        r"^final_norm\.": "last_norm.",
        r"^classifier\.": "classifier.out_proj.",
        r"^head\.": "classifier.",
    }

    def __init__(self, cfg: HFConfig):
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {"tok_embeddings": Embedding(cfg.vocab_size, cfg.hidden_size), "norm": make_norm(cfg)}
        )
        kinds = layer_kinds(cfg)
        ropes = {kind: make_rope(cfg, kind) for kind in dict.fromkeys(kinds)}
        window = int(cfg.get("local_attention", 128)) // 2 + 1
        self.layers = nn.ModuleList(
            ModernBertLayer(cfg, i, ropes[kind], window if kind == WINDOWED else None) for i, kind in enumerate(kinds)
        )
        self.last_norm = make_norm(cfg)
        self.ignored = (r"^decoder\.",)
        num_labels = int(cfg.get("num_labels", 0))
        if cfg.architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
            activation = cfg.choose("classifier_activation", list(ACTIVATIONS), "gelu")
            norm, bias = make_norm(cfg).float(), bool(cfg.get("classifier_bias", False))
            self.classifier = ClassifierHead(cfg.hidden_size, num_labels, activation, norm, bias)
        else:
            self.ignored = (*self.ignored, r"^head\.")  # of its pre-training

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embeddings["norm"](self.embeddings["tok_embeddings"](input_ids))
        for layer in self.layers:
            x = layer(positions, x)
        return self.last_norm(x)
