"""T5 and its descendants: Flan-T5, T5 v1.1, mT5, UMT5.

Positions enter attention as a bias by distance, learned in the first layer of either stack and used in all of them (UMT5
learns one in every layer); scores are not scaled. What configurations tell apart:

    feed_forward_proj       "relu": a plain MLP; "gated-gelu": a gated one
    tie_word_embeddings     false, as it is written in the first checkpoints with a head of their own: its logits are not scaled
    scale_decoder_outputs   the same, as transformers writes it now; mT5 never scales
"""

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.attention.cross import CrossAttention
from octavo.layers.attention.encoder import EncoderAttention
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.attention.relative_bias import RelativeBias
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.encoder_decoder import EncoderDecoder
from octavo.layers.linear import QKVLinear, RowLinear
from octavo.layers.mlp import MLP, GatedMLP
from octavo.layers.norm import RMSNorm

# `feed_forward_proj` → (gated, name of the activation)
FEED_FORWARD = {
    "relu": (False, "relu"),
    "gated-gelu": (True, "gelu_new"),
    "gated-silu": (True, "silu"),
}


class T5Layer(nn.Module):
    """x + attention(norm(x)); in the decoder x + cross-attention(norm(x)); x + mlp(norm(x))."""

    def __init__(self, cfg: HFConfig, is_decoder: bool, has_bias: bool):
        super().__init__()
        hidden, heads, dim = cfg.hidden_size, cfg.num_heads, int(cfg.require("d_kv"))
        eps = float(cfg.get("layer_norm_epsilon", 1e-6))
        self.self_attn_norm = RMSNorm(hidden, eps)
        self.qkv_proj = QKVLinear(hidden, dim, heads, heads)
        self.attn = (PagedAttention if is_decoder else EncoderAttention)(heads, heads, dim, scale=1.0)
        self.o_proj = RowLinear(heads * dim, hidden)
        self.relative_bias = None
        if has_bias:
            num_buckets = int(cfg.get("relative_attention_num_buckets", 32))
            self.relative_bias = RelativeBias(num_buckets, heads, int(cfg.get("relative_attention_max_distance", 128)))
        self.cross_attn = None
        if is_decoder:
            self.cross_attn_norm = RMSNorm(hidden, eps)
            self.cross_attn = CrossAttention(hidden, heads, dim, scale=1.0)
        self.mlp_norm = RMSNorm(hidden, eps)
        gated, activation = FEED_FORWARD[cfg.choose("feed_forward_proj", list(FEED_FORWARD), "relu")]
        self.mlp: nn.Module = (GatedMLP if gated else MLP)(hidden, int(cfg.require("d_ff")), activation)

    def make_bias(self) -> torch.Tensor:
        """What attention adds to its scores, here and in the layers after this one that have no bias of their own."""
        assert self.relative_bias is not None
        return self.relative_bias() if self.cross_attn is None else self.relative_bias.looking_back()

    def forward(self, positions, x, bias):
        qkv = self.qkv_proj(x, self.self_attn_norm)
        if self.cross_attn is None:
            attended = self.attn(qkv, bias=bias)
        else:
            attended = self.attn(qkv, positions, None, distance_bias=bias)
        x = self.o_proj(attended, residual=x)
        if self.cross_attn is not None:
            x = self.cross_attn(x, self.cross_attn_norm, residual=x)
        return self.mlp(x, self.mlp_norm, residual=x)


class T5Stack(nn.Module):
    """The encoder, or the decoder without its last norm."""

    def __init__(self, cfg: HFConfig, is_decoder: bool):
        super().__init__()
        num_layers = int(cfg.require("num_layers"))
        if is_decoder:
            num_layers = int(cfg.get("num_decoder_layers", num_layers))
        self.layers = nn.ModuleList(
            T5Layer(cfg, is_decoder, has_bias=i == 0 or cfg.model_type == "umt5") for i in range(num_layers)
        )
        self.norm = RMSNorm(cfg.hidden_size, float(cfg.get("layer_norm_epsilon", 1e-6)))

    def forward(self, positions, x):
        bias = None
        for layer in self.layers:
            if layer.relative_bias is not None:
                bias = layer.make_bias()  # type: ignore[operator]
            x = layer(positions, x, bias)
        return x


class T5ForConditionalGeneration(EncoderDecoder):
    packing = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "cross_attn.kv_proj": ("cross_attn.k_proj", "cross_attn.v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    renames = {
        r"\.block\.": ".layers.",
        r"\.final_layer_norm\.": ".norm.",
        r"\.layer\.0\.layer_norm\.": ".self_attn_norm.",
        r"\.layer\.0\.SelfAttention\.relative_attention_bias\.": ".relative_bias.",
        r"\.layer\.0\.SelfAttention\.([qkvo])\.": r".\1_proj.",
        r"\.layer\.1\.EncDecAttention\.([qkvo])\.": r".cross_attn.\1_proj.",
        r"^(decoder\..*)\.layer\.1\.layer_norm\.": r"\1.cross_attn_norm.",
        r"\.layer\.[12]\.layer_norm\.": ".mlp_norm.",
        r"\.layer\.[12]\.DenseReluDense\.": ".mlp.",
        r"\.wi_0\.": ".gate_proj.",
        r"\.wi(_1)?\.": ".up_proj.",
        r"\.wo\.": ".down_proj.",
    }
    # Old checkpoints hold the embedding up to three times, and a bias of cross-attention that nothing reads.
    ignored = (r"^(encoder|decoder)\.embed_tokens\.", r"EncDecAttention\.relative_attention_bias\.")

    def __init__(self, cfg: HFConfig):
        super().__init__()
        self.tied = {"lm_head.weight": "shared.weight"} if cfg.get("tie_word_embeddings", True) else {}
        self.shared = Embedding(cfg.vocab_size, cfg.hidden_size)
        self.encoder, self.decoder = T5Stack(cfg, is_decoder=False), T5Stack(cfg, is_decoder=True)
        scales = cfg.get("scale_decoder_outputs", cfg.get("tie_word_embeddings", True)) and cfg.model_type != "mt5"
        self.lm_head = LMHead(cfg.hidden_size, cfg.vocab_size, logits_scale=cfg.hidden_size**-0.5 if scales else 1.0)

    def encode(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.encoder.norm(self.encoder(positions, self.shared(input_ids)))

    def forward(self, input_ids, positions, inputs_embeds=None):
        return self.decoder(positions, self.shared(input_ids))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states, self.decoder.norm)
