"""Jamba: Mamba with norms before the scan, attention without positions, experts in every other layer."""

import math
from typing import Any

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.moe.experts import STACKED_RENAMES, expert_packing
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.norm import RMSNorm
from octavo.layers.ssm.mixers import Mamba
from octavo.models.hybrid import HYBRID_RENAMES, HybridLayer, WithoutPositions


class JambaMamba(Mamba):
    def __init__(self, cfg: HFConfig):
        rank, size = cfg.get("mamba_dt_rank", "auto"), int(cfg.get("mamba_d_state", 16))
        rank = math.ceil(cfg.hidden_size / 16) if rank == "auto" else int(rank)
        super().__init__(
            cfg.hidden_size,
            int(cfg.get("mamba_expand", 2)) * cfg.hidden_size,
            size,
            rank,
            int(cfg.get("mamba_d_conv", 4)),
            bool(cfg.get("mamba_proj_bias", False)),
            bool(cfg.get("mamba_conv_bias", True)),
        )
        self.dt_layernorm = RMSNorm(rank, cfg.rms_norm_eps)
        self.b_layernorm, self.c_layernorm = RMSNorm(size, cfg.rms_norm_eps), RMSNorm(size, cfg.rms_norm_eps)

    def normalise(self, *parts):
        norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
        return [norm(part) for norm, part in zip(norms, parts, strict=True)]


class JambaLayer(HybridLayer):
    def make_recurrent(self, cfg: HFConfig) -> nn.Module:
        return JambaMamba(cfg)

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        has_experts = index % cfg.get("expert_layer_period", 2) == cfg.get("expert_layer_offset", 1)
        if not has_experts or cfg.num_experts <= 1:
            return super().make_mlp(cfg, index)
        return MoE.of(cfg, Routing(cfg.num_experts_per_token), "intermediate_size")


class JambaForCausalLM(WithoutPositions):
    layer_class = JambaLayer
    renames = {
        **HYBRID_RENAMES,
        r"\.mlp\.router\.": ".mlp.gate.",
        r"\.dt_proj\.bias$": ".dt_bias",
        **STACKED_RENAMES,
    }

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.packing = {**WithoutPositions.packing, **expert_packing(cfg.num_experts)}

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        period, offset = cfg.get("attn_layer_period", 8), cfg.get("attn_layer_offset", 4)
        return {"layer_types": ["attention" if i % period == offset else "mamba" for i in range(cfg.num_layers)]}
