"""`AsyncLLM`, with a tokenizer of transformers'."""

from typing import Any

import octavo.engine.async_llm


class AsyncLLM(octavo.engine.async_llm.AsyncLLM):
    """Octavo's `AsyncLLM`."""

    async def get_tokenizer(self) -> Any:
        """The transformers tokenizer, as programs for vLLM expect."""
        return self.tokenizer.hf
