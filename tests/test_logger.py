"""Log lines: text and JSON, and what never stands in one."""

import json
import logging
import sys

import pytest

import octavo.logger
from octavo.logger import get_logger, hide_secrets, set_role

SECRET = "sk-123"


@pytest.fixture
def lines(monkeypatch, capsys):
    """Set the logger up anew under the variables given; what a function logs on stderr."""

    def log(action, **variables) -> list[str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        root = logging.getLogger("octavo")
        monkeypatch.setattr(root, "handlers", [])
        monkeypatch.setattr(root, "level", root.level)
        monkeypatch.setattr(octavo.logger, "_secrets", set())
        monkeypatch.setattr(octavo.logger, "_role", "")
        capsys.readouterr()
        action(get_logger("octavo.test"))
        sys.stderr.flush()
        return capsys.readouterr().err.splitlines()

    return log


def test_text(lines):
    [line] = lines(lambda log: log.warning("two %d", 2))
    assert line.startswith("W ") and line.endswith("octavo.test: two 2")


def test_json(lines):
    def action(log):
        set_role("core")
        log.info("a %s", 'quote " and\nline')
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("failed")

    first, second = map(json.loads, lines(action, OCTAVO_LOG_FORMAT="json"))
    assert first["message"] == 'a quote " and\nline'
    assert (first["level"], first["logger"], first["process"].split()[0]) == ("INFO", "octavo.test", "core")
    assert first["time"].endswith("+00:00") and "exception" not in first
    assert "ValueError: broken" in second["exception"] and second["level"] == "ERROR"


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_hidden_wherever_they_come_from(lines, form):
    def action(log):
        hide_secrets([SECRET, ""])
        log.info("key %s", SECRET)
        try:
            raise ValueError(f"with {SECRET} inside")
        except ValueError:
            log.exception("bad")

    text = "\n".join(lines(action, OCTAVO_LOG_FORMAT=form))
    assert SECRET not in text
    assert text.count("***") == 2


def test_the_level(lines):
    assert lines(lambda log: log.info("x"), OCTAVO_LOG_LEVEL="ERROR") == []
