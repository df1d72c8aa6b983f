"""What follows from a model's own configuration: context length, KV bytes, end-of-sequence ids, sampling defaults."""

from collections.abc import Mapping
from typing import Any

from octavo.config.hf import HFConfig
from octavo.errors import ClientError, ConfigError
from octavo.types.kv_spec import DTYPE_BYTES
from octavo.types.sampling_params import SamplingParams

DTYPE_NAMES = {"half": "float16", "float": "float32"}
DEFAULT_CONTEXT = 2048  # for a configuration that states none
# Rope types that leave max_position_embeddings as the reach of the model, scaling included.
_ROPE_TYPES_WITHIN_CONTEXT = ("default", "llama3", "longrope", "su", "mrope", "proportional")

# generation_config.json -> SamplingParams
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def override(hf_config: HFConfig, overrides: Mapping[str, Any]) -> HFConfig:
    """The configuration with `overrides` laid over it, nested dictionaries key by key."""
    if not overrides:
        return hf_config

    def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
        merged = dict(base)
        for key, value in top.items():
            old = merged.get(key)
            merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        return merged

    return HFConfig(merge(hf_config.data, overrides))


def stored_quantization(hf: HFConfig) -> Mapping[str, Any] | None:
    """What the configuration says of quantised weights; None: it does not speak of any."""
    found = hf.get("quantization_config") or hf.text().get("quantization_config") or hf.get("compression_config")
    if hf.model_type == "gpt_oss" and isinstance(found, Mapping) and found.get("quant_method") == "mxfp4":
        return None  # of its experts alone, which its model code decodes
    return found if found is None or isinstance(found, Mapping) else {"quant_method": found}


def stored_dtype(text: HFConfig) -> str | None:
    """The data type that config.json says its weights have."""
    name = text.get("dtype") or text.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")


def context_length(text: HFConfig, *, disable_sliding_window: bool = False) -> tuple[int, str]:
    """Longest sequence the model is made for, and the reason in words."""
    stated = text.max_position_embeddings
    if stated is None:
        length, why = DEFAULT_CONTEXT, "config.json states no context length; this is the default"
    else:
        length, why = int(stated), "max_position_embeddings in config.json"
    rope = text.rope_parameters
    rope_type, factor = rope.get("rope_type"), rope.get("factor")
    if stated is not None and rope_type not in _ROPE_TYPES_WITHIN_CONTEXT and factor:
        base = int(rope.get("original_max_position_embeddings") or length) if rope_type == "yarn" else length
        length, why = int(base * float(factor)), f"{base} times the {rope_type} rope scaling factor {factor}"
    window = sliding_window(text)
    if disable_sliding_window and window is not None and window < length:
        length, why = window, "the sliding window, which disable_sliding_window makes the whole context"
    return length, why


WINDOWED = ("sliding_attention", "chunked_attention")


def sliding_window(text: HFConfig) -> int | None:
    """Tokens a windowed layer sees; None without one."""
    window = text.get("sliding_window")
    if window is None or text.get("use_sliding_window", True) is False:
        return None
    return int(window)


def kv_bytes(text: HFConfig, dtype: str, num_tokens: int, max_chunk: int = 0) -> int:
    """Bytes of the KV cache of one request of `num_tokens` tokens; windowed layers keep their window and a chunk only."""
    if text.get("kv_lora_rank"):  # latent attention
        width = text.get("kv_lora_rank") + text.get("qk_rope_head_dim", 0)
        if text.get("index_topk"):  # sparse, with an index key a token
            width += text.get("index_head_dim")
        return num_tokens * text.num_layers * width * DTYPE_BYTES[dtype]
    if text.get("num_attention_heads") is None:  # nothing attends
        return 0
    kinds = text.get("layer_types")
    num_layers = text.num_layers - int(text.get("num_kv_shared_layers", 0))
    window = sliding_window(text)
    if kinds is None:
        num_windowed = 0 if window is None else num_layers
    else:
        window = window or text.get("attention_chunk_size")
        num_windowed = sum(kind in WINDOWED for kind in kinds[:num_layers]) if window else 0
    num_full = num_layers - num_windowed
    full, windowed = (
        2 * part.num_kv_heads * part.head_dim * DTYPE_BYTES[dtype]
        for part in (text.for_layers("full_attention"), text.for_layers("sliding_attention"))
    )
    windowed_tokens = min(num_tokens, window + max_chunk) if window is not None else 0
    if not (num_full and num_windowed):
        return full * num_tokens * num_full + windowed * windowed_tokens * num_windowed
    # Groups are of equal size and pages of the larger one, see `make_kv_groups`.
    page = max(full, windowed)
    num_full, num_windowed = -(-num_full // (page // full)), -(-num_windowed // (page // windowed))
    size = min(num_full, num_windowed)
    num_full, num_windowed = -(-num_full // size) * size, -(-num_windowed // size) * size
    return page * (num_tokens * num_full + windowed_tokens * num_windowed)


def longest_fitting(text: HFConfig, dtype: str, limit: int, room: int, block_size: int) -> int:
    """Tokens of the longest request, up to `limit`, whose KV cache fits in `room` bytes next to the null block."""
    room -= kv_bytes(text, dtype, block_size, block_size)
    if kv_bytes(text, dtype, -(-limit // block_size) * block_size) <= room:
        return limit
    low, high = 0, limit // block_size  # in blocks: low fits, high + 1 need not
    while low < high:
        middle = (low + high + 1) // 2
        if kv_bytes(text, dtype, middle * block_size) <= room:
            low = middle
        else:
            high = middle - 1
    return low * block_size


def eos_token_ids(generation: Mapping[str, Any], hf: HFConfig) -> list[int]:
    """Every id that ends an answer: those of generation_config.json, then those of config.json."""
    found: list[int] = []
    for value in (generation.get("eos_token_id"), hf.get("eos_token_id"), hf.text().get("eos_token_id")):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and token_id not in found:
                found.append(int(token_id))
    return found


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Default sampling parameters that a generation_config.json states; its other keys are transformers' business."""
    return {SAMPLING_KEYS[key]: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}


def sampling_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `--override-generation-config`, where an unknown key is an error."""
    unknown = sorted(set(overrides) - set(SAMPLING_KEYS))
    if unknown:
        raise ConfigError(
            f"override_generation_config has {', '.join(unknown)}, which has no effect; "
            f"it takes {', '.join(SAMPLING_KEYS)}.",
            param="override_generation_config",
        )
    return sampling_defaults(overrides)


def check_sampling_defaults(defaults: dict[str, Any]) -> dict[str, Any]:
    """The same, once SamplingParams accepts them."""
    try:
        SamplingParams(**defaults)
    except ClientError as error:
        raise ConfigError(
            f"default sampling parameters: {error} They come from the model's generation_config.json or "
            "override_generation_config; generation_config=octavo turns the model's off.",
            param="generation_config",
        ) from None
    return defaults
