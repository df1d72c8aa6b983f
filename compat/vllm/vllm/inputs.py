"""Octavo's prompts."""

from octavo.types.prompts import EmbedsPrompt, ExplicitEncoderDecoderPrompt, PromptType, TextPrompt, TokensPrompt
from vllm import _missing

__all__ = ["EmbedsPrompt", "ExplicitEncoderDecoderPrompt", "PromptType", "TextPrompt", "TokensPrompt"]


def __getattr__(name: str) -> object:
    raise _missing.error_for(__name__, name)
