"""`structured_outputs_config` and its older spelling `guided_decoding_backend`, checked."""

from dataclasses import fields
from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.engine import StructuredOutputsConfig
from octavo.errors import ConfigError

BACKENDS = ("auto", "llguidance", "xgrammar")
_ALIASES = {"guidance": "llguidance"}
MAX_COMPILE_TIMEOUT = 600.0


def resolve_structured_outputs(args: EngineArgs) -> StructuredOutputsConfig:
    """The defaults, with what was given in their place."""
    given = dict(args.structured_outputs_config)
    known = {field.name for field in fields(StructuredOutputsConfig)}
    unknown = sorted(given.keys() - known)
    if unknown:
        hint = " (--reasoning-parser is an option of its own)" if "reasoning_parser" in unknown else ""
        raise _error(f"has {', '.join(unknown)}; it takes {', '.join(sorted(known))}{hint}")
    older = args.guided_decoding_backend
    if older is not None and given.setdefault("backend", older) != older:
        raise ConfigError(
            f"guided_decoding_backend={older!r} and structured_outputs_config backend={given['backend']!r} contradict each "
            "other; leave one out.",
            param="guided_decoding_backend",
        )
    for name, value in given.items():
        _check(name, value)
    if "backend" in given:
        given["backend"] = _ALIASES.get(given["backend"], given["backend"])
    return StructuredOutputsConfig(**given)


def _check(name: str, value: Any) -> None:
    if name == "backend":
        if not isinstance(value, str) or _ALIASES.get(value, value) not in BACKENDS:
            raise _error(f"backend={value!r} is not known; use {', '.join(BACKENDS)}")
    elif name == "compile_timeout":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_COMPILE_TIMEOUT:
            raise _error(f"compile_timeout={value!r} must be a number of seconds, above 0, to {MAX_COMPILE_TIMEOUT:g}")
    elif not isinstance(value, bool):
        raise _error(f"{name}={value!r} must be true or false")


def _error(problem: str) -> ConfigError:
    return ConfigError(f"structured_outputs_config {problem}.", param="structured_outputs_config")
