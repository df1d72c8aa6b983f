"""The resolved configuration: about ten small frozen dataclasses. Nothing is assigned after `resolve`.

Every field is plain data that msgpack can carry, since the core runs in another process. What only the device can tell
(free memory, number of blocks) is a result object, not a field here.
"""

from dataclasses import dataclass, field
from typing import Any

from octavo.config.hf import HFConfig
from octavo.config.sentence_transformers import DenseModule


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """How answers of a model with an encoder before its decoder begin, where a request does not say it."""

    decoder_begin: list[int]  # decoder_start_token_id, then forced_bos_token_id where there is one
    bad_words_token_ids: list[list[int]] = field(default_factory=list)  # what its answers never hold


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how its numbers are kept."""

    model: str  # what the user typed
    path: str  # the folder or single GGUF file on disk
    served_model_names: list[str]
    hf_config: HFConfig
    architecture: str  # the name looked up in models/registry.py
    model_impl: str  # "octavo" or "transformers"
    dtype: str  # "float32", "bfloat16" or "float16"
    max_model_len: int
    seed: int
    vocab_size: int  # rows of the output head
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    # Sampling defaults from generation_config.json and --override-generation-config; empty when switched off.
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: list[int] = field(default_factory=list)
    logits_processors: list[str] = field(default_factory=list)  # "module:Class", plugins first
    enable_sleep_mode: bool = False
    enable_prompt_embeds: bool = False
    encoder_decoder: EncoderDecoderConfig | None = None

    def get_vocab_size(self) -> int:
        """vLLM's spelling of `vocab_size`."""
        return self.vocab_size


@dataclass(frozen=True)
class PoolingConfig:
    """How a model that makes vectors, classes or scores does so."""

    tasks: list[str]  # of types.pooling_params.TASKS, the default first
    is_encoder: bool  # needs whole prompts and keeps no KV cache
    is_bidirectional: bool  # a decoder whose attention looks both ways
    pooling: str  # how a text becomes one row: "last", "cls" (first) or "mean"
    token_pooling: str  # "all" tokens, or "step": those with `step_tag_id`
    activation: str  # "normalize", "softmax", "sigmoid" or "identity"
    width: int  # numbers in an embedding
    labels: list[str] = field(default_factory=list)  # names of the classes
    dense: list[DenseModule] = field(default_factory=list)  # projections behind the pooling
    label_token_ids: list[int] = field(default_factory=list)  # whose logits the classes are; two of them: one class
    is_matryoshka: bool = False  # embeddings may be cut
    matryoshka_dimensions: list[int] = field(default_factory=list)  # to these; empty: to any
    dimensions: int | None = None  # to which they are cut by default
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    logit_mean: float | None = None  # logits are shifted and scaled before the activation
    logit_sigma: float | None = None
    prompts: dict[str, str] = field(default_factory=dict)  # name -> text that goes before a text
    default_prompt: str | None = None

    @property
    def reads_whole_prompts(self) -> bool:
        """Whether every token's hidden state may count, so that a cached prefix is of no use."""
        return self.pooling != "last"


@dataclass(frozen=True)
class TokenizerConfig:
    """Where text becomes tokens. `path` None: no tokenizer (skip_tokenizer_init)."""

    path: str | None
    mode: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None  # template text that overrides the tokenizer's


@dataclass(frozen=True)
class LoadConfig:
    """How weights come in."""

    load_format: str  # "safetensors", "pt", "gguf" or "dummy"
    quantization: str | None = None
    quantization_config: dict[str, Any] = field(default_factory=dict)  # from the checkpoint
    download_dir: str | None = None
    use_tqdm: bool = True


@dataclass(frozen=True)
class CacheConfig:
    """KV cache: block size, element type, and how many bytes it may take (a share, a number, or blocks outright)."""

    block_size: int
    kv_cache_dtype: str  # a concrete dtype name
    memory_utilization: float
    kv_cache_memory_bytes: int | None = None
    num_blocks_override: int | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs, and how much of it in one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"  # or "priority"
    priority_aging_seconds: float = 0.0  # waiting this long is worth one level of priority; 0: nothing
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # cap of one request's chunk while others wait; 0: none
    async_scheduling: bool = False  # two steps in flight
    stream_interval: int = 1
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_encoder_len: int = 0  # positions of the longest encoder output; 0: the model has no encoder


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks. Everything is 1 until the parallel issue."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    executor: str = "uni"


@dataclass(frozen=True)
class DeviceConfig:
    """The platform and its knobs."""

    platform: str  # "cpu", "cuda", …
    device: str  # torch device string, "cpu" or "cuda:0"
    num_threads: int = 0  # CPU compute threads; 0 leaves torch's choice


@dataclass(frozen=True)
class CompilationConfig:
    """Graphs and compilers. `capture_sizes` are the decode batch sizes to capture, in order of likely use; a CPU records
    its decode steps as they come, unless `enforce_eager`."""

    enforce_eager: bool = False
    capture_sizes: list[int] = field(default_factory=list)
    attention_backend: str | None = None
    op_providers: dict[str, str] = field(default_factory=dict)
    compiles_blocks: bool = False


@dataclass(frozen=True)
class ObservabilityConfig:
    """What is counted and said."""

    disable_log_stats: bool = False
    log_stats_interval: float = 10.0
    enable_log_requests: bool = False
    max_log_len: int | None = None
    nvtx: bool = False  # ranges around schedule, execute and update
    layerwise_nvtx: bool = False  # and around every module of the model


@dataclass(frozen=True)
class ProfilerConfig:
    """What /start_profile records. Without a folder: the range that Nsight Systems captures."""

    folder: str | None = None
    with_stack: bool = True
    record_shapes: bool = False
    with_memory: bool = False
    with_flops: bool = False
    use_gzip: bool = True
    delay_iterations: int = 0  # steps that pass before it begins
    max_iterations: int = 0  # steps after which it ends by itself; 0: only when told


@dataclass(frozen=True)
class SupervisionConfig:
    """What the front does about a core that died or hangs; without meaning for a core in the front's own process."""

    max_restarts: int = 5  # in a row, without a token in between
    stall_seconds: float = 120.0  # silence after which a core counts as hung and is killed


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """How answers are held to schemas and grammars. The flags are what requests get that do not say otherwise."""

    backend: str = "auto"  # or a name in structured_output/manager.py
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False  # from the first token, reasoning included
    compile_timeout: float = 10.0  # seconds until a request whose grammar is not ready is refused


@dataclass(frozen=True)
class EngineConfig:
    """The whole. Pass a component the part it needs, not this."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    load: LoadConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: DeviceConfig
    compilation: CompilationConfig
    observability: ObservabilityConfig
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    profiler: ProfilerConfig | None = None
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    pooling: PoolingConfig | None = None  # None: the model generates text

    # vLLM's names, for logits processors and other plugins written for it.

    @property
    def model_config(self) -> ModelConfig:
        return self.model

    @property
    def cache_config(self) -> CacheConfig:
        return self.cache

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.scheduler

    @property
    def parallel_config(self) -> ParallelConfig:
        return self.parallel
