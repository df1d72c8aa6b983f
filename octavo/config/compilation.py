"""Graphs and the compiler: `enforce_eager`, `optimization_level`, `compile` and `compilation_config`, checked together."""

from collections.abc import Mapping
from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.engine import CompilationConfig
from octavo.errors import ConfigError
from octavo.platforms.base import Platform

KEYS = ("mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
MODES = (0, 1, 2, 3)  # vLLM's ways to compile; here the last three are one
GRAPH_MODES = ("FULL_DECODE_ONLY", "NONE")
MAX_CAPTURE_SIZE = 512
# Padding costs less than a capture does at start: steps of about a quarter.
DEFAULT_CAPTURE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def resolve_compilation(
    args: EngineArgs, platform: Platform, max_num_seqs: int, quantization: str | None
) -> CompilationConfig:
    """Whether to capture, which sizes, and whether to compile."""
    details = args.compilation_config
    _check_details(details)
    eager = args.enforce_eager or args.optimization_level == 0
    wants_graphs = details.get("cudagraph_mode", GRAPH_MODES[0]) != "NONE"
    asked = [key for key in KEYS[1:] if key in details and (key != "cudagraph_mode" or wants_graphs)]
    for refused, reason in (
        (eager, "enforce_eager (or -O0) is set"),
        (not platform.supports_graphs, f"{platform.name} has no graphs"),
        (not wants_graphs, "cudagraph_mode is NONE"),
    ):
        if asked and refused:
            raise _error(f"names {' and '.join(asked)}, but {reason}; leave one out")
    return CompilationConfig(
        enforce_eager=eager,
        capture_sizes=_capture_sizes(details, max_num_seqs)
        if platform.supports_graphs and wants_graphs and not eager
        else [],
        attention_backend=args.attention_backend,
        op_providers={str(key): str(value) for key, value in args.op_providers.items()},
        compiles_blocks=_compiles(args, eager, quantization),
    )


def _check_details(details: Mapping[str, Any]) -> None:
    unknown = sorted(set(details) - set(KEYS))
    if unknown:
        raise _error(f"has {', '.join(unknown)}, which is not supported yet; it takes {', '.join(KEYS)}")
    for key, choices in (("mode", MODES), ("cudagraph_mode", GRAPH_MODES)):
        if key in details and details[key] not in choices:
            raise _error(f"{key}={details[key]!r} is not known; use {', '.join(map(str, choices))}")
    sizes, largest = details.get("cudagraph_capture_sizes", []), details.get("max_cudagraph_capture_size", 1)
    for key, values in (("cudagraph_capture_sizes", sizes), ("max_cudagraph_capture_size", [largest])):
        if not (isinstance(values, list) and all(type(value) is int and value > 0 for value in values)):
            raise _error(f"{key}={details[key]!r} must hold positive integers")


def _compiles(args: EngineArgs, eager: bool, quantization: str | None) -> bool:
    asks = {
        "compile": args.compile,
        "optimization_level=3": args.optimization_level == 3,
        "compilation_config mode": bool(args.compilation_config.get("mode", 0)),
    }
    name = next((name for name, is_asked in asks.items() if is_asked), None)
    if name is None:
        return False
    if eager:
        raise ConfigError(f"{name} and enforce_eager (or -O0) contradict each other; leave one out.", param="compile")
    if quantization is not None:
        raise ConfigError(
            f"{name} is not supported with quantization={quantization}: the compiler knows floating point weights only; "
            "leave one out.",
            param="compile",
        )
    return True


def _capture_sizes(details: Mapping[str, Any], max_num_seqs: int) -> list[int]:
    """Decode batch sizes to capture, small ones first: they are needed first."""
    largest = details.get("max_cudagraph_capture_size", MAX_CAPTURE_SIZE)
    sizes = details.get("cudagraph_capture_sizes", DEFAULT_CAPTURE_SIZES)
    chosen = {size for size in sizes if size <= min(largest, max_num_seqs)}
    if max_num_seqs <= largest:
        chosen.add(max_num_seqs)
    return sorted(chosen)


def _error(problem: str) -> ConfigError:
    return ConfigError(f"compilation_config {problem}.", param="compilation_config")
