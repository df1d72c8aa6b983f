"""Hunyuan: Llama whose query and key heads are normalised after the rotation; its mixtures have a shared expert."""

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.moe.experts import STACKED_RENAMES
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class HunyuanAttention(LlamaAttention):
    rope: Rope

    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        self.query_layernorm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.key_layernorm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)

    def forward(self, positions, hidden_states, norm, residual, scale):
        attn = self.attn
        heads = (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads)
        q, k, v = self.qkv_proj(hidden_states, norm).unflatten(-1, (-1, attn.head_dim)).split(heads, 1)
        q = self.query_layernorm(self.rope.rotate(q, positions))
        k = self.key_layernorm(self.rope.rotate(k, positions))
        return self.o_proj(attn.attend(q, k, v).flatten(1), residual=residual, scale=scale)


class HunyuanLayer(LlamaLayer):
    attention_class = HunyuanAttention


class HunyuanForCausalLM(LlamaForCausalLM):
    layer_class: type[LlamaLayer] = HunyuanLayer


class HunyuanMoeLayer(HunyuanLayer):
    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        top_k = cfg.require("num_experts_per_tok")  # for each layer, in some configurations
        routing = Routing(top_k[index] if isinstance(top_k, list) else top_k, renormalize=True)
        return MoE.of(cfg, routing, "intermediate_size", shared_width=cfg.intermediate_size)


class HunyuanMoeForCausalLM(HunyuanForCausalLM):
    layer_class = HunyuanMoeLayer
    renames = {r"\.mlp\.gate\.wg\.": ".mlp.gate.", r"\.shared_mlp\.": ".shared_experts.", **STACKED_RENAMES}
