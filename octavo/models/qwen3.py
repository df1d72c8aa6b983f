"""Qwen3: Llama whose query and key heads are normalised before the rotation."""

from octavo.config.hf import HFConfig
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class Qwen3Attention(LlamaAttention):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)


class Qwen3Layer(LlamaLayer):
    attention_class = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3Layer
