"""Zamba 2 (Glorioso et al. 2024): Mamba 2 in every layer; some layers call a block of attention and MLP before it.

blocks     are few (`num_mem_blocks`), and the layers that call one take them in turn: they share its weights, each keeps its
           own keys and values
adapters   of low rank tell the calls apart
x + mixer(norm(x + linear(block([x | embedding])))): what a block makes is read by the mixer, and is no part of the residual
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.causal_lm import keep_output_rows
from octavo.layers.linear import Linear, QKVLinear, RowLinear
from octavo.layers.mlp import GATED_ACTIVATIONS, GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.models.hybrid import HybridForCausalLM, mamba2_mixer
from octavo.models.llama import LlamaForCausalLM, LlamaModel
from octavo.models.mamba import MixerLayer


def calling_layers(cfg: HFConfig) -> list[int]:
    """The layers that call a block, by index."""
    return [i for i, kind in enumerate(cfg.require("layers_block_type")) if kind == "hybrid"]


class SharedBlock(nn.Module):
    """mlp(norm(attention(norm([x | embedding])))): the weights that several layers share."""

    def __init__(self, cfg: HFConfig):
        super().__init__()
        size, activation = cfg.hidden_size, cfg.choose("hidden_act", list(GATED_ACTIVATIONS), "gelu")
        self.input_layernorm = RMSNorm(2 * size, cfg.rms_norm_eps)
        self.qkv_proj = QKVLinear(2 * size, cfg.head_dim, cfg.num_heads, cfg.num_kv_heads)
        self.o_proj = RowLinear(cfg.num_heads * cfg.head_dim, size)
        self.pre_ff_layernorm = RMSNorm(size, cfg.rms_norm_eps)
        self.feed_forward = GatedMLP(size, cfg.intermediate_size, activation, bool(cfg.get("add_bias_linear", False)))

    def forward(self, positions: torch.Tensor, x: torch.Tensor, call: "Call") -> torch.Tensor:
        """x [tokens, 2 * hidden] → [tokens, hidden]."""
        x = self.input_layernorm(x)
        qkv = self.qkv_proj(x)
        if call.qkv_adapters:
            qkv = qkv + torch.cat([adapter(x) for adapter in call.qkv_adapters.values()], -1)
        x = self.pre_ff_layernorm(self.o_proj(call.attn(qkv, positions, call.rope)))
        return self.feed_forward.adapted(x, call.gate_up_adapter)


def adapter(size: int, rank: int, out: int) -> nn.Sequential:
    """A term of low rank beside a linear of a block."""
    return nn.Sequential(Linear(size, rank), Linear(rank, out))


class Call(nn.Module):
    """What a layer has of its own when it calls `block`."""

    def __init__(self, cfg: HFConfig, block: SharedBlock, rope: Rope | None):
        super().__init__()
        size, rank = cfg.hidden_size, int(cfg.get("adapter_rank", 128))
        self.block = (block,)  # in a tuple, so that it is no part of this
        self.rope = rope
        self.attn = PagedAttention(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, scale=(cfg.head_dim / 2) ** -0.5)
        self.qkv_adapters = nn.ModuleDict()
        if cfg.get("use_shared_attention_adapter", False):
            widths = zip("qkv", block.qkv_proj.out_sizes, strict=True)
            self.qkv_adapters.update({name: adapter(2 * size, rank, width) for name, width in widths})
        self.gate_up_adapter = adapter(size, rank, 2 * cfg.intermediate_size)
        self.linear = Linear(size, size)

    def forward(self, positions: torch.Tensor, x: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.block[0](positions, torch.cat((x, embeds), -1), self))


class Zamba2Layer(MixerLayer):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope | None):
        super().__init__(cfg, index, rope)
        self.call: Call | None = None  # the model's business, which has the blocks

    def make_mixer(self, cfg: HFConfig, index: int) -> nn.Module:
        # `hidden_act` is the MLP's; the norm within the mixer has an epsilon of its own.
        return mamba2_mixer(HFConfig({**cfg.data, "hidden_act": "silu", "rms_norm_eps": 1e-5}))

    def forward(self, positions, x, embeds=None):
        read = x if self.call is None else self.call(positions, x, embeds)
        x = self.mixer(positions, read, self.norm, x, 1.0)
        return keep_output_rows(x) if self.is_last else x


class Zamba2Model(LlamaModel):
    def __init__(self, cfg: HFConfig, layer_class: type[nn.Module], ropes: Sequence[Rope | None]):
        super().__init__(cfg, layer_class, ropes)
        self.blocks = nn.ModuleList(SharedBlock(cfg) for _ in range(int(cfg.get("num_mem_blocks", 1))))
        for turn, index in enumerate(calling_layers(cfg)):
            block: Any = self.blocks[turn % len(self.blocks)]
            self.layers[index].call = Call(cfg, block, ropes[index])

    def forward(self, input_ids, positions, inputs_embeds=None):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        embeds = x.clone()  # residuals are added in place
        for layer in self.layers:
            x = layer(positions, x, embeds)
        return x


class Zamba2ForCausalLM(HybridForCausalLM):
    layer_class = Zamba2Layer
    model_class = Zamba2Model
    packing = {"qkv_proj": LlamaForCausalLM.packing["qkv_proj"]}
    renames = {
        r"^model\.final_layernorm\.": "model.norm.",
        r"^(model\.layers\.\d+)\.linear\.": r"\1.call.linear.",
        r"^(model\.layers\.\d+)(?:\.mamba_decoder)?\.input_layernorm\.": r"\1.norm.",
        r"^(model\.layers\.\d+)(?:\.mamba_decoder)?\.mamba\.": r"\1.mixer.",
    }

    def __init__(self, cfg: HFConfig):
        cfg.choose("use_long_context", [False], False)
        cfg.choose("tie_word_embeddings", [True], True)  # transformers shares the blocks' weights only along with these
        super().__init__(cfg)
        self.callers, self.num_blocks = calling_layers(cfg), int(cfg.get("num_mem_blocks", 1))
        self._shared: set[str] = set()  # names of shared tensors that were loaded

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        return {
            "head_dim": 2 * cfg.hidden_size // cfg.num_heads,
            "intermediate_size": cfg.get("intermediate_size", 4 * cfg.hidden_size),
            "rms_norm_eps": cfg.get("rms_norm_eps", 1e-5),
            "tie_word_embeddings": True,
            "mamba_n_heads": cfg.get("n_mamba_heads", 8),
            "mamba_d_state": cfg.get("mamba_d_state", 64),
            "mamba_n_groups": cfg.get("mamba_ngroups", 1),
            "mamba_proj_bias": cfg.get("add_bias_linear", False),
            "time_step_limit": (cfg.get("time_step_min", 0.001), float("inf")),
        }

    @classmethod
    def layer_ropes(cls, cfg: HFConfig) -> Sequence[Rope | None]:
        return super().layer_ropes(cfg) if cfg.get("use_mem_rope", False) else [None] * cfg.num_layers

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """A block's tensors lie with any of the layers that call it, or with all of them, the adapters of all its calls
        among them."""
        found = re.match(r"model\.layers\.(\d+)\.shared_transformer\.(?:self_attn\.)?(.+)", name)
        if not found or int(found[1]) not in self.callers:
            yield name, tensor
            return
        block = self.callers.index(int(found[1])) % self.num_blocks
        name = f"model.blocks.{block}.{found[2]}"
        of_call = re.match(r"(?:linear_([qkv])|feed_forward\.(gate_up)_proj)_adapter_list\.(\d+)\.(.+)", found[2])
        if of_call and int(of_call[3]) < len(self.callers):
            own = "gate_up_adapter" if of_call[2] else f"qkv_adapters.{of_call[1]}"
            name = f"model.layers.{self.callers[int(of_call[3])]}.call.{own}.{of_call[4]}"
        if name not in self._shared:
            self._shared.add(name)
            yield name, tensor
