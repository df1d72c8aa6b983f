"""Falcon-H1: every layer has Mamba 2 and attention side by side; muP multipliers are folded into the weights they scale.

x + mamba(norm(x)) + attention(norm(x)), then the MLP.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from octavo.config.hf import HFConfig
from octavo.layers.causal_lm import keep_output_rows
from octavo.layers.rope import Rope
from octavo.models.hybrid import HYBRID_RENAMES, HybridForCausalLM, mamba2_mixer
from octavo.models.llama import LlamaLayer


class FalconH1Layer(LlamaLayer):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        self.mamba = mamba2_mixer(cfg)

    def forward(self, positions, x):
        mixed = self.mamba(positions, x, self.input_layernorm, None, 1.0)
        x = self.self_attn(positions, x, self.input_layernorm, x + mixed, 1.0)
        if self.is_last:
            x = keep_output_rows(x)
        return self.mlp(x, self.post_attention_layernorm, x)


class FalconH1ForCausalLM(HybridForCausalLM):
    layer_class = FalconH1Layer
    renames = {pattern: name for pattern, name in HYBRID_RENAMES.items() if "mamba" not in pattern}

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)

        def multiplier(key: str) -> float:
            return float(cfg.get(key, 1.0))

        gate, down = cfg.get("mlp_multipliers", (1.0, 1.0))
        attention_in, attention_out = multiplier("attention_in_multiplier"), multiplier("attention_out_multiplier")
        self.multipliers = {
            "q_proj.weight": attention_in,
            "k_proj.weight": attention_in * multiplier("key_multiplier"),
            "k_proj.bias": multiplier("key_multiplier"),
            "v_proj.weight": attention_in,
            "o_proj": attention_out,
            "mamba.out_proj": multiplier("ssm_out_multiplier"),
            "mamba.in_proj.weight": multiplier("ssm_in_multiplier"),
            "gate_proj": gate,
            "down_proj": down,
        }
        first: Any = self.model.layers[0]
        inner, channels, heads = first.mamba.parts
        shared = (channels - inner) // 2
        self.mamba_parts = (inner, inner, shared, shared, heads)  # gate, x, b, c, dt
        self.mamba_multipliers = cfg.get("ssm_multipliers", (1.0,) * 5)

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        return {
            "logits_scaling": 1.0 / float(cfg.get("lm_head_multiplier", 1.0)),
            "mamba_rms_norm": cfg.get("mamba_rms_norm", False),
            "mamba_norm_before_gate": cfg.get("mamba_norm_before_gate", True),
        }

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        factor = math.prod(by for part, by in self.multipliers.items() if f".{part}" in name)
        if ".mamba.in_proj." in name:
            parts = tensor.split(self.mamba_parts)
            tensor = torch.cat([part * by for part, by in zip(parts, self.mamba_multipliers, strict=True)])
        yield name, tensor if factor == 1.0 else tensor * factor
