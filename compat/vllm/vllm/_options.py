"""vLLM's options as Octavo's: what means nothing on one device is dropped with a log line, everything else is checked.

An option that Octavo cannot honour is refused by Octavo itself, with the reason.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.options import option_fields
from octavo.errors import ConfigError
from octavo.logger import get_logger
from octavo.platforms import get_platform

logger = get_logger("octavo.compat.vllm")

GIB = 1 << 30
_LORA = ["max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "fully_sharded_loras", "lora_extra_vocab_size"]
# vLLM's name -> Octavo's provider.
ATTENTION_BACKENDS = {"TORCH_SDPA": "sdpa", "CPU_ATTN": "sdpa", "FLASH_ATTN": "fa3", "TRITON_ATTN": "triton"}


def _always(value: Any) -> bool:
    return True


# Option -> (values that change nothing, why).
_WITHOUT_EFFECT: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_LORA, (_always, "no adapter is loaded")),
    "disable_custom_all_reduce": (_always, "there is one device"),
    "distributed_executor_backend": (_always, "there is one device, driven by the engine's own process"),
    "worker_use_ray": (_always, "there is one device"),
    "swap_space": (_always, "preempted requests are computed again"),
    "disable_log_requests": (bool, "requests are logged only with enable_log_requests"),
    "max_parallel_loading_workers": (_always, "weights are streamed in one way"),
    "safetensors_load_strategy": (_always, "weights are streamed in one way"),
    "use_v2_block_manager": (_always, "there is one block manager"),
    "disable_cascade_attn": (bool, "there is no cascade attention"),
    "num_scheduler_steps": (lambda value: value == 1, "one step is scheduled at a time"),
    "config_format": (lambda value: value in ("auto", "hf"), "config.json is what there is"),
    "guided_decoding_backend": (lambda value: value == "auto", "structured output is not available"),
    "api_server_count": (lambda value: value == 1, "there is one"),
    "data_parallel_size_local": (lambda value: value == 1, "there is one"),
}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of vLLM's `LLM` and `EngineArgs` as keywords of Octavo's `EngineArgs`."""
    fields = {field.name: field for field in option_fields(EngineArgs)}
    found: dict[str, Any] = {}
    for name, value in options.items():
        if _is_without_effect(name, value) and not (name in _LORA and options.get("enable_lora")):
            logger.debug("%s=%r changes nothing: %s", name, value, _WITHOUT_EFFECT[name][1])
            continue
        if value is None and name in fields and not fields[name].nullable:
            continue  # "the default", in vLLM's spelling
        found[name] = str(value).removeprefix("torch.") if name.endswith("dtype") and value is not None else value
    if found.get("attention_backend") is not None:
        found["attention_backend"] = _attention_backend(found["attention_backend"])
    return _from_environment(found)


def _from_environment(options: dict[str, Any]) -> dict[str, Any]:
    backend = os.environ.get("VLLM_ATTENTION_BACKEND")
    if backend and options.get("attention_backend") is None:
        options["attention_backend"] = _attention_backend(backend)
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        options.setdefault("batch_invariant", True)
    interval = os.environ.get("VLLM_LOG_STATS_INTERVAL")
    if interval and options.get("log_stats_interval") is None:
        options["log_stats_interval"] = _as_number("VLLM_LOG_STATS_INTERVAL", interval)
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    sizes = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization")
    is_open = bool(space) and space != "0" and not any(options.get(name) for name in sizes)
    if is_open and get_platform(options.get("device") or "auto").name == "cpu":
        options["kv_cache_memory_bytes"] = int(_as_number("VLLM_CPU_KVCACHE_SPACE", str(space)) * GIB)
    return options


def _is_without_effect(name: str, value: Any) -> bool:
    return value is not None and name in _WITHOUT_EFFECT and _WITHOUT_EFFECT[name][0](value)


def _as_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number.") from None


def _attention_backend(name: str) -> str:
    """Octavo's name of a backend; a name that is Octavo's already stays, and the engine refuses what nobody knows."""
    return ATTENTION_BACKENDS.get(name.upper(), name)


def translate_words(words: Sequence[str]) -> list[str]:
    """A command line of `vllm serve` without the flags that change nothing."""
    kept: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in _WITHOUT_EFFECT:
            kept.append(word)
            continue
        has_value = bool(equals)
        if not equals and queue and not queue[0].startswith("-"):
            value, has_value = queue.pop(0), True
        given: Any = _number(value) if has_value else True
        if not _WITHOUT_EFFECT[name][0](given):
            kept += [flag, value] if has_value else [flag]
    for name, value in translate({}).items():  # what the environment says
        flag = "--" + name.replace("_", "-")
        if not any(word.partition("=")[0].replace("_", "-") == flag for word in kept):
            kept += [flag] if value is True else [flag, str(value)]
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        kept.append("--enable-admin-routes")
    return kept


def _number(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text
