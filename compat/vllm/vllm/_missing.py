"""What vLLM has and Octavo does not: why, and what to do instead. Importing such a thing raises, naming the reason."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_DISTRIBUTED = "an engine runs on one device; start one server for each and balance between them"
_CONFIG = "pass the option as a plain value or dictionary to LLM or EngineArgs"
_INTERNAL = "it is part of vLLM's inside, and Octavo's is built differently; see docs/architecture.md"
_MULTIMODAL = "prompts are text or token ids"

# Module below `vllm`, with everything below it -> reason.
_MODULES = {
    "assets": "sample pictures, videos and sounds are not needed: " + _MULTIMODAL,
    "attention": "choose with the option attention_backend; " + _INTERNAL,
    "compilation": "choose with the options compile, enforce_eager and compilation_config; " + _INTERNAL,
    "distributed": _DISTRIBUTED,
    "device_allocator": "use LLM.sleep and LLM.wake_up; " + _INTERNAL,
    "forward_context": _INTERNAL,
    "lora": "LoRA adapters are not served yet; merge the adapter into the model",
    "model_executor": "models are written for octavo.layers; register an architecture through the entry points octavo.models",
    "multimodal": _MULTIMODAL,
    "platforms": "use octavo.platforms.get_platform()",
    "plugins": "Octavo's entry points are octavo.platforms, .models, .ops, .stat_loggers and .logits_processors",
    "reasoning": "the server tells reasoning apart (reasoning_parser); " + _INTERNAL,
    "spec_decode": "speculative decoding is not available yet",
    "tool_parsers": "the server reads tool calls (tool_call_parser); " + _INTERNAL,
    "tracing": "the server exports traces (otlp_traces_endpoint); " + _INTERNAL,
    "usage": "Octavo reports nothing to anybody",
    "v1": _INTERNAL,
    "worker": _INTERNAL,
}
# Single names -> reason.
_NAMES = {
    "ModelRegistry": "register an architecture through the entry points octavo.models",
    "initialize_ray_cluster": _DISTRIBUTED,
    "PoolerConfig": "give pooler_config as a dictionary of the same keys",
    "ExplicitEncoderDecoderPrompt": "encoder-decoder models are not served yet",
    "GuidedDecodingParams": "it is vLLM's older name of StructuredOutputsParams; use that",
    "RepetitionDetectionParams": "repetition is not detected; use repetition_penalty or frequency_penalty",
    "CompilationConfig": _CONFIG,
    "CUDAGraphMode": _CONFIG,
    "LoRAConfig": "LoRA adapters are not served yet; merge the adapter into the model",
    "SpeculativeConfig": "speculative decoding is not available yet",
    "KVTransferConfig": "the KV cache does not leave the engine",
    "KVEventsConfig": "the KV cache does not leave the engine",
    "StructuredOutputsConfig": _CONFIG,
    "ProfilerConfig": _CONFIG,
    "WeightTransferConfig": "weights are loaded once, at the start",
}


def error_for(module: str, name: str) -> Exception:
    """What to raise when `name` is asked of `module`. Dunder names get the AttributeError that Python expects."""
    if name.startswith("__"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    reason = _NAMES.get(name, "Octavo's stand-in for vLLM does not have it; see docs/migration-from-vllm.md")
    return ImportError(f"cannot import name {name!r} from {module!r}: {reason}.", name=module)


class _MissingModules(MetaPathFinder):
    """Asked last: whatever module below `vllm` comes here does not exist."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root != "vllm" or rest.rpartition(".")[2].startswith("__"):  # python -m looks for __main__
            return None
        reason = _MODULES.get(rest.partition(".")[0], "Octavo's stand-in for vLLM does not have it")
        raise ModuleNotFoundError(f"No module named {fullname!r}: {reason}.", name=fullname)


def install_finder() -> None:
    """Have imports of modules that are missing here say why."""
    if not any(isinstance(finder, _MissingModules) for finder in sys.meta_path):
        sys.meta_path.append(_MissingModules())
