"""BERT and its like: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, MPNet, and ColBERT on BERT.

Post-norm encoders with learned positions. What differs stands in `FAMILIES`:

    RoBERTa and its descendants   positions count from pad_token_id + 1, and there is one token type
    DistilBERT                    no token types
    MPNet                         no token types, and a bias by the distance of two tokens, the same in all layers
    ELECTRA                       may embed in fewer dimensions than it computes in

Their checkpoints name the same things differently; `renames` brings them all to the names of BERT's parts here.
"""

from dataclasses import dataclass

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.attention.encoder import EncoderAttention
from octavo.layers.attention.relative_bias import RelativeBias
from octavo.layers.embedding import Embedding, TokenTypeEmbedding
from octavo.layers.linear import Linear, QKVLinear, RowLinear
from octavo.layers.norm import LayerNorm
from octavo.layers.pooler import ACTIVATIONS, ClassifierHead, Encoder, float32_linear


@dataclass(frozen=True)
class Family:
    """What sets one model_type apart."""

    has_token_types: bool = True
    positions_follow_padding: bool = False
    has_relative_bias: bool = False
    head_activation: str = "tanh"  # of the layer before a classifier of whole texts


ROBERTA = Family(positions_follow_padding=True)
FAMILIES = {
    "bert": Family(),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "electra": Family(head_activation="gelu"),
    "distilbert": Family(has_token_types=False, head_activation="relu"),
    "mpnet": Family(has_token_types=False, positions_follow_padding=True, has_relative_bias=True),
}


def read(cfg: HFConfig) -> HFConfig:
    """A DistilBERT configuration in BERT's words; what cannot be computed is refused."""
    cfg.choose("position_embedding_type", ["absolute"], "absolute")
    cfg.choose("is_decoder", [False], False)
    if cfg.model_type != "distilbert":
        return cfg
    cfg.choose("sinusoidal_pos_embds", [True, False], False)  # a table either way
    words = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    words |= {"intermediate_size": "hidden_dim", "hidden_act": "activation"}
    return HFConfig({**cfg.data, **{ours: cfg.require(theirs) for ours, theirs in words.items()}})


class BertEmbeddings(nn.Module):
    def __init__(self, cfg: HFConfig, family: Family):
        super().__init__()
        width, eps = int(cfg.get("embedding_size", cfg.hidden_size)), float(cfg.get("layer_norm_eps", 1e-12))
        self.word_embeddings = Embedding(cfg.vocab_size, width)
        self.position_embeddings = Embedding(int(cfg.require("max_position_embeddings")), width)
        self.token_type_embeddings = None
        if family.has_token_types:
            self.token_type_embeddings = TokenTypeEmbedding(int(cfg.get("type_vocab_size", 2)), width)
        self.norm = LayerNorm(width, eps)
        self.first_position = int(cfg.get("pad_token_id", 1)) + 1 if family.positions_follow_padding else 0

    def forward(self, input_ids, positions):
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions + self.first_position)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(input_ids)
        return self.norm(x)


class BertLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, cfg: HFConfig):
        super().__init__()
        hidden, eps = cfg.hidden_size, float(cfg.get("layer_norm_eps", 1e-12))
        self.qkv_proj = QKVLinear(hidden, cfg.head_dim, cfg.num_heads, cfg.num_heads, bias=True)
        self.attn = EncoderAttention(cfg.num_heads, cfg.num_heads, cfg.head_dim)
        self.o_proj = RowLinear(hidden, hidden, bias=True)
        self.attention_norm = LayerNorm(hidden, eps)
        self.up_proj = Linear(hidden, cfg.intermediate_size, bias=True)
        self.down_proj = RowLinear(cfg.intermediate_size, hidden, bias=True)
        self.output_norm = LayerNorm(hidden, eps)
        self.activation = ACTIVATIONS[cfg.choose("hidden_act", list(ACTIVATIONS), "gelu")]

    def forward(self, x, bias):
        x = self.attention_norm(self.o_proj(self.attn(self.qkv_proj(x), bias=bias), residual=x))
        return self.output_norm(self.down_proj(self.activation(self.up_proj(x)), residual=x))


class BertEncoder(Encoder):
    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    renames = {
        r"^(bert|roberta|distilbert|mpnet|electra|model)\.": "",
        r"\.gamma$": ".weight",
        r"\.beta$": ".bias",
        r"^(encoder\.layer|transformer\.layer)\.": "layers.",
        r"^embeddings\.LayerNorm\.": "embeddings.norm.",
        r"attention\.(self\.query|q_lin|attn\.q)\.": "q_proj.",
        r"attention\.(self\.key|k_lin|attn\.k)\.": "k_proj.",
        r"attention\.(self\.value|v_lin|attn\.v)\.": "v_proj.",
        r"attention\.(output\.dense|out_lin|attn\.o)\.": "o_proj.",
        r"(attention\.output\.LayerNorm|attention\.LayerNorm|sa_layer_norm)\.": "attention_norm.",
        r"(intermediate\.dense|ffn\.lin1)\.": "up_proj.",
        r"(output\.dense|ffn\.lin2)\.": "down_proj.",
        r"(output\.LayerNorm|output_layer_norm)\.": "output_norm.",
        r"^encoder\.relative_attention_bias\.": "relative_bias.",
        r"^(pooler\.dense|pre_classifier)\.": "classifier.dense.",
        r"^classifier\.(?=weight|bias)": "classifier.out_proj.",
        r"^linear\.": "projection.",
    }
    # Heads for pre-training, and tables that follow from the configuration.
    ignored: tuple[str, ...] = (
        r"position_ids$",
        r"^(cls|lm_head|vocab_transform|vocab_layer_norm|vocab_projector|discriminator_predictions|generator_\w+)\.",
    )

    def __init__(self, cfg: HFConfig):
        super().__init__()
        family, architecture = FAMILIES[cfg.model_type], cfg.architecture
        cfg = read(cfg)
        self.has_token_types = family.has_token_types and int(cfg.get("type_vocab_size", 2)) > 1
        self.embeddings = BertEmbeddings(cfg, family)
        width = int(cfg.get("embedding_size", cfg.hidden_size))
        self.embeddings_project = Linear(width, cfg.hidden_size, bias=True) if width != cfg.hidden_size else None
        self.layers = nn.ModuleList(BertLayer(cfg) for _ in range(cfg.num_layers))
        self.relative_bias = None
        if family.has_relative_bias:
            self.relative_bias = RelativeBias(int(cfg.get("relative_attention_num_buckets", 32)), cfg.num_heads)
        num_labels = int(cfg.get("num_labels", 0))
        is_classifier = architecture.endswith("ForSequenceClassification")
        if is_classifier:
            self.classifier = ClassifierHead(cfg.hidden_size, num_labels, family.head_activation)
        elif architecture.endswith("ForTokenClassification"):
            self.classifier = ClassifierHead(cfg.hidden_size, num_labels)
        if not is_classifier or cfg.model_type != "bert":
            self.ignored = (*self.ignored, r"^(\w+\.)?pooler\.")  # only BERT's classifiers stand on it
        if architecture == "HF_ColBERT":
            self.projection = float32_linear(cfg.hidden_size, int(cfg.get("dim", 128)), bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(input_ids, positions)
        if self.embeddings_project is not None:
            x = self.embeddings_project(x)
        bias = None if self.relative_bias is None else self.relative_bias()
        for layer in self.layers:
            x = layer(x, bias)
        return x
