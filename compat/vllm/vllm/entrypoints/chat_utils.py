"""Where older programs look for chat templates."""

from vllm.renderers.hf import resolve_chat_template as resolve_hf_chat_template

__all__ = ["resolve_hf_chat_template"]
