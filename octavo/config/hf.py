"""Strict reading of a checkpoint's `config.json`: plain dict in, typed values out, no transformers import.

Models ask for keys by name. A key that is missing and has no default, or holds a value outside what the model supports,
raises ConfigError with the key, the value and what is supported.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

_MISSING = object()

# The same thing under the names that older architectures gave it.
ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads", "decoder_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts_per_tok": ("moe_topk", "moe_k"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
}


# What the configurations of text parts leave out where it is transformers' default.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }
}


def _decode_float(value: dict[str, Any]) -> Any:
    """transformers writes infinities, which JSON lacks, as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@dataclass(frozen=True)
class HFConfig:
    """A `config.json`, read on demand. `text()` steps into the text part of a multimodal configuration."""

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path) -> "HFConfig":
        """Read `config.json` (or the folder that holds it); ConfigError when it is missing or not a JSON object."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            data = json.loads(path.read_text(), object_hook=_decode_float)
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; a model folder needs a config.json.") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds a {type(data).__name__}, not a JSON object.")
        return cls(data)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` (or of an older name for it); null counts as absent."""
        for name in (key, *ALIASES.get(key, ())):
            if self.data.get(name) is not None:
                return self.data[name]
        return default

    def require(self, key: str) -> Any:
        """The value of `key`; ConfigError when there is none."""
        value = self.get(key, _MISSING)
        if value is _MISSING:
            raise ConfigError(f"the model's config.json lacks {key!r}, which {self.architecture} needs.")
        return value

    def choose(self, key: str, supported: Sequence[Any], default: Any = _MISSING) -> Any:
        """The value of `key`, which must be one of `supported`."""
        value = self.require(key) if default is _MISSING else self.get(key, default)
        if value not in supported:
            raise ConfigError(
                f"config.json has {key}={value!r}; {self.architecture} supports {list(supported)}. "
                "model_impl=transformers may do more."
            )
        return value

    def text(self) -> "HFConfig":
        """The language model's part: `text_config` where there is one, else this."""
        inner = self.data.get("text_config")
        if not isinstance(inner, dict):
            return self
        defaults = TEXT_DEFAULTS.get(str(inner.get("model_type")), {})
        return HFConfig({"architectures": self.data.get("architectures"), **defaults, **inner})

    @property
    def architecture(self) -> str:
        names = self.data.get("architectures") or ["?"]
        return str(names[0])

    @property
    def model_type(self) -> str:
        return str(self.data.get("model_type", ""))

    @property
    def hidden_size(self) -> int:
        return int(self.require("hidden_size"))

    @property
    def intermediate_size(self) -> int:
        return int(self.require("intermediate_size"))

    @property
    def num_layers(self) -> int:
        return int(self.require("num_hidden_layers"))

    @property
    def num_heads(self) -> int:
        return int(self.require("num_attention_heads"))

    @property
    def num_kv_heads(self) -> int:
        shares_one = self.get("multi_query", self.model_type == "falcon")  # GPT-BigCode and the first Falcons
        if shares_one and not self.get("new_decoder_architecture"):
            return 1
        return int(self.get("num_key_value_heads", self.num_heads))

    @property
    def head_dim(self) -> int:
        return int(self.get("head_dim", self.hidden_size // self.num_heads))

    @property
    def num_experts(self) -> int:
        """Routed experts of a mixture; 0 for dense models."""
        return int(self.get("num_experts", 0))

    @property
    def num_experts_per_token(self) -> int:
        """Experts a router chooses for a token."""
        return int(self.require("num_experts_per_tok"))

    @property
    def vocab_size(self) -> int:
        return int(self.require("vocab_size"))

    @property
    def max_position_embeddings(self) -> int | None:
        return self.get("max_position_embeddings")

    @property
    def rms_norm_eps(self) -> float:
        return float(self.get("rms_norm_eps", 1e-6))

    @property
    def tie_word_embeddings(self) -> bool:
        return bool(self.get("tie_word_embeddings", False))

    def for_layers(self, kind: str) -> "HFConfig":
        """The configuration as layers of one of its `layer_types` see it: with their rotary settings and heads, where kinds
        differ."""
        rotary = self.get("rope_parameters") or {}
        changes = {"rope_parameters": rotary[kind]} if kind in rotary else {}
        kinds, by_index = self.get("layer_types") or [], self.get("per_layer_config")
        if by_index and kind in kinds:  # Gemma 4 as transformers writes it since 5.24
            changes |= by_index.get(str(kinds.index(kind)), {})
        elif kind == "full_attention" and self.get("global_head_dim"):  # and before
            changes["head_dim"] = self.get("global_head_dim")
            if self.get("attention_k_eq_v") and self.get("num_global_key_value_heads"):
                changes["num_key_value_heads"] = self.get("num_global_key_value_heads")
        return HFConfig({**self.data, **changes}) if changes else self

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Rotary settings in transformers 5's shape: always `rope_type` and `rope_theta`, plus the type's own keys.

        Understands the older spelling (`rope_theta` and `rope_scaling` at the top, `type` for `rope_type`).
        """
        merged: dict[str, Any] = dict(self.get("rope_scaling") or {})
        stated = self.get("rope_parameters") or {}
        merged.update(stated.get("full_attention", stated) or {})
        merged.setdefault("rope_type", merged.pop("type", "default"))
        merged.setdefault("rope_theta", self.get("rope_theta", 10000.0))
        if original := self.get("original_max_position_embeddings"):  # Phi-3's place for it
            merged.setdefault("original_max_position_embeddings", original)
        merged.setdefault("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        return merged
