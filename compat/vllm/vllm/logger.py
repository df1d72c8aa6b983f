"""Octavo's log."""

from octavo.logger import get_logger as init_logger

__all__ = ["init_logger"]
