"""LFM2 and LFM2-MoE: gated short convolutions, and attention with normalised heads in some layers."""

from typing import Any

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.moe.experts import STACKED_RENAMES, expert_packing
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.ssm.mixers import ConvMixer
from octavo.models.hybrid import HybridForCausalLM, HybridLayer
from octavo.models.qwen3 import Qwen3Attention


class Lfm2Layer(HybridLayer):
    attention_class = Qwen3Attention

    def make_recurrent(self, cfg: HFConfig) -> nn.Module:
        return ConvMixer(cfg.hidden_size, int(cfg.get("conv_L_cache", 3)), bool(cfg.get("conv_bias", False)))


class Lfm2MoeLayer(Lfm2Layer):
    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        if index < cfg.get("num_dense_layers", 2):
            return super().make_mlp(cfg, index)
        scale, renormalize = float(cfg.get("routed_scaling_factor", 1.0)), bool(cfg.get("norm_topk_prob", True))
        routing = Routing(cfg.num_experts_per_token, "sigmoid", renormalize, scale)
        return MoE.of(cfg, routing, choice_bias=bool(cfg.get("use_expert_bias", True)))


class Lfm2ForCausalLM(HybridForCausalLM):
    layer_class = Lfm2Layer
    packing = {**HybridForCausalLM.packing, "gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    renames = {
        r"\.layers\.(\d+)\.conv\.": r".layers.\1.self_attn.",
        r"\.self_attn\.([qk])_layernorm\.": r".self_attn.\1_norm.",
        r"\.operator_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.feed_forward\.": ".mlp.",
        r"\.embedding_norm\.": ".norm.",
    }

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        kinds = self.words(cfg)["layer_types"]
        attends = "|".join(str(i) for i, kind in enumerate(kinds) if kind != "conv")
        self.renames = {
            rf"\.layers\.({attends})\.self_attn\.out_proj\.": r".layers.\1.self_attn.o_proj.",
            **self.renames,
        }

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        attends = cfg.get("full_attn_idxs", range(cfg.num_layers))
        kinds = ["full_attention" if i in attends else "conv" for i in range(cfg.num_layers)]
        width = int(cfg.get("block_ff_dim") or cfg.intermediate_size)
        if cfg.model_type == "lfm2" and cfg.get("block_auto_adjust_ff_dim", True):
            unit = int(cfg.get("block_multiple_of", 256))
            width = int(cfg.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
            width = -(-width // unit) * unit
        return {
            "layer_types": cfg.get("layer_types", kinds),
            "intermediate_size": width,
            "rms_norm_eps": cfg.get("norm_eps", 1e-5),
            "tie_word_embeddings": cfg.get("tie_word_embeddings", cfg.get("tie_embedding", True)),
        }


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    layer_class = Lfm2MoeLayer

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.packing = {**Lfm2ForCausalLM.packing, **expert_packing(cfg.num_experts, "w1", "w3", "w2")}
        self.renames = {**self.renames, r"\.expert_bias$": ".gate.e_score_correction_bias", **STACKED_RENAMES}
