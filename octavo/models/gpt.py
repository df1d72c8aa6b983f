"""GPT-2 and what came after it: GPT-BigCode, GPT-J, GPT-NeoX (Pythia), OPT, Phi-1 and 2, and Nemotron (Minitron)."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from octavo.config.hf import HFConfig
from octavo.models.layernorm import LayerNormForCausalLM, Style

# Names that checkpoints have in `hidden_act`, of layers without a gate.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

_GPT2_NAMES = {
    r"^(transformer\.)?wte\.": "model.embed_tokens.",
    r"^(transformer\.)?wpe\.": "model.embed_positions.",
    r"^(transformer\.)?h\.": "model.layers.",
    r"^(transformer\.)?ln_f\.": "model.norm.",
    r"\.ln_1\.": ".input_layernorm.",
    r"\.ln_2\.": ".post_attention_layernorm.",
    r"\.attn\.c_attn\.": ".self_attn.qkv_proj.",
    r"\.attn\.c_proj\.": ".self_attn.o_proj.",
    r"\.attn\.(q|k|v)_proj\.": r".self_attn.\1_proj.",
    r"\.attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.mlp\.(c_fc|fc_in)\.": ".mlp.up_proj.",
    r"\.mlp\.(c_proj|fc_out)\.": ".mlp.down_proj.",
}
# Masks and tables that old checkpoints carry.
_GPT2_IGNORED = (r"\.attn\.(masked_)?bias$", r"^(transformer\.)?position_ids$", r"\.attn\.embed_positions$")


def activation(cfg: HFConfig, key: str) -> str:
    return ACTIVATIONS[cfg.choose(key, list(ACTIVATIONS))]


class GPT2LMHeadModel(LayerNormForCausalLM):
    renames = _GPT2_NAMES
    ignored = _GPT2_IGNORED

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        cfg.choose("scale_attn_weights", [True], True)
        cfg.choose("scale_attn_by_inverse_layer_idx", [False], False)
        cfg.choose("add_cross_attention", [False], False)
        return Style(
            cfg.num_heads,
            int(cfg.get("intermediate_size", 4 * cfg.hidden_size)),
            activation(cfg, "activation_function"),
            float(cfg.get("layer_norm_epsilon", 1e-5)),
            True,
            True,
            positions="learned",
            tied=bool(cfg.get("tie_word_embeddings", True)),
        )

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Its linears are stored as [in, out]."""
        is_linear = ".layers." in name and tensor.dim() == 2
        yield name, tensor.T if is_linear else tensor


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self.fused_by_group = self.style.num_kv_heads > 1

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        num_kv_heads = 1 if cfg.get("multi_query", True) else cfg.num_heads
        return replace(GPT2LMHeadModel.read(cfg), num_kv_heads=num_kv_heads)

    remap = LayerNormForCausalLM.remap


class GPTJForCausalLM(LayerNormForCausalLM):
    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    renames = _GPT2_NAMES
    ignored = _GPT2_IGNORED

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        return Style(
            cfg.num_heads,
            int(cfg.get("intermediate_size", 4 * cfg.hidden_size)),
            activation(cfg, "activation_function"),
            float(cfg.get("layer_norm_epsilon", 1e-5)),
            False,
            True,
            output_bias=False,
            head_bias=True,
            parallel=True,
            num_norms=1,
            rotary_dim=int(cfg.get("rotary_dim", cfg.head_dim)),
            interleaved=True,
            tied=cfg.tie_word_embeddings,
        )


class GPTNeoXForCausalLM(LayerNormForCausalLM):
    fused_by_group = True
    renames = {
        r"^(gpt_neox\.)?embed_in\.": "model.embed_tokens.",
        r"^embed_out\.": "lm_head.",
        r"^(gpt_neox\.)?layers\.": "model.layers.",
        r"^(gpt_neox\.)?final_layer_norm\.": "model.norm.",
        r"\.attention\.query_key_value\.": ".self_attn.qkv_proj.",
        r"\.attention\.dense\.": ".self_attn.o_proj.",
        r"\.mlp\.dense_h_to_4h\.": ".mlp.up_proj.",
        r"\.mlp\.dense_4h_to_h\.": ".mlp.down_proj.",
    }
    ignored = (r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$")

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        bias = bool(cfg.get("attention_bias", True))
        share = cfg.rope_parameters.get("partial_rotary_factor", 1.0)
        return Style(
            cfg.num_heads,
            cfg.intermediate_size,
            activation(cfg, "hidden_act"),
            float(cfg.get("layer_norm_eps", 1e-5)),
            bias,
            True,
            output_bias=bias,
            parallel=bool(cfg.get("use_parallel_residual", True)),
            rotary_dim=int(cfg.head_dim * float(cfg.get("rotary_pct", share))),
            tied=cfg.tie_word_embeddings,
        )


class OPTForCausalLM(LayerNormForCausalLM):
    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    renames = {
        r"^(model\.)?decoder\.": "model.",
        r"^model\.final_layer_norm\.": "model.norm.",
        r"\.self_attn_layer_norm\.": ".input_layernorm.",
        r"\.final_layer_norm\.": ".post_attention_layernorm.",
        r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.fc1\.": ".mlp.up_proj.",
        r"\.fc2\.": ".mlp.down_proj.",
    }

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        cfg.choose("do_layer_norm_before", [True], True)
        cfg.choose("_remove_final_layer_norm", [False], False)
        cfg.choose("layer_norm_elementwise_affine", [True], True)
        cfg.choose("word_embed_proj_dim", [cfg.hidden_size], cfg.hidden_size)
        bias = bool(cfg.get("enable_bias", True))
        return Style(
            cfg.num_heads,
            cfg.intermediate_size,
            activation(cfg, "activation_function"),
            1e-5,
            bias,
            bias,
            positions="learned",
            first_position=2,
            tied=bool(cfg.get("tie_word_embeddings", True)),
        )


class PhiForCausalLM(LayerNormForCausalLM):
    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    renames = {
        r"\.final_layernorm\.": ".norm.",
        r"\.self_attn\.dense\.": ".self_attn.o_proj.",
        r"\.mlp\.fc1\.": ".mlp.up_proj.",
        r"\.mlp\.fc2\.": ".mlp.down_proj.",
    }

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        cfg.choose("qk_layernorm", [False], False)
        return Style(
            cfg.num_kv_heads,
            cfg.intermediate_size,
            activation(cfg, "hidden_act"),
            float(cfg.get("layer_norm_eps", 1e-5)),
            True,
            True,
            head_bias=True,
            parallel=True,
            num_norms=1,
            tied=cfg.tie_word_embeddings,
        )


class NemotronForCausalLM(LayerNormForCausalLM):
    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    @staticmethod
    def read(cfg: HFConfig) -> Style:
        return Style(
            cfg.num_kv_heads,
            cfg.intermediate_size,
            activation(cfg, "hidden_act"),
            float(cfg.get("norm_eps", 1e-5)),
            bool(cfg.get("attention_bias", False)),
            bool(cfg.get("mlp_bias", False)),
            output_bias=bool(cfg.get("attention_bias", False)),
            tied=cfg.tie_word_embeddings,
        )

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Norms multiply by 1 + weight."""
        yield name, tensor + 1 if name.endswith("norm.weight") else tensor
