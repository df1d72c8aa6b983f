"""Octavo's prompts."""

from octavo.types.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
from vllm import _missing

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]


def __getattr__(name: str) -> object:
    raise _missing.error_for(__name__, name)
