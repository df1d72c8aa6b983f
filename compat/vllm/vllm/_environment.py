"""`VLLM_*` variables: those with a meaning here take effect, of the others a warning says what became of them."""

import difflib
import os
import warnings
from collections.abc import MutableMapping

# vLLM's variable -> Octavo's, with the same values.
RENAMED = {
    "VLLM_API_KEY": "OCTAVO_API_KEY",
    "VLLM_LOGGING_LEVEL": "OCTAVO_LOG_LEVEL",
    "VLLM_CACHE_ROOT": "OCTAVO_CACHE_DIR",
}
# Read by `_options.py` when an engine is configured.
OPTIONS = {
    "VLLM_ATTENTION_BACKEND": "the default of attention_backend",
    "VLLM_BATCH_INVARIANT": "1 is the option batch_invariant",
    "VLLM_CPU_KVCACHE_SPACE": "GiB of KV cache on a CPU, the default of kv_cache_memory_bytes",
    "VLLM_LOG_STATS_INTERVAL": "the default of log_stats_interval",
    "VLLM_SERVER_DEV_MODE": "1 serves the operator's routes, as enable_admin_routes does",
}
# Set or not, this is how it is. Value -> asks for something else; "" when nothing does.
NOTHING_TO_DO = {
    "VLLM_USE_V1": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "",
    "VLLM_NO_USAGE_STATS": "",
    "VLLM_DO_NOT_TRACK": "",
    "VLLM_WORKER_MULTIPROC_METHOD": "",
    "VLLM_TARGET_DEVICE": "",
    "VLLM_USE_PRECOMPILED": "",
    "VLLM_HOST_IP": "",
    "VLLM_PORT": "",
    "VLLM_ENGINE_READY_TIMEOUT_S": "",
    "VLLM_SKIP_P2P_CHECK": "",
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "",
    "VLLM_USE_FLASHINFER_SAMPLER": "",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
# Known, with no counterpart: what to use instead.
INSTEAD = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "a context beyond the model's own is refused; set max_position_embeddings in hf_overrides",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "LoRA adapters are not served yet",
    "VLLM_CPU_OMP_THREADS_BIND": "set OMP_NUM_THREADS, and bind with taskset or numactl",
    "VLLM_HOST": "use --host",
    "VLLM_LOGGING_CONFIG_PATH": "use OCTAVO_LOG_FORMAT and OCTAVO_LOG_LEVEL",
    "VLLM_PLUGINS": "plugins that are installed are loaded",
    "VLLM_USE_MODELSCOPE": "models come from the Hugging Face hub or from a folder",
}


def apply(environment: MutableMapping[str, str] | None = None) -> None:
    """Translate the variables that are set; called when `vllm` is imported."""
    environment = os.environ if environment is None else environment
    for name in [name for name in environment if name.startswith("VLLM_")]:
        value = environment[name]
        if name in RENAMED:
            environment.setdefault(RENAMED[name], value)
        elif name in OPTIONS or (name in NOTHING_TO_DO and value != (NOTHING_TO_DO[name] or None)):
            continue
        else:
            warnings.warn(_complaint(name, value), UserWarning, stacklevel=3)


def _complaint(name: str, value: str) -> str:
    if name in INSTEAD:
        return f"{name} has no effect: {INSTEAD[name]}."
    if name in NOTHING_TO_DO:
        return f"{name}={value} has no effect: Octavo does not work that way."
    close = difflib.get_close_matches(name, [*RENAMED, *OPTIONS, *NOTHING_TO_DO, *INSTEAD], n=2, cutoff=0.8)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    return f"{name} is not known here and has no effect{hint}"
