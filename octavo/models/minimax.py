"""MiniMax: lightning attention in most layers, softmax attention in the others, experts in all.

The residual is taken behind the norm: h = norm(x), x = alpha h + beta mixer(h), with factors for each kind of mixer and for
the experts.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.causal_lm import keep_output_rows
from octavo.layers.moe.experts import STACKED_RENAMES, expert_packing
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.rope import Rope
from octavo.layers.ssm.mixers import LightningAttention
from octavo.models.hybrid import HybridForCausalLM, HybridLayer


class MiniMaxLayer(HybridLayer):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        self.index = index
        super().__init__(cfg, index, rope)
        kind = "linear_attn" if isinstance(self.self_attn, LightningAttention) else "full_attn"
        self.alpha, self.beta = (float(cfg.get(f"{kind}_{name}_factor", 1.0)) for name in ("alpha", "beta"))
        self.mlp_alpha, self.mlp_beta = (float(cfg.get(f"mlp_{name}_factor", 1.0)) for name in ("alpha", "beta"))

    def make_recurrent(self, cfg: HFConfig) -> nn.Module:
        cfg.choose("hidden_act", ["silu"], "silu")
        heads = torch.arange(1, cfg.num_heads + 1, dtype=torch.float32)
        # Later layers look back further.
        share = 1 - self.index / (cfg.num_layers - 1 + 1e-5) + 1e-5
        return LightningAttention(
            cfg.hidden_size, cfg.num_heads, cfg.head_dim, 2 ** (-8 * heads / cfg.num_heads) * share
        )

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        return MoE.of(cfg, Routing(cfg.num_experts_per_token, renormalize=True), "intermediate_size")

    def forward(self, positions, x):
        h = self.input_layernorm(x)
        x = self.self_attn(positions, h, None, self.alpha * h, self.beta)
        if self.is_last:
            x = keep_output_rows(x)
        norm = self.post_attention_layernorm
        return self.mlp(x, norm, self.mlp_alpha * norm(x), self.mlp_beta)


class MiniMaxForCausalLM(HybridForCausalLM):
    layer_class = MiniMaxLayer
    renames = {r"\.block_sparse_moe\.": ".mlp.", **STACKED_RENAMES}
    ignored = (*HybridForCausalLM.ignored, r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$")

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.packing = {**HybridForCausalLM.packing, **expert_packing(cfg.num_experts, "w1", "w3", "w2")}

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        kinds = ["linear_attention" if i % 2 else "full_attention" for i in range(cfg.num_layers)]
        return {"layer_types": cfg.get("layer_types", kinds)}

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if name.endswith(".self_attn.qkv_proj.weight"):  # lightning attention's: of each head q, k and v
            q, k, v = tensor.unflatten(0, (self.cfg.num_heads, 3, -1)).unbind(1)
            name, tensor = name.replace("qkv_proj", "vkq_proj"), torch.cat([v, k, q]).flatten(0, 1)
        yield name, tensor
