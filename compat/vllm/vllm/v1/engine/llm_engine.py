"""Octavo's synchronous engine."""

from octavo.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
