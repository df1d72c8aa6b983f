"""DeepSeek-V2 and V3 (and their likes): latent attention, and experts behind a few dense layers.

scoring         V2: softmax, groups ranked by their best expert; V3: sigmoid with a choice bias, groups by their best two
q_lora_rank     absent in V2-Lite: the query then comes from the hidden state in one step
MTP layers      V3's checkpoints hold layers that draft further tokens, after the last; they are not used
"""

from torch import nn

from octavo.config.hf import HFConfig
from octavo.errors import ConfigError
from octavo.layers.attention.mla import LatentAttention
from octavo.layers.linear import Linear, RowLinear
from octavo.layers.moe.experts import STACKED_RENAMES
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope, yarn_mscale
from octavo.models.llama import LlamaForCausalLM, LlamaLayer


def attention_scale(cfg: HFConfig, head_dim: int) -> float:
    """1 / sqrt(head_dim), times YaRN's temperature where the checkpoint asks for it."""
    rope = cfg.rope_parameters
    scale = head_dim**-0.5
    if rope["rope_type"] == "yarn" and rope.get("mscale_all_dim"):
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return scale


def draft_layers(cfg: HFConfig) -> list[str]:
    """Patterns of the tensors of layers that draft further tokens, which stand after the last."""
    drafting = range(cfg.num_layers, cfg.num_layers + int(cfg.get("num_nextn_predict_layers", 0)))
    return [rf"^model\.layers\.{i}\." for i in drafting]


class DeepseekAttention(nn.Module):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__()
        nope, rotary, value = (int(cfg.require(k)) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        rank, q_rank = int(cfg.require("kv_lora_rank")), cfg.get("q_lora_rank")
        bias = bool(cfg.get("attention_bias", False))
        q_width = cfg.num_heads * (nope + rotary)
        if bias and not q_rank:
            raise ConfigError("attention_bias=true is supported together with q_lora_rank only.")
        self.latent_width = rank + rotary
        # Both read the same input: one product.
        self.q_kv_a_proj = Linear(cfg.hidden_size, (q_rank or q_width, self.latent_width), bias)
        self.q_a_layernorm = RMSNorm(q_rank) if q_rank else None
        self.q_b_proj = Linear(q_rank, q_width) if q_rank else None
        scale = attention_scale(cfg, nope + rotary)
        self.attn = self.make_attn(cfg, (cfg.num_heads, nope, rotary, value, rank), scale)
        self.o_proj = RowLinear(cfg.num_heads * value, cfg.hidden_size, bias=bias)
        self.rope = rope

    @staticmethod
    def make_attn(cfg: HFConfig, sizes: tuple[int, int, int, int, int], scale: float) -> LatentAttention:
        """`sizes` as in `LatentAttention`."""
        return LatentAttention(*sizes, scale)

    def forward(self, positions, hidden_states, norm, residual, scale):
        q, latent = self.q_kv_a_proj(hidden_states, norm).tensor_split([-self.latent_width], dim=-1)
        if self.q_b_proj is not None:
            q = self.q_b_proj(q.contiguous(), self.q_a_layernorm)
        return self.o_proj(self.attn(q, latent, positions, self.rope), residual=residual, scale=scale)


class DeepseekLayer(LlamaLayer):
    attention_class: type[nn.Module] = DeepseekAttention

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        kinds = cfg.get("mlp_layer_types")
        is_dense = index < cfg.get("first_k_dense_replace", 0) if kinds is None else kinds[index] == "dense"
        if is_dense or not cfg.num_experts:
            return super().make_mlp(cfg, index)
        shared_width = int(cfg.require("moe_intermediate_size")) * int(cfg.get("n_shared_experts", 0))
        return MoE.of(cfg, self.routing(cfg), choice_bias=self.has_choice_bias, shared_width=shared_width)

    has_choice_bias = True

    @staticmethod
    def routing(cfg: HFConfig) -> Routing:
        """V3's."""
        return Routing(
            cfg.num_experts_per_token,
            cfg.choose("scoring_func", ["sigmoid"], "sigmoid"),
            bool(cfg.get("norm_topk_prob", True)),
            float(cfg.get("routed_scaling_factor", 1.0)),
            int(cfg.get("n_group", 1)),
            int(cfg.get("topk_group", 1)),
            "top2",
        )


class DeepseekV2Layer(DeepseekLayer):
    has_choice_bias = False

    @staticmethod
    def routing(cfg: HFConfig) -> Routing:
        in_groups = cfg.choose("topk_method", ["greedy", "group_limited_greedy"], "greedy") != "greedy"
        return Routing(
            cfg.num_experts_per_token,
            cfg.choose("scoring_func", ["softmax"], "softmax"),
            cfg.choose("norm_topk_prob", [False], False),
            float(cfg.get("routed_scaling_factor", 1.0)),
            int(cfg.get("n_group", 1)) if in_groups else 1,
            int(cfg.get("topk_group", 1)) if in_groups else 1,
        )


class DeepseekV3ForCausalLM(LlamaForCausalLM):
    packing = {"gate_up_proj": ("gate_proj", "up_proj"), "q_kv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
    layer_class: type[LlamaLayer] = DeepseekLayer
    renames = {**STACKED_RENAMES, r"\.self_attn\.(kv_a_layernorm|kv_b_proj)\.": r".self_attn.attn.\1."}

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        if not cfg.get("q_lora_rank"):
            self.packing["q_kv_a_proj"] = ("q_proj", "kv_a_proj_with_mqa")
        self.ignored = (*LlamaForCausalLM.ignored, *draft_layers(cfg))

    @staticmethod
    def make_rope(cfg: HFConfig) -> Rope:
        interleaved = bool(cfg.get("rope_interleave", True))
        return Rope.of(cfg, cfg.get("max_model_len"), interleaved, dim=int(cfg.require("qk_rope_head_dim")))


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    layer_class = DeepseekV2Layer
