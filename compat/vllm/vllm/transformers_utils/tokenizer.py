"""Where older programs look for `get_tokenizer`."""

from vllm.tokenizers import get_tokenizer

__all__ = ["get_tokenizer"]
