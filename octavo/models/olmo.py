"""OLMo 2 and 3, OLMoE, Exaone 4 and MiniMax-M2: norms over all heads at once, and norms behind attention and MLP.

OLMo 2, 3     layers normalise what attention and MLP give, not what they read; 3: three layers of four see a window
OLMoE         Llama's layers, with experts
Exaone 4      OLMo 2's layers, heads normalised one by one; layers that see everything have no positions
MiniMax-M2    Llama's layers, with DeepSeek-V3's choice of experts in one group
"""

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.causal_lm import keep_output_rows
from octavo.layers.moe.experts import STACKED_RENAMES
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer
from octavo.models.qwen3 import Qwen3Attention


class WideNormAttention(LlamaAttention):
    """All query heads are normalised together, and all key heads."""

    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        q_width, k_width, _ = self.qkv_proj.out_sizes
        self.wide_q_norm = RMSNorm(q_width, cfg.rms_norm_eps)
        self.wide_k_norm = RMSNorm(k_width, cfg.rms_norm_eps)
        self.bound = cfg.get("clip_qkv")

    def adjust(self, positions, qkv):
        q, k, v = qkv.split(self.qkv_proj.out_sizes, -1)
        qkv = torch.cat((self.wide_q_norm(q), self.wide_k_norm(k), v), -1)
        return qkv if self.bound is None else qkv.clamp(-self.bound, self.bound)


class PostNormLayer(LlamaLayer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    attention_class: type[LlamaAttention] = WideNormAttention

    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        del self.input_layernorm
        self.post_feedforward_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, positions, x):
        attended = self.self_attn(positions, x, None, None, 1.0)
        if self.is_last:
            x, attended = keep_output_rows(x), keep_output_rows(attended)
        x = self.post_attention_layernorm(attended, x)
        return self.post_feedforward_layernorm(self.mlp(x), x)


class Olmo2ForCausalLM(LlamaForCausalLM):
    layer_class: type[LlamaLayer] = PostNormLayer
    renames = {r"\.self_attn\.(q|k)_norm\.": r".self_attn.wide_\1_norm."}


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    def __init__(self, cfg: HFConfig):
        if cfg.get("rope_scaling"):  # as transformers 4 wrote it: of the layers that see everything
            plain = {"rope_type": "default", "rope_theta": cfg.rope_parameters["rope_theta"]}
            by_kind = {"full_attention": cfg.rope_parameters, "sliding_attention": plain}
            cfg = HFConfig({**cfg.data, "rope_parameters": by_kind})
        super().__init__(cfg)


class OlmoeLayer(LlamaLayer):
    attention_class = WideNormAttention

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        routing = Routing(cfg.num_experts_per_token, renormalize=bool(cfg.get("norm_topk_prob", False)))
        return MoE.of(cfg, routing, "intermediate_size")


class OlmoeForCausalLM(LlamaForCausalLM):
    layer_class: type[LlamaLayer] = OlmoeLayer
    renames = {**Olmo2ForCausalLM.renames, **STACKED_RENAMES}


class MiniMaxM2Layer(LlamaLayer):
    attention_class = WideNormAttention

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        routing = Routing(cfg.num_experts_per_token, "sigmoid", renormalize=True)
        return MoE.of(cfg, routing, "intermediate_size", choice_bias=True)


class MiniMaxM2ForCausalLM(OlmoeForCausalLM):
    layer_class = MiniMaxM2Layer
    renames = {
        r"\.block_sparse_moe\.": ".mlp.",
        r"\.mlp\.e_score_correction_bias$": ".mlp.gate.e_score_correction_bias",
        **OlmoeForCausalLM.renames,
    }
    expert_names = ("w1", "w3", "w2")
    ignored = (*LlamaForCausalLM.ignored, r"^model\.mtp\.")

    @staticmethod
    def make_rope(cfg: HFConfig) -> Rope:
        return Rope.of(cfg, cfg.get("max_model_len"), dim=cfg.get("rotary_dim"))


class Exaone4Attention(Qwen3Attention):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        if cfg.get("sliding_window") and not self.attn.window:
            self.rope = None


class Exaone4Layer(PostNormLayer):
    attention_class = Exaone4Attention


class Exaone4ForCausalLM(LlamaForCausalLM):
    layer_class = Exaone4Layer

    def __init__(self, cfg: HFConfig):
        every = cfg.get("sliding_window_pattern")
        if cfg.get("layer_types") is None and every:
            every = len(every) if isinstance(every, str) else int(every)  # "LLLG" is 4
            kinds = ["sliding_attention" if i % every else "full_attention" for i in range(1, cfg.num_layers + 1)]
            cfg = HFConfig({**cfg.data, "layer_types": kinds})
        super().__init__(cfg)
