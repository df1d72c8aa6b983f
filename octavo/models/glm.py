"""GLM and GLM-4: half of each head rotates, in neighbouring pairs; GLM-4 also normalises what attention and MLP give."""

from octavo.config.hf import HFConfig
from octavo.layers.rope import Rope
from octavo.models.gemma import SandwichLayer
from octavo.models.llama import LlamaForCausalLM, LlamaLayer


class GlmForCausalLM(LlamaForCausalLM):
    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}  # gate and up come as one

    @staticmethod
    def make_rope(cfg: HFConfig) -> Rope:
        return Rope.of(cfg, cfg.get("max_model_len"), interleaved=True)


class Glm4ForCausalLM(GlmForCausalLM):
    layer_class: type[LlamaLayer] = SandwichLayer
    renames = {
        r"\.post_attention_layernorm\.": ".pre_feedforward_layernorm.",
        r"\.post_self_attn_layernorm\.": ".post_attention_layernorm.",
        r"\.post_mlp_layernorm\.": ".post_feedforward_layernorm.",
    }
