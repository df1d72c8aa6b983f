"""Decoders with LayerNorm: what they share, and Bloom, Falcon, MPT, OLMo 1, StableLM, StarCoder2.

More are in `gpt.py` and `cohere.py`. One layer with switches, set by a family's `Style` and its configuration:

    parallel           attention and MLP read the same x: Falcon, GPT-J, GPT-NeoX, Phi, Cohere, some StableLM
    num_norms          1: the MLP shares attention's norm
    positions          "rotary"; "alibi", a bias by distance (Press et al. 2022): Bloom, MPT; "learned": GPT-2, OPT
    has_embedding_norm Bloom
    fused              q, k, v in one checkpoint tensor, "by group": [KV head: its q heads | k | v], as Bloom and Falcon have it
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.causal_lm import CausalLM, keep_output_rows
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import QKVLinear, RowLinear
from octavo.layers.mlp import MLP, GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import Rope
from octavo.models.llama import LlamaForCausalLM, layer_window


@dataclass(frozen=True)
class Style:
    """What a configuration comes to."""

    num_kv_heads: int
    width: int  # of the MLP
    activation: str
    norm_eps: float
    qkv_bias: bool
    bias: bool  # of all other linears but the head
    output_bias: bool | None = None  # of o_proj, where it differs
    head_bias: bool = False
    norm_bias: bool = True
    norm_weight: bool = True
    bound: float | None = None  # of what is projected to queries, keys and values
    parallel: bool = False
    num_norms: int = 2
    positions: str = "rotary"
    first_position: int = 0  # of a learned table, whose first rows OPT leaves out
    rotary_dim: int | None = None  # where it is no share of the head's width
    interleaved: bool = False  # neighbours rotate together
    gated: bool = False
    has_embedding_norm: bool = False
    logits_scale: float = 1.0
    tied: bool = True


def alibi_slopes(num_heads: int, largest: float = 8.0) -> torch.Tensor:
    """2^(-largest * i / n) for n heads; a number that is no power of two takes every other slope of the next one too."""

    def slopes(n: int) -> list[float]:
        return [2.0 ** (-largest * i / n) for i in range(1, n + 1)]

    power = 2 ** math.floor(math.log2(num_heads))
    return torch.tensor((slopes(power) + slopes(2 * power)[::2])[:num_heads], dtype=torch.float32)


class Attention(nn.Module):
    def __init__(self, cfg: HFConfig, style: Style, index: int, rope: Rope | None):
        super().__init__()
        heads, dim = cfg.num_heads, cfg.head_dim
        self.qkv_proj = QKVLinear(cfg.hidden_size, dim, heads, style.num_kv_heads, bias=style.qkv_bias)
        output_bias = style.bias if style.output_bias is None else style.output_bias
        self.o_proj = RowLinear(heads * dim, cfg.hidden_size, bias=output_bias)
        self.rope, self.bound = rope, style.bound
        slopes = alibi_slopes(heads) if style.positions == "alibi" else None
        self.attn = PagedAttention(
            heads, style.num_kv_heads, dim, window=layer_window(cfg, index), distance_bias=slopes
        )

    def forward(self, positions, hidden_states):
        qkv = self.qkv_proj(hidden_states)
        qkv = qkv if self.bound is None else qkv.clamp(-self.bound, self.bound)
        return self.o_proj(self.attn(qkv, positions, self.rope))


class Layer(nn.Module):
    attention_class: type[Attention] = Attention

    def __init__(self, cfg: HFConfig, style: Style, index: int, rope: Rope | None):
        super().__init__()
        size = cfg.hidden_size
        norm = (size, style.norm_eps, style.norm_bias, style.norm_weight)
        self.input_layernorm = LayerNorm(*norm)
        self.self_attn = self.attention_class(cfg, style, index, rope)
        self.post_attention_layernorm = LayerNorm(*norm) if style.num_norms == 2 else None
        self.mlp = self.make_mlp(cfg, style)
        self.parallel = style.parallel
        self.is_last = index == cfg.num_layers - 1

    def make_mlp(self, cfg: HFConfig, style: Style) -> nn.Module:
        """What comes after attention."""
        mlp = GatedMLP if style.gated else MLP
        return mlp(cfg.hidden_size, style.width, style.activation, style.bias)

    def forward(self, positions, x):
        normed = self.input_layernorm(x)
        attended = self.self_attn(positions, normed)
        if self.is_last:
            x, normed, attended = (keep_output_rows(t) for t in (x, normed, attended))
        after = x + attended
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(x if self.parallel else after)
        return after + self.mlp(normed)


class LayerNormModel(nn.Module):
    def __init__(self, cfg: HFConfig, style: Style, layer_class: type[Layer]):
        super().__init__()
        self.embed_tokens = Embedding(cfg.vocab_size, cfg.hidden_size)
        self.embed_positions = None
        if style.positions == "learned":
            rows = int(cfg.require("max_position_embeddings")) + style.first_position
            self.embed_positions = Embedding(rows, cfg.hidden_size)
        self.first_position = style.first_position
        self.embed_norm = LayerNorm(cfg.hidden_size, style.norm_eps) if style.has_embedding_norm else None
        rope = None
        if style.positions == "rotary":
            rope = Rope.of(cfg, cfg.get("max_model_len"), style.interleaved, style.rotary_dim)
        self.layers = nn.ModuleList(layer_class(cfg, style, i, rope) for i in range(cfg.num_layers))
        self.norm = LayerNorm(cfg.hidden_size, style.norm_eps, style.norm_bias, style.norm_weight)

    def forward(self, input_ids, positions, inputs_embeds=None):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + self.first_position)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        for layer in self.layers:
            x = layer(positions, x)
        return x


class LayerNormForCausalLM(CausalLM):
    """Subclasses read their configuration and rename their checkpoint's tensors to those of Llama."""

    fused_by_group = False
    layer_class: type[Layer] = Layer

    def __init__(self, cfg: HFConfig):
        super().__init__()
        self.head_dim, self.style = cfg.head_dim, self.read(cfg)
        self.model = LayerNormModel(cfg, self.style, self.layer_class)
        style = self.style
        self.lm_head = LMHead(cfg.hidden_size, cfg.vocab_size, style.head_bias, style.logits_scale)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if self.style.tied else {}

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        raise NotImplementedError

    def forward(self, input_ids, positions, inputs_embeds=None):
        return self.model(input_ids, positions, inputs_embeds)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model.norm(hidden_states))

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Rows of fused projections in our order: all q, all k, all v."""
        if self.fused_by_group and ".qkv_proj." in name:
            groups = tensor.unflatten(0, (self.style.num_kv_heads, -1, self.head_dim))
            parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
            tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        yield name, tensor


_TRANSFORMER = {
    r"^(transformer\.)?(word_embeddings|wte)\.": "model.embed_tokens.",
    r"^(transformer\.)?word_embeddings_layernorm\.": "model.embed_norm.",
    r"^(transformer\.)?(h|blocks)\.": "model.layers.",
    r"^(transformer\.)?(ln_f|norm_f)\.": "model.norm.",
    r"\.self_attention\.query_key_value\.": ".self_attn.qkv_proj.",
    r"\.self_attention\.dense\.": ".self_attn.o_proj.",
    r"\.mlp\.dense_h_to_4h\.": ".mlp.up_proj.",
    r"\.mlp\.dense_4h_to_h\.": ".mlp.down_proj.",
}


class BloomForCausalLM(LayerNormForCausalLM):
    renames = _TRANSFORMER
    fused_by_group = True

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        cfg.choose("apply_residual_connection_post_layernorm", [False], False)
        eps = float(cfg.get("layer_norm_epsilon", 1e-5))
        return Style(
            cfg.num_heads, 4 * cfg.hidden_size, "gelu_tanh", eps, True, True, positions="alibi", has_embedding_norm=True
        )


class FalconForCausalLM(LayerNormForCausalLM):
    renames = {**_TRANSFORMER, r"\.ln_attn\.": ".input_layernorm.", r"\.ln_mlp\.": ".post_attention_layernorm."}
    fused_by_group = True

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        cfg.choose("alibi", [False], False)
        is_new = bool(cfg.get("new_decoder_architecture", False))
        parallel = is_new or bool(cfg.get("parallel_attn", True))
        num_norms = int(cfg.get("num_ln_in_parallel_attn", 2)) if is_new else 1 if parallel else 2
        bias = bool(cfg.get("bias", False))
        return Style(
            cfg.num_kv_heads,
            int(cfg.get("ffn_hidden_size", 4 * cfg.hidden_size)),
            cfg.choose("activation", ["gelu"], "gelu"),
            float(cfg.get("layer_norm_epsilon", 1e-5)),
            bias,
            bias,
            parallel=parallel,
            num_norms=num_norms,
            tied=bool(cfg.get("tie_word_embeddings", True)),
        )


class MptForCausalLM(LayerNormForCausalLM):
    renames = {
        **_TRANSFORMER,
        r"\.norm_1\.": ".input_layernorm.",
        r"\.norm_2\.": ".post_attention_layernorm.",
        r"\.attn\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.ffn\.": ".mlp.",
    }

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        attention = HFConfig({"architectures": [cfg.architecture], **(cfg.get("attn_config") or {})})
        for key, only in (("alibi", True), ("alibi_bias_max", 8), ("qk_ln", False), ("prefix_lm", False)):
            attention.choose(key, [only], only)
        attention.choose("clip_qkv", [0], 0)
        attention.choose("softmax_scale", [cfg.head_dim**-0.5], cfg.head_dim**-0.5)
        width = int(cfg.get("expansion_ratio", 4)) * cfg.hidden_size
        return Style(cfg.num_heads, width, "gelu", 1e-5, False, False, norm_bias=False, positions="alibi")


class OlmoForCausalLM(LayerNormForCausalLM):
    packing = LlamaForCausalLM.packing

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        bias = bool(cfg.get("attention_bias", False))
        return Style(
            cfg.num_kv_heads,
            cfg.intermediate_size,
            cfg.choose("hidden_act", ["silu"], "silu"),
            1e-5,
            bias,
            False,
            output_bias=bias,
            norm_bias=False,
            norm_weight=False,
            bound=cfg.get("clip_qkv"),
            gated=True,
            tied=cfg.tie_word_embeddings,
        )


class StableLmForCausalLM(LayerNormForCausalLM):
    packing = LlamaForCausalLM.packing

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        cfg.choose("qk_layernorm", [False], False)
        parallel = bool(cfg.get("use_parallel_residual", False))
        return Style(
            cfg.num_kv_heads,
            cfg.intermediate_size,
            cfg.choose("hidden_act", ["silu"], "silu"),
            float(cfg.get("layer_norm_eps", 1e-5)),
            bool(cfg.get("use_qkv_bias", False)),
            False,
            parallel=parallel,
            num_norms=1 if parallel else 2,
            gated=True,
            tied=cfg.tie_word_embeddings,
        )


class Starcoder2ForCausalLM(LayerNormForCausalLM):
    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    renames = {r"\.mlp\.c_fc\.": ".mlp.up_proj.", r"\.mlp\.c_proj\.": ".mlp.down_proj."}

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        cfg.choose("hidden_act", ["gelu_pytorch_tanh"])
        bias, eps = bool(cfg.get("use_bias", True)), float(cfg.get("norm_epsilon", 1e-5))
        tied = bool(cfg.get("tie_word_embeddings", True))
        return Style(cfg.num_kv_heads, cfg.intermediate_size, "gelu_tanh", eps, bias, bias, tied=tied)
