"""GLM-4-MoE, Solar Open and dots.llm1: Llama's attention, with head norms in some checkpoints, and DeepSeek-V3's experts."""

from octavo.config.hf import HFConfig
from octavo.layers.moe.experts import STACKED_RENAMES
from octavo.layers.rope import Rope
from octavo.models.deepseek import DeepseekLayer, draft_layers
from octavo.models.llama import LlamaForCausalLM, LlamaLayer
from octavo.models.qwen3 import Qwen3Attention


class Glm4MoeAttention(Qwen3Attention):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        if not cfg.get("use_qk_norm", cfg.model_type == "dots1"):
            self.q_norm = self.k_norm = None


class Glm4MoeLayer(DeepseekLayer):
    attention_class = Glm4MoeAttention


class Glm4MoeForCausalLM(LlamaForCausalLM):
    layer_class: type[LlamaLayer] = Glm4MoeLayer
    renames = STACKED_RENAMES

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.ignored = (*LlamaForCausalLM.ignored, *draft_layers(cfg))
