"""The profiling options, checked: `profiler_config` and the NVTX switches."""

from collections.abc import Mapping
from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.engine import ProfilerConfig
from octavo.errors import ConfigError
from octavo.platforms.base import Platform

PROFILERS = ("torch", "cuda")
# Keys of `profiler_config`, vLLM's names, and the field each sets.
KEYS = {
    "torch_profiler_dir": "folder",
    "torch_profiler_with_stack": "with_stack",
    "torch_profiler_record_shapes": "record_shapes",
    "torch_profiler_with_memory": "with_memory",
    "torch_profiler_with_flops": "with_flops",
    "torch_profiler_use_gzip": "use_gzip",
    "delay_iterations": "delay_iterations",
    "max_iterations": "max_iterations",
}


def resolve_profiler(details: Mapping[str, Any], platform: Platform) -> ProfilerConfig | None:
    """The profiler, None without one."""
    if not details:
        return None
    unknown = sorted(set(details) - {"profiler", *KEYS})
    if unknown:
        raise _error(f"has {', '.join(unknown)}, which is not known; it takes profiler, {', '.join(KEYS)}")
    kind = details.get("profiler", "torch")
    if kind not in PROFILERS:
        raise _error(f"profiler={kind!r} is not known; use {' or '.join(PROFILERS)}")
    fields = {key: value for key, value in details.items() if key != "profiler"}
    for key, value in fields.items():
        if key == "torch_profiler_dir":
            fits, wanted = isinstance(value, str) and value != "", "a folder"
        elif key.endswith("_iterations"):
            fits, wanted = type(value) is int and value >= 0, "a number of steps"
        else:
            fits, wanted = isinstance(value, bool), "true or false"
        if not fits:
            raise _error(f"{key}={value!r} must be {wanted}")
    if kind == "torch" and "torch_profiler_dir" not in fields:
        raise _error("names no torch_profiler_dir to write traces to")
    if kind == "cuda" and "torch_profiler_dir" in fields:
        raise _error("profiler=cuda writes no files: Nsight Systems does; leave torch_profiler_dir out")
    if kind == "cuda" and platform.name == "cpu":
        raise _error("profiler=cuda needs an NVIDIA GPU; use profiler=torch")
    return ProfilerConfig(**{KEYS[key]: value for key, value in fields.items()})


def check_nvtx(args: EngineArgs, platform: Platform) -> None:
    """Refuse ranges where nobody can see them."""
    for name in ("enable_nvtx_tracing", "enable_layerwise_nvtx_tracing"):
        if getattr(args, name) and platform.name == "cpu":
            raise ConfigError(f"{name} marks ranges for Nsight Systems, which needs an NVIDIA GPU.", param=name)
    if args.enable_layerwise_nvtx_tracing and not args.enforce_eager:
        raise ConfigError(
            "enable_layerwise_nvtx_tracing marks layers as Python calls them, which a graph does not; add enforce_eager.",
            param="enable_layerwise_nvtx_tracing",
        )


def _error(problem: str) -> ConfigError:
    return ConfigError(f"profiler_config {problem}.", param="profiler_config")
