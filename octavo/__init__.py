"""Octavo runs and serves large language models.

The names below load on first use: importing the package imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_LAZY = {
    "LLM": "octavo.llm",
    "SamplingParams": "octavo.types.sampling_params",
    "RequestOutput": "octavo.types.outputs",
    "CompletionOutput": "octavo.types.outputs",
    "AsyncLLM": "octavo.engine.async_llm",
    "AsyncLLMEngine": "octavo.engine.async_llm",
    "EngineArgs": "octavo.config.args",
    "AsyncEngineArgs": "octavo.config.args",
    "LogitsProcessor": "octavo.worker.custom_logits",
    "AdapterLogitsProcessor": "octavo.worker.custom_logits",
    "BatchUpdate": "octavo.worker.custom_logits",
    "BeamSearchParams": "octavo.types.sampling_params",
    "ClassificationOutput": "octavo.types.pooling_outputs",
    "ClassificationRequestOutput": "octavo.types.pooling_outputs",
    "EmbeddingOutput": "octavo.types.pooling_outputs",
    "EmbeddingRequestOutput": "octavo.types.pooling_outputs",
    "PoolingOutput": "octavo.types.pooling_outputs",
    "PoolingParams": "octavo.types.pooling_params",
    "PoolingRequestOutput": "octavo.types.pooling_outputs",
    "ScoringOutput": "octavo.types.pooling_outputs",
    "ScoringRequestOutput": "octavo.types.pooling_outputs",
    "StructuredOutputsParams": "octavo.types.structured_outputs",
    "TextPrompt": "octavo.types.prompts",
    "TokensPrompt": "octavo.types.prompts",
}

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LogitsProcessor",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

if TYPE_CHECKING:
    from octavo.config.args import AsyncEngineArgs, EngineArgs
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from octavo.llm import LLM
    from octavo.types.outputs import CompletionOutput, RequestOutput
    from octavo.types.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from octavo.types.pooling_params import PoolingParams
    from octavo.types.prompts import TextPrompt, TokensPrompt
    from octavo.types.sampling_params import BeamSearchParams, SamplingParams
    from octavo.types.structured_outputs import StructuredOutputsParams
    from octavo.worker.custom_logits import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    attribute = "AsyncLLM" if name == "AsyncLLMEngine" else name
    value = getattr(import_module(_LAZY[name]), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
