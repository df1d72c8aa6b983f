"""BART and its kin: mBART, PLBART, Marian, Pegasus, M2M-100 (NLLB), Blenderbot. What differs stands in `FAMILIES`."""

from dataclasses import dataclass

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.attention.cross import CrossAttention
from octavo.layers.attention.encoder import EncoderAttention
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.encoder_decoder import EncoderDecoder
from octavo.layers.linear import QKVLinear, RowLinear
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm

# Names in `activation_function` → those of `ops.activation`.
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "swish": "silu", "silu": "silu"}


@dataclass(frozen=True)
class Family:
    """What sets one model_type apart."""

    pre_norm: bool = False  # x + f(norm(x)), and a norm at the end of either stack; else norm(x + f(x))
    has_embedding_norm: bool = False
    first_position: int = 0  # where positions begin in the table; -1: after pad_token_id
    # None: positions are learned. Else they are sines, and of d numbers the slowest has a wavelength of 2π 10000^(1 - 2 / d)
    # (Vaswani et al. 2017), or with `True` of 2π 10000.
    closes_range: bool | None = None


FAMILIES = {
    "bart": Family(has_embedding_norm=True, first_position=2),
    "plbart": Family(has_embedding_norm=True, first_position=2),
    "mbart": Family(pre_norm=True, has_embedding_norm=True, first_position=2),
    "marian": Family(closes_range=False),
    "pegasus": Family(pre_norm=True, closes_range=False),
    "m2m_100": Family(pre_norm=True, first_position=-1, closes_range=True),
    "blenderbot": Family(pre_norm=True),
}


def sines(num_positions: int, width: int, closes_range: bool) -> torch.Tensor:
    """[num_positions, width]: the sines of all wavelengths, then the cosines."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float64) / (half - closes_range)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * 10000.0**-exponents
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class BartEmbeddings(nn.Module):
    """What is added to a stack's tokens for their positions, and the norm behind it."""

    def __init__(self, cfg: HFConfig, family: Family):
        super().__init__()
        first = family.first_position
        self.first_position = int(cfg.require("pad_token_id")) + 1 if first == -1 else first
        shape = int(cfg.require("max_position_embeddings")) + self.first_position, cfg.hidden_size
        self.embed_positions = Embedding(*shape)
        if family.closes_range is not None:
            table = sines(*shape, family.closes_range)
            del self.embed_positions.weight
            self.embed_positions.register_buffer("weight", table.to(torch.get_default_dtype()), persistent=False)
        self.embed_norm = LayerNorm(cfg.hidden_size) if family.has_embedding_norm else nn.Identity()

    def forward(self, positions, x):
        return self.embed_norm(x + self.embed_positions(positions + self.first_position))


class BartLayer(nn.Module):
    def __init__(self, cfg: HFConfig, family: Family, stack: str):
        super().__init__()
        hidden, heads = cfg.hidden_size, int(cfg.require(f"{stack}_attention_heads"))
        dim = hidden // heads
        self.pre_norm = family.pre_norm
        self.self_attn_norm = LayerNorm(hidden)
        self.qkv_proj = QKVLinear(hidden, dim, heads, heads, bias=True)
        self.attn = (PagedAttention if stack == "decoder" else EncoderAttention)(heads, heads, dim)
        self.o_proj = RowLinear(hidden, hidden, bias=True)
        self.cross_attn = None
        if stack == "decoder":
            self.cross_attn_norm = LayerNorm(hidden)
            self.cross_attn = CrossAttention(hidden, heads, dim, bias=True)
        self.mlp_norm = LayerNorm(hidden)
        activation = ACTIVATIONS[cfg.choose("activation_function", list(ACTIVATIONS), "gelu")]
        self.mlp = MLP(hidden, int(cfg.require(f"{stack}_ffn_dim")), activation, bias=True)

    def forward(self, positions, x):
        qkv = self.qkv_proj(self._before(self.self_attn_norm, x))
        x = self._after(self.self_attn_norm, self.o_proj(self.attn(qkv, positions, None), residual=x))
        if self.cross_attn is not None:
            read = self.cross_attn(self._before(self.cross_attn_norm, x), residual=x)
            x = self._after(self.cross_attn_norm, read)
        return self._after(self.mlp_norm, self.mlp(self._before(self.mlp_norm, x), residual=x))

    def _before(self, norm, x):
        return norm(x) if self.pre_norm else x

    def _after(self, norm, x):
        return x if self.pre_norm else norm(x)


class BartStack(nn.Module):
    """The encoder, or the decoder."""

    def __init__(self, cfg: HFConfig, family: Family, stack: str):
        super().__init__()
        self.embeddings = BartEmbeddings(cfg, family)
        self.layers = nn.ModuleList(BartLayer(cfg, family, stack) for _ in range(int(cfg.require(f"{stack}_layers"))))
        self.norm = LayerNorm(cfg.hidden_size) if family.pre_norm else nn.Identity()

    def forward(self, positions, x):
        x = self.embeddings(positions, x)
        for layer in self.layers:
            x = layer(positions, x)
        return self.norm(x)


class BartForConditionalGeneration(EncoderDecoder):
    packing: dict[str, tuple[str, ...]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "cross_attn.kv_proj": ("cross_attn.k_proj", "cross_attn.v_proj"),
    }
    renames = {
        r"^model\.": "",
        r"coder\.embed_positions\.": "coder.embeddings.embed_positions.",
        r"coder\.layernorm_embedding\.": "coder.embeddings.embed_norm.",
        r"coder\.layer_norm\.": "coder.norm.",
        r"\.encoder_attn\.": ".cross_attn.",
        r"\.encoder_attn_layer_norm\.": ".cross_attn_norm.",
        r"\.self_attn\.": ".",
        r"\.self_attn_layer_norm\.": ".self_attn_norm.",
        r"\.out_proj\.": ".o_proj.",
        r"\.final_layer_norm\.": ".mlp_norm.",
        r"\.fc1\.": ".mlp.up_proj.",
        r"\.fc2\.": ".mlp.down_proj.",
    }
    ignored: tuple[str, ...] = (r"\.embed_tokens\.weight$", r"coder\.version$")
    tied = {"lm_head.weight": "shared.weight"}

    def __init__(self, cfg: HFConfig):
        super().__init__()
        family = FAMILIES[cfg.choose("model_type", list(FAMILIES))]
        cfg.choose("share_encoder_decoder_embeddings", [True], True)  # Marian
        if family.closes_range is not None:
            self.ignored = (*self.ignored, r"\.embed_positions\.weights?$")
        self.shared = Embedding(
            cfg.vocab_size, cfg.hidden_size, cfg.hidden_size**0.5 if cfg.get("scale_embedding", False) else 1.0
        )
        self.encoder, self.decoder = BartStack(cfg, family, "encoder"), BartStack(cfg, family, "decoder")
        self.lm_head = LMHead(cfg.hidden_size, cfg.vocab_size)
        self.final_logits_bias = nn.Parameter(torch.zeros(1, cfg.vocab_size), requires_grad=False)
        self.final_logits_bias.is_optional = True  # type: ignore[attr-defined]

    def encode(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.encoder(positions, self.shared(input_ids))

    def forward(self, input_ids, positions, inputs_embeds=None):
        return self.decoder(positions, self.shared(input_ids))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states) + self.final_logits_bias
