"""Log lines: one logger tree under `octavo`, configured once, on stderr."""

import logging
import sys

from octavo import envs

_FORMAT = "%(levelname).1s %(asctime)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; the root `octavo` logger gets its handler on the first call."""
    root = logging.getLogger("octavo")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, "%m-%d %H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(envs.OCTAVO_LOG_LEVEL)
        root.propagate = False
    return logging.getLogger(name)
