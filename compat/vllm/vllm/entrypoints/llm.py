"""`LLM` with vLLM's options, and a tokenizer of transformers'."""

from typing import Any

import octavo
from vllm.engine.arg_utils import EngineArgs


class LLM(octavo.LLM):
    """Octavo's `LLM`, constructed as vLLM's."""

    def __init__(self, model: str, **engine_args: Any):
        engine_args.setdefault("disable_log_stats", True)
        self._start(EngineArgs(model=model, **engine_args))

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, as programs for vLLM expect."""
        return super().get_tokenizer().hf
