"""Qwen3-Next and Qwen3.5 (text): three layers of the gated delta rule to one of gated attention, experts in some sizes.

Attention's output is weighed by the sigmoid of a gate that its query projection makes beside the queries; norms multiply by
1 + weight, but for those behind the delta rule. The layers in the checkpoint that draft further tokens are not used.

Qwen3-Next     projects q, k, v and z of a key head side by side; experts in every layer
Qwen3.5        q, k and v, then z; dense, or experts in every layer
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.linear import Linear
from octavo.layers.moe.experts import expert_packing
from octavo.layers.rope import Rope
from octavo.layers.ssm.mixers import GatedDeltaNet
from octavo.models.hybrid import HybridForCausalLM, HybridLayer
from octavo.models.qwen3 import Qwen3Attention
from octavo.models.qwen_moe import Qwen2MoeForCausalLM, qwen_mlp


class GatedAttention(Qwen3Attention):
    """o(attention * sigmoid(gate))."""

    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        self.gate_width, kv_width = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        widths = (self.gate_width, kv_width, kv_width, self.gate_width)
        self.qkv_proj = Linear(cfg.hidden_size, widths, self.qkv_proj.has_bias)  # type: ignore[assignment]

    def forward(self, positions, hidden_states, norm, residual, scale):
        qkv, gate = self.qkv_proj(hidden_states, norm).tensor_split([-self.gate_width], -1)
        attended = self.attn(qkv, positions, self.rope, self.q_norm, self.k_norm)
        return self.o_proj(attended * gate.sigmoid(), residual=residual, scale=scale)


class Qwen35Layer(HybridLayer):
    attention_class = GatedAttention

    def make_recurrent(self, cfg: HFConfig) -> nn.Module:
        sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        key_heads, heads, key_dim, value_dim, width = (int(cfg.require(f"linear_{s}")) for s in sizes)
        return GatedDeltaNet(cfg.hidden_size, key_heads, heads, key_dim, value_dim, width, cfg.rms_norm_eps)


class Qwen3NextLayer(Qwen35Layer):
    make_mlp = qwen_mlp


class Qwen35ForCausalLM(HybridForCausalLM):
    layer_class: type[HybridLayer] = Qwen35Layer
    renames = {r"\.linear_attn\.": ".self_attn."}
    ignored = (*HybridForCausalLM.ignored, r"^mtp\.")
    packing = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj", "q_gate"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        every = int(cfg.get("full_attention_interval", 4))
        kinds = ["linear_attention" if i % every else "full_attention" for i in range(1, cfg.num_layers + 1)]
        return {"layer_types": cfg.get("layer_types", kinds), "norm_topk_prob": cfg.get("norm_topk_prob", True)}

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if ".q_proj." in name:  # of each head the query, then the gate
            query, gate = tensor.unflatten(0, (self.cfg.num_heads, 2, -1)).transpose(0, 1).flatten(1, 2)
            yield name, query
            yield name.replace(".q_proj.", ".q_gate."), gate
        elif name.endswith("norm.weight") and not name.endswith(".self_attn.norm.weight"):
            yield name, tensor + 1
        else:
            yield name, tensor


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    layer_class = Qwen3NextLayer
    renames = {**Qwen35ForCausalLM.renames, **Qwen2MoeForCausalLM.renames}

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.packing = {**Qwen35ForCausalLM.packing, **expert_packing(cfg.num_experts)}


class Qwen3NextForCausalLM(Qwen35MoeForCausalLM):
    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        cfg = self.cfg
        heads, key = int(cfg.require("linear_num_key_heads")), int(cfg.require("linear_key_head_dim"))
        shared_by = int(cfg.require("linear_num_value_heads")) // heads
        value = shared_by * int(cfg.require("linear_value_head_dim"))
        parts = (key, key, value, value) if ".in_proj_qkvz." in name else (shared_by, shared_by)
        if ".in_proj_" in name:  # of each key head one part after the other
            by_head = tensor.unflatten(0, (heads, -1)).split(parts, 1)
            tensor = torch.cat([part.flatten(0, 1) for part in by_head])
        yield from super().remap(name, tensor)
