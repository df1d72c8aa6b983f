"""The environment variables Octavo reads: only what is needed before arguments exist.

Each is one row of `VARIABLES`; `envs.NAME` reads it at the time of use, so tests may change the environment.
"""

import os
from collections.abc import Callable
from typing import Any


def _flag(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


# name: (default, parser, one sentence)
VARIABLES: dict[str, tuple[Any, Callable[[str], Any], str]] = {
    "OCTAVO_LOG_LEVEL": ("INFO", str.upper, "Level of Octavo's own log lines."),
    "OCTAVO_LOG_FORMAT": ("text", str.lower, "Form of log lines: text, or json for one object a line."),
    "OCTAVO_CACHE_DIR": (
        os.path.join("~", ".cache", "octavo"),
        str,
        "Where compiled kernels and tuned tables are kept.",
    ),
    "OCTAVO_API_KEY": (None, str, "API key of the server when --api-key is not given."),
    "OCTAVO_PLATFORM": (None, str, "Force a platform by name instead of probing (cpu, cuda, rocm)."),
    "OCTAVO_OP_PROVIDERS": ("", str, "Force operator providers: 'rms_norm=torch,paged_attention=triton' or '*=torch'."),
    "OCTAVO_CHECK_INVARIANTS": (False, _flag, "Check block accounting after every step (tests, debugging)."),
}


def __getattr__(name: str) -> Any:
    try:
        default, parse, _ = VARIABLES[name]
    except KeyError:
        raise AttributeError(name) from None
    text = os.environ.get(name)
    return default if text is None else parse(text)
