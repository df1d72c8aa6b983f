"""vLLM's names, forwarding to Octavo. Importing this package loads no torch; each name loads on first use."""

from importlib import import_module
from typing import Any

from vllm import _environment, _missing
from vllm.version import __version__

_environment.apply()
_missing.install_finder()

# Public name -> module of this package that has it.
_LAZY = {
    "LLM": "vllm.entrypoints.llm",
    "SamplingParams": "vllm.sampling_params",
    "BeamSearchParams": "vllm.sampling_params",
    "RequestOutput": "vllm.outputs",
    "ClassificationOutput": "vllm.outputs",
    "ClassificationRequestOutput": "vllm.outputs",
    "EmbeddingOutput": "vllm.outputs",
    "EmbeddingRequestOutput": "vllm.outputs",
    "PoolingOutput": "vllm.outputs",
    "PoolingRequestOutput": "vllm.outputs",
    "ScoringOutput": "vllm.outputs",
    "ScoringRequestOutput": "vllm.outputs",
    "PoolingParams": "vllm.pooling_params",
    "CompletionOutput": "vllm.outputs",
    "LLMEngine": "vllm.engine.llm_engine",
    "AsyncLLMEngine": "vllm.engine.async_llm_engine",
    "EngineArgs": "vllm.engine.arg_utils",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "PromptType": "vllm.inputs",
    "TextPrompt": "vllm.inputs",
    "TokensPrompt": "vllm.inputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise _missing.error_for(__name__, name)
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
