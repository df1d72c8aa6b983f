"""Log lines: one logger tree under `octavo`, configured once, on stderr, as text or as JSON.

No secret reaches the log: what `hide_secrets` was told is replaced in every line, wherever it comes from.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime

from octavo import envs

_FORMAT = "%(levelname).1s %(asctime)s %(name)s: %(message)s"
_DATE = "%m-%d %H:%M:%S"
HIDDEN = "***"

_secrets: set[str] = set()
_role = ""  # of this process, when it is not the front


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(f"({_role} {os.getpid()}) {_FORMAT}" if _role else _FORMAT, _DATE)

    def format(self, record: logging.LogRecord) -> str:
        return _without_secrets(super().format(record))


class _JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, process, message, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": f"{_role or 'front'} {os.getpid()}",
            "message": _without_secrets(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = _without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; the root `octavo` logger gets its handler on the first call."""
    root = logging.getLogger("octavo")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_make_formatter())
        root.addHandler(handler)
        root.setLevel(envs.OCTAVO_LOG_LEVEL)
        root.propagate = False
    return logging.getLogger(name)


def set_role(role: str) -> None:
    """Say on every line which process speaks."""
    global _role
    _role = role
    for handler in logging.getLogger("octavo").handlers:
        handler.setFormatter(_make_formatter())


def hide_secrets(secrets: Iterable[str]) -> None:
    """Never write these texts; they appear as ***."""
    _secrets.update(secret for secret in secrets if secret)


def _make_formatter() -> logging.Formatter:
    return _JsonFormatter() if envs.OCTAVO_LOG_FORMAT == "json" else _TextFormatter()


def _without_secrets(text: str) -> str:
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    return text
