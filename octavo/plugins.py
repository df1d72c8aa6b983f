"""Plugins: other packages that add platforms, models, operators or stat loggers through entry points.

An entry point names a function without arguments, which registers what it brings (or, for `octavo.platforms`, a
`Platform` class; for `octavo.stat_loggers`, a logger class; for `octavo.output_formats`, a list of rows: `ToolFormat`s and
`ReasoningFormat`s). Each group is loaded once in a process; a plugin that
fails is logged by name and left out, so that it cannot keep the engine from starting. `octavo.logits_processors` names
classes that the worker loads itself: without one of them answers would differ, so a broken one stops the start.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from octavo.logger import get_logger

logger = get_logger(__name__)

PLATFORMS = "octavo.platforms"
MODELS = "octavo.models"
OPS = "octavo.ops"
STAT_LOGGERS = "octavo.stat_loggers"
LOGITS_PROCESSORS = "octavo.logits_processors"
OUTPUT_FORMATS = "octavo.output_formats"
GROUPS = (PLATFORMS, MODELS, OPS, STAT_LOGGERS, LOGITS_PROCESSORS, OUTPUT_FORMATS)


def find(group: str) -> list[EntryPoint]:
    """The installed entry points of `group`, by name."""
    return sorted(entry_points(group=group), key=lambda point: point.name)


@cache
def load(group: str) -> dict[str, Any]:
    """Import the plugins of `group`: {plugin name: the object its entry point names}."""
    if group not in GROUPS:
        raise ValueError(f"there is no plugin group {group!r}; there are {', '.join(GROUPS)}")
    loaded = {}
    for point in find(group):
        try:
            loaded[point.name] = point.load()
        except Exception:
            logger.exception("plugin %s (%s, group %s) failed to load and is left out", point.name, point.value, group)
    return loaded


@cache
def run(group: str) -> list[str]:
    """Call the registration function of every plugin of `group`; answers the names of those that worked."""
    done = []
    for name, register in load(group).items():
        try:
            register()
        except Exception:
            logger.exception("plugin %s of group %s failed to register and is left out", name, group)
        else:
            done.append(name)
            logger.info("plugin %s of group %s is active", name, group)
    return done
