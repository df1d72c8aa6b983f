"""What a GGUF file says about itself, as the config.json and generation_config.json that its model would have.

No torch: a start reads this first. The keys are those that the family's own configuration has, so that models cannot
tell where a configuration came from. What GGUF does not store and its readers take for granted (activation, layer
patterns) is filled in per family below.

Rotary settings: `rope.scaling.*` become `rope_scaling`. Factors per frequency (`rope_freqs.weight`, which converters
write for the llama3 scaling) divide the frequencies, which is what rope_type "longrope" does with the same list for
short and long texts and an attention factor of 1; so they are given as that.
"""

import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import LoadError
from octavo.loader.gguf_families import ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, family_of
from octavo.loader.gguf_file import GGUFFile, GGUFTensorInfo, open_gguf_parts, read_gguf_metadata

__all__ = ["read_gguf_config", "read_gguf_metadata"]

# Texts of tokens that end a turn. Files name at most one end-of-turn id; chat models may use another one of these.
_TURN_ENDS = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|END_OF_TURN_TOKEN|>"))
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


def read_gguf_config(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, generation_config.json) of the model in a GGUF file; LoadError when its family is not supported."""
    reader = _Reader(open_gguf_parts(path))
    return reader.config(), reader.generation_config()


class _Reader:
    """Metadata and tensor shapes of one model, asked for by short keys."""

    def __init__(self, parts: list[GGUFFile]):
        self.first = parts[0]
        self.path, self.metadata = self.first.path, self.first.metadata
        self.tensors: dict[str, tuple[GGUFFile, GGUFTensorInfo]] = {
            name: (part, info) for part in parts for name, info in part.tensors.items()
        }
        self.family = family_of(self.first.architecture, num_experts=self.get("expert_count", 0))

    def get(self, key: str, default: Any = None) -> Any:
        """An architecture's value, or the default; floats as they were before they became float32."""
        value = self.first.get(key, default)
        return _shortest(value) if isinstance(value, float) else value

    def require(self, key: str) -> Any:
        value = self.first.require(key)
        return _shortest(value) if isinstance(value, float) else value

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.tensors:
            raise LoadError(f"{self.path} lacks the tensor {tensor}.")
        return self.tensors[tensor][1].shape

    def floats(self, tensor: str) -> list[float]:
        """The values of a float32 tensor."""
        part, info = self.tensors[tensor]
        if info.ggml_type != "F32":
            raise LoadError(f"{self.path}: {tensor} is {info.ggml_type}, expected F32.")
        return array("f", part.data[info.offset : info.offset + info.num_bytes]).tolist()

    def config(self) -> dict[str, Any]:
        hidden_size, num_heads = self.require("embedding_length"), self.require("attention.head_count")
        config: dict[str, Any] = {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "hidden_size": hidden_size,
            "num_hidden_layers": self.require("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.require("attention.head_count_kv") if self._has_kv_heads() else num_heads,
            "head_dim": self.head_dim(),
            "max_position_embeddings": self.require("context_length"),
            "vocab_size": self.shape("token_embd.weight")[0],
            "tie_word_embeddings": not self.has("output.weight"),
            "hidden_act": "silu",
            "rope_theta": float(self.get("rope.freq_base", 10000.0)),
        }
        if self.get("feed_forward_length"):
            config["intermediate_size"] = self.require("feed_forward_length")
        epsilon = self.get("attention.layer_norm_rms_epsilon", self.get("attention.layer_norm_epsilon"))
        if epsilon is not None:
            config[_EPSILON_KEYS.get(self.family.model_type, "rms_norm_eps")] = epsilon
        if rope_scaling := self.rope_scaling():
            config["rope_scaling"] = rope_scaling
        if self.family.model_type in _PARTIAL_ROTARY:
            config["partial_rotary_factor"] = self.require("rope.dimension_count") / config["head_dim"]
        config.update(_EXTRAS.get(self.family.model_type, _no_extras)(self, config))
        config.update(self.token_ids())
        if dtype := self.plain_dtype():
            config["dtype"] = dtype
        return config

    def _has_kv_heads(self) -> bool:
        return self.get("attention.head_count_kv") is not None

    def head_dim(self) -> int:
        derived = self.require("embedding_length") // self.require("attention.head_count")
        # Where rotation may cover a part of a head only, its width says nothing about the head's.
        fallback = self.get("rope.dimension_count", derived) if self.family.permuted else derived
        return int(self.get("attention.key_length", fallback))

    def rope_scaling(self) -> dict[str, Any] | None:
        """`rope_scaling` of a config.json, None without scaling."""
        context = self.require("context_length")
        original = self.get("rope.scaling.original_context_length", context)
        if self.has(ROPE_FACTORS_LONG) and self.has(ROPE_FACTORS_SHORT):
            scaling: dict[str, Any] = {
                "rope_type": "longrope",
                "short_factor": self.floats(ROPE_FACTORS_SHORT),
                "long_factor": self.floats(ROPE_FACTORS_LONG),
                "original_max_position_embeddings": original,
            }
            if (attention_factor := self.get("rope.scaling.attn_factor")) is not None:
                scaling["attention_factor"] = attention_factor
            return scaling
        if factors := self._frequency_factors():
            return {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": context,
            }
        kind = self.get("rope.scaling.type", "linear" if self.get("rope.scale_linear") else "none")
        factor = float(self.get("rope.scaling.factor", self.get("rope.scale_linear", 1.0)))
        if kind == "none" or factor == 1.0:
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for key in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier"):
                if (value := self.get(f"rope.scaling.{key}", 1.0)) != 1.0:
                    raise LoadError(f"{self.path}: yarn with rope.scaling.{key}={value} is not supported from GGUF.")
            for key in ("beta_fast", "beta_slow"):
                if (value := self.get(f"rope.scaling.yarn_{key}")) is not None:
                    scaling[key] = value
            return scaling
        raise LoadError(
            f"{self.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, longrope."
        )

    def _frequency_factors(self) -> list[float] | None:
        names = (ROPE_FACTORS, f"blk.0.{ROPE_FACTORS}")  # some converters repeat it in every layer
        factors = next((self.floats(name) for name in names if self.has(name)), None)
        return factors if factors and any(factor != 1.0 for factor in factors) else None

    def token_ids(self) -> dict[str, Any]:
        """`bos_token_id`, `eos_token_id`, `pad_token_id` as far as the file has them."""
        keys = {
            "bos_token_id": "bos_token_id",
            "eos_token_id": "eos_token_id",
            "pad_token_id": "padding_token_id",
        }
        found = {name: self.metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
        return {name: value for name, value in found.items() if value is not None}

    def generation_config(self) -> dict[str, Any]:
        """Token ids; `eos_token_id` lists every id that ends an answer: end of text, of turn, of message."""
        config = self.token_ids()
        ends = [self.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        tokens: list[str] = self.metadata.get("tokenizer.ggml.tokens", [])
        types: list[int] = self.metadata.get("tokenizer.ggml.token_type", [])
        ends += [
            token_id
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL_TOKEN and token in _TURN_ENDS
        ]
        config["eos_token_id"] = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
        return config

    def plain_dtype(self) -> str | None:
        """The dtype of an unquantised file's matrices; None when they are quantised."""
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return names.get(self.tensors["token_embd.weight"][1].ggml_type) if self._all_plain(names) else None

    def _all_plain(self, types: dict[str, str]) -> bool:
        return all(info.ggml_type in types for _, info in self.tensors.values())


def _shortest(value: float) -> float:
    """Undo the widening of a float32: 9.999999747378752e-06 was written as 1e-05."""
    for digits in range(1, 9):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


# What a family's configuration has beyond the common keys.

_EPSILON_KEYS = {
    "phi": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "gpt2": "layer_norm_epsilon",
    "starcoder2": "norm_epsilon",
    "nemotron": "norm_eps",
}
_PARTIAL_ROTARY = frozenset(("phi", "stablelm", "nemotron", "glm4"))

_Extras = Callable[[_Reader, dict[str, Any]], dict[str, Any]]


def _no_extras(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _llama(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": reader.has("blk.0.attn_q.bias"), "mlp_bias": reader.has("blk.0.ffn_up.bias")}


def _smollm3(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    # Every fourth layer has no rotary embedding; the file does not say so.
    no_rope = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return _llama(reader, config) | {"no_rope_layer_interval": 4, "no_rope_layers": no_rope}


def _granite(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return _llama(reader, config) | {
        "embedding_multiplier": reader.get("embedding_scale", 1.0),
        "residual_multiplier": reader.get("residual_scale", 1.0),
        "attention_multiplier": reader.get("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": reader.get("logit_scale", 1.0),
    }


def _mixtral(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": reader.require("expert_count"),
        "num_experts_per_tok": reader.require("expert_used_count"),
        "sliding_window": reader.get("attention.sliding_window"),
    }


def _qwen2(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False, "attention_bias": reader.has("blk.0.attn_q.bias")}


def _experts(reader: _Reader) -> dict[str, Any]:
    return {
        "num_experts": reader.require("expert_count"),
        "num_experts_per_tok": reader.require("expert_used_count"),
        "moe_intermediate_size": reader.get("expert_feed_forward_length", reader.shape("blk.0.ffn_up_exps.weight")[1]),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    shared = reader.get("expert_shared_feed_forward_length", reader.shape("blk.0.ffn_up_shexp.weight")[0])
    return (
        _qwen2(reader, config) | _experts(reader) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}
    )


def _qwen3_moe(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return _qwen3(reader, config) | _experts(reader) | {"norm_topk_prob": True}


def _gemma(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scale(config: dict[str, Any], layers_of_27b: int) -> int:
    """`query_pre_attn_scalar`: the head's width, but the model's width per head in the 27B models."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(reader, config) | {
        "query_pre_attn_scalar": _query_scale(config, _GEMMA2_27B_LAYERS),
        "sliding_window": reader.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": reader.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reader.get("final_logit_softcapping", 30.0),
        "layer_types": _layer_types(config, full_every=2),
    }


def _gemma3(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    pattern = reader.get("attention.sliding_window_pattern", 6)
    return _gemma(reader, config) | {
        "query_pre_attn_scalar": _query_scale(config, _GEMMA3_27B_LAYERS),
        "sliding_window": reader.require("attention.sliding_window"),
        "layer_types": _layer_types(config, full_every=pattern if isinstance(pattern, int) else 6),
        "rope_local_base_freq": float(reader.get("rope.freq_base_swa", 10000.0)),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": reader.get("final_logit_softcapping"),
        "attention_bias": False,
    }


def _layer_types(config: dict[str, Any], full_every: int) -> list[str]:
    """Sliding-window layers with a full-attention one at the end of every `full_every`."""
    return [
        "sliding_attention" if (layer + 1) % full_every else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def _phi(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_new", "qk_layernorm": False}


def _phi3(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    window = reader.get("attention.sliding_window") or None  # 0: none
    return {
        "sliding_window": window,
        "partial_rotary_factor": reader.get("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "original_max_position_embeddings": reader.get(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _starcoder2(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": reader.has("blk.0.attn_q.bias"),
        "sliding_window": reader.get("attention.sliding_window"),
    }


def _stablelm(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    if reader.has("blk.0.attn_q_norm.weight"):
        raise LoadError(f"{reader.path}: StableLM with q and k norms is not supported from GGUF.")
    return {
        "use_qkv_bias": reader.has("blk.0.attn_q.bias"),
        "use_parallel_residual": reader.get("use_parallel_residual", False),
        "qk_layernorm": False,
    }


def _nemotron(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return _llama(reader, config) | {"hidden_act": "relu2"}


def _olmo2(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": reader.has("blk.0.attn_q.bias")}


def _cohere(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    if reader.has("blk.0.attn_q_norm.weight"):
        raise LoadError(f"{reader.path}: Command R with q and k norms is not supported from GGUF.")
    return {
        "logit_scale": reader.get("logit_scale", 1.0),
        "attention_bias": reader.has("blk.0.attn_q.bias"),
        "use_qk_norm": False,
    }


def _cohere2(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": reader.get("logit_scale", 1.0),
        "attention_bias": reader.has("blk.0.attn_q.bias"),
        "sliding_window": reader.require("attention.sliding_window"),
        "layer_types": _layer_types(config, full_every=4),
    }


def _glm4(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": reader.has("blk.0.attn_q.bias")}


def _gpt2(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_positions": config["max_position_embeddings"],
        "n_inner": config.get("intermediate_size"),
        "activation_function": "gelu_new",
    }


_EXTRAS: dict[str, _Extras] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "granite": _granite,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "glm4": _glm4,
    "gpt2": _gpt2,
}
