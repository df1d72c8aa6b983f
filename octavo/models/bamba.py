"""Bamba: Mamba 2, and attention that rotates half of each head in a few layers."""

from typing import Any

from octavo.config.hf import HFConfig
from octavo.models.hybrid import HybridForCausalLM


class BambaForCausalLM(HybridForCausalLM):
    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        attends = cfg.get("attn_layer_indices", [])
        kinds = ["full_attention" if i in attends else "linear_attention" for i in range(cfg.num_layers)]
        return {"layer_types": kinds, "partial_rotary_factor": cfg.get("partial_rotary_factor", 0.5)}
