"""`EngineArgs`: what a user types. Flat, with vLLM's names where the meaning is the same; `resolve` makes a
configuration of it.

A field is checked alone here (type, choices, range); combinations are `config/resolve.py`'s. None means "decide for
me", and what is decided is logged with its reason.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from octavo.config.options import check_options, option, option_fields
from octavo.config.unsupported import explain_unknown
from octavo.errors import ConfigError
from octavo.utils.class_names import class_name

DEFAULT_MODEL = "smollm2"
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")

_MODEL, _LOAD, _CACHE = "Model", "Loading", "Cache"
_STRUCTURED = "Structured output"
_SCHEDULER, _PARALLEL, _COMPILATION, _OBSERVABILITY = "Scheduler", "Parallel", "Compilation", "Observability"
_SUPERVISION = "Supervision"


@dataclass(kw_only=True)
class EngineArgs:
    """Options of the engine. Wrong values raise `ConfigError` (a `ValueError`) naming the option."""

    model: str = option(
        DEFAULT_MODEL, "Hub id, local folder, single GGUF file, or the demo model's alias smollm2.", group=_MODEL
    )
    served_model_name: list[str] | str | None = option(
        None,
        "Public names of the model; the first is echoed in metrics. Default: what was given as model.",
        group=_MODEL,
    )
    tokenizer: str | None = option(
        None, "Hub id, folder or GGUF file to take the tokenizer from. Default: the model's.", group=_MODEL
    )
    tokenizer_mode: str = option(
        "auto", "Kind of tokenizer; auto and hf are one.", group=_MODEL, choices=("auto", "hf")
    )
    tokenizer_revision: str | None = option(
        None, "Branch, tag or commit of the tokenizer on the hub. Default: revision.", group=_MODEL
    )
    skip_tokenizer_init: bool = option(
        False, "Run without a tokenizer: prompts are token ids, and detokenize must be off.", group=_MODEL
    )
    chat_template: str | None = option(
        None, "Chat template that replaces the tokenizer's: a file, or the template itself.", group=_MODEL
    )
    dtype: str = option(
        "auto", "Data type of weights and activations. auto: by checkpoint and device.", group=_MODEL, choices=DTYPES
    )
    max_model_len: int | str | None = option(
        None,
        "Longest prompt plus answer in tokens. auto or -1: the model's context, or as much of it as memory holds.",
        group=_MODEL,
        low=-1,
        size=True,
        words=("auto",),
    )
    seed: int = option(0, "Seed from which requests without one of their own draw theirs.", group=_MODEL, low=0)
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with the tokenizer. It can do anything you can. Code of models is not run yet.",
        group=_MODEL,
    )
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.", group=_MODEL)
    hf_token: bool | str | None = option(
        None, "Access token of the hub; without a value, the one that `hf auth login` stored.", group=_MODEL
    )
    hf_overrides: dict[str, Any] = option(
        {}, "Keys that replace or extend the model's config.json, nested keys one by one.", group=_MODEL
    )
    model_impl: str = option(
        "auto",
        "Whose model code runs. auto: Octavo's where it knows the architecture, else transformers'.",
        group=_MODEL,
        choices=("auto", "octavo", "vllm", "transformers"),
    )
    runner: str = option(
        "auto",
        "Whether the model makes text (generate), or vectors, classes and scores (pooling). auto: by its architecture.",
        group=_MODEL,
        choices=("auto", "generate", "pooling"),
    )
    convert: str = option(
        "auto",
        "Make of a text model one of vectors (embed), of classes (classify) or of a score for each token (reward).",
        group=_MODEL,
        choices=("auto", "none", "embed", "classify", "reward"),
    )
    pooler_config: dict[str, Any] = option(
        {},
        "How a pooling model pools, laid over what its files say, such as pooling_type or use_activation.",
        group=_MODEL,
    )
    override_pooler_config: dict[str, Any] = option({}, "An older name for pooler_config.", group=_MODEL)
    generation_config: str = option(
        "auto",
        "Where default sampling parameters come from. auto: the model; octavo (or vllm): none; else a folder.",
        group=_MODEL,
    )
    override_generation_config: dict[str, Any] = option(
        {}, "Default sampling parameters laid over those of generation_config.", group=_MODEL
    )
    max_logprobs: int = option(
        20, "Most log probabilities a request may ask for at each position; -1: the vocabulary.", group=_MODEL, low=-1
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "What logprobs report: before (raw) or after (processed) penalties, temperature and filters.",
        group=_MODEL,
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    enable_prompt_embeds: bool = option(
        False, "Take prompts as embeddings (prompt_embeds), from whoever may send prompts.", group=_MODEL
    )
    logits_processors: list[str | type] = option(
        [],
        "Custom logits processors as module:Class; from Python also the classes. Plugins need not be named.",
        group=_MODEL,
    )
    disable_sliding_window: bool = option(
        False, "Cap the context at the sliding window instead of sliding it.", group=_MODEL
    )

    enable_sleep_mode: bool = option(
        False, "Let sleep and wake_up free the engine's memory and take it again.", group=_MODEL
    )

    load_format: str = option(
        "auto",
        "Format of the weights. dummy: random weights. auto: by the files there are, safetensors first.",
        group=_LOAD,
        choices=("auto", "safetensors", "pt", "gguf", "dummy"),
    )
    download_dir: str | None = option(None, "Folder for downloads. Default: the hub library's cache.", group=_LOAD)
    use_tqdm_on_load: bool = option(True, "Show a progress bar while weights load.", group=_LOAD)
    quantization: str | None = option(
        None,
        "Weight format; found from the checkpoint when left out. gguf weights stay quantised on a CPU unless a dtype is given, "
        "and are decoded on load elsewhere. fp8 rounds 16-bit weights to 8 bits while they load; int8 and int4 do on a CPU.",
        group=_LOAD,
        short="-q",
        choices=("gguf", "fp8", "int8", "int4"),
    )

    block_size: int | None = option(
        None, "Tokens in one KV cache block, a power of two. Default: the device's.", group=_CACHE, low=1, high=1024
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's memory (on a CPU: the machine's or container's) for weights, work space and KV cache. "
        "Default: 0.92 on a GPU; on a CPU the cache takes half of the free memory, at most 4 GiB.",
        group=_CACHE,
        above=0,
        high=1,
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of the KV cache; replaces the share.", group=_CACHE, low=1, size=True
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV cache blocks; replaces share and bytes. For tests.", group=_CACHE, low=2
    )
    kv_cache_dtype: str = option(
        "auto",
        "Data type of the KV cache. auto: that of the model, or what an FP8 checkpoint asks for. fp8 is fp8_e4m3: half the "
        "memory, and decoding reads half the bytes; scales come from the checkpoint, else 1.",
        group=_CACHE,
        choices=(*DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    enable_prefix_caching: bool | None = option(
        None, "Share the KV cache of equal prompt beginnings. Default: on.", group=_CACHE
    )

    max_num_batched_tokens: int | None = option(
        None, "Most tokens computed in one step. Default: by device and use.", group=_SCHEDULER, low=1, size=True
    )
    max_num_seqs: int | None = option(
        None, "Most requests in one step. Default: by device and use.", group=_SCHEDULER, low=1, size=True
    )
    enable_chunked_prefill: bool | None = option(
        None, "Compute a long prompt in pieces next to running requests. Default: on.", group=_SCHEDULER
    )
    long_prefill_token_threshold: int = option(
        0,
        "Most prompt tokens of one request in a step while others wait; 0: no cap.",
        group=_SCHEDULER,
        low=0,
        size=True,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Who runs first: fcfs by arrival, priority by each request's priority (lower first), then by arrival.",
        group=_SCHEDULER,
        choices=("fcfs", "priority"),
    )
    priority_aging_seconds: float = option(
        60.0,
        "With priorities: waiting this long is worth one level, so that nobody waits for ever; 0: never.",
        group=_SCHEDULER,
        low=0,
    )
    async_scheduling: bool | None = option(
        None,
        "Schedule the next step while this one runs. Default: on where the device computes alone.",
        group=_SCHEDULER,
    )
    stream_interval: int = option(
        1, "Tokens gathered before a stream's next update; the first token is sent at once.", group=_SCHEDULER, low=1
    )
    max_num_queued_reqs: int | None = option(
        None,
        "Most requests that may wait; more are refused. Default: 16384 in a server, no limit offline.",
        group=_SCHEDULER,
        low=1,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Most prompt tokens that may wait; more are refused. Default: no limit.",
        group=_SCHEDULER,
        low=1,
        size=True,
    )

    max_engine_restarts: int | None = option(
        None,
        "How often in a row a dead core is restarted without a token in between; 0: never. Default: 5.",
        group=_SUPERVISION,
        low=0,
    )
    engine_stall_timeout: float | None = option(
        None,
        "Seconds of silence after which a core counts as hung and is restarted. Longer than any step. Default: 120.",
        group=_SUPERVISION,
        above=0,
    )

    tensor_parallel_size: int = option(
        1, "Devices that share each layer. Only 1 is supported yet.", group=_PARALLEL, short="-tp", low=1
    )
    pipeline_parallel_size: int = option(
        1, "Devices that share the stack of layers. Only 1 is supported yet.", group=_PARALLEL, short="-pp", low=1
    )
    data_parallel_size: int = option(
        1, "Replicas of the engine. Only 1 is supported yet.", group=_PARALLEL, short="-dp", low=1
    )
    distributed_executor_backend: str | None = option(
        None, "How workers run. uni: in the engine's process.", group=_PARALLEL, choices=("uni",)
    )

    device: str = option("auto", "Platform to run on. auto: the best this machine has.", group=_COMPILATION)
    enforce_eager: bool = option(False, "Run without graphs.", group=_COMPILATION)
    optimization_level: int = option(
        2,
        "0: no graphs (as enforce_eager); 2: graphs where the device has them; 3: compile as well.",
        group=_COMPILATION,
        short="-O",
        choices=(0, 2, 3),
    )
    compile: bool = option(
        False, "Compile the model's blocks with torch.compile: seconds more at the start.", group=_COMPILATION
    )
    compilation_config: dict[str, Any] = option(
        {},
        "Details: mode (0; 1, 2 and 3 are compile), cudagraph_mode (FULL_DECODE_ONLY or NONE), cudagraph_capture_sizes, "
        "max_cudagraph_capture_size.",
        group=_COMPILATION,
        short="-cc",
    )
    attention_backend: str | None = option(
        None, "Attention backend by name. Default: the first that accepts model and device.", group=_COMPILATION
    )
    batch_invariant: bool = option(
        False,
        "Compute each token by itself, so that a request's answer does not depend, in any bit, on other requests, on how its "
        "prompt is cut or on what is cached. Slower.",
        group=_COMPILATION,
    )
    op_providers: dict[str, Any] = option(
        {}, "Operator to provider, such as rms_norm=torch,paged_attention=triton or *=torch.", group=_COMPILATION
    )

    structured_outputs_config: dict[str, Any] = option(
        {},
        "How answers are held to schemas and grammars: backend (auto, llguidance, xgrammar), disable_any_whitespace, "
        "disable_additional_properties, enable_in_reasoning, compile_timeout (seconds).",
        group=_STRUCTURED,
    )
    guided_decoding_backend: str | None = option(
        None, "Older spelling of the backend in structured_outputs_config.", group=_STRUCTURED
    )

    disable_log_stats: bool = option(False, "No statistics in log and metrics.", group=_OBSERVABILITY)
    log_stats_interval: float = option(
        10.0, "Seconds between log lines with statistics.", group=_OBSERVABILITY, above=0
    )
    enable_log_requests: bool = option(False, "Log each request's id and parameters.", group=_OBSERVABILITY)
    max_log_len: int | None = option(
        None, "Most characters of a prompt that is logged. Default: all.", group=_OBSERVABILITY, low=0
    )

    profiler_config: dict[str, Any] = option(
        {},
        "What /start_profile records: profiler (torch, or cuda for Nsight Systems), torch_profiler_dir (a folder for traces), "
        "torch_profiler_with_stack, _record_shapes, _with_memory, _with_flops, _use_gzip, delay_iterations, max_iterations.",
        group=_OBSERVABILITY,
    )
    enable_nvtx_tracing: bool = option(
        False, "Mark schedule, execute and update of each step for Nsight Systems.", group=_OBSERVABILITY
    )
    enable_layerwise_nvtx_tracing: bool = option(
        False, "Mark every module of the model too; needs enforce_eager.", group=_OBSERVABILITY
    )

    def __post_init__(self) -> None:
        if isinstance(self.logits_processors, (list, tuple)):
            self.logits_processors = [
                class_name(given) if isinstance(given, type) else given for given in self.logits_processors
            ]
        check_options(self)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineArgs":
        """Like the constructor, but an unknown or not yet supported name is a ConfigError that says what to do.

        A known option that is switched off (`enable_lora=False`) is accepted: that is what happens anyway.
        """
        known = {field.name for field in option_fields(cls)}
        accepted = {}
        for name, value in kwargs.items():
            if name in known:
                accepted[name] = value
                continue
            problem = explain_unknown(name, known, value)
            if problem is not None:
                raise ConfigError(problem, param=name)
        return cls(**accepted)

    def replace(self, **changes: Any) -> "EngineArgs":
        """A copy with some options changed."""
        return dataclasses.replace(self, **changes)


# vLLM's name for the arguments of the asynchronous engine; here they are the same.
AsyncEngineArgs = EngineArgs
