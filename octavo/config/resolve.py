"""`resolve`: from what the user typed, the model's own configuration and the machine to the frozen `EngineConfig`.

Pure: it opens no file and no device, all it needs is passed in. Every "auto" ends here, and each choice is written down
in one line with its reason. Combinations of options are checked here; single options were checked where they are
declared. What follows from the model's configuration alone stands in `config/model.py`.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import model as model_rules
from octavo.config.args import EngineArgs
from octavo.config.batch_invariant import invariant_providers
from octavo.config.checkpoint import WEIGHT_FORMATS, Checkpoint
from octavo.config.compilation import resolve_compilation
from octavo.config.encoder_decoder import check_dtype, decoder_of, resolve_encoder_decoder
from octavo.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SupervisionConfig,
    TokenizerConfig,
)
from octavo.config.fp8 import asks_for_fp8_cache, read_fp8_scheme
from octavo.config.hf import HFConfig
from octavo.config.pooling import PoolingModel, pooling_length, resolve_pooling
from octavo.config.profiling import check_nvtx, resolve_profiler
from octavo.config.sentence_transformers import SentenceTransformers
from octavo.config.structured_outputs import resolve_structured_outputs
from octavo.errors import ConfigError
from octavo.platforms.base import Platform, Usage
from octavo.types.kv_spec import DTYPE_BYTES
from octavo.utils.class_names import is_local

GIB = 1 << 30
MAX_DEFAULT_CPU_CACHE = 4 * GIB
# Set aside on an accelerator for the worst step when the context is chosen to fit; the worker measures the real number.
WORKING_SPACE_GUESS = GIB
# Weights of a few bits on a CPU, computed in float32 and int8.
PACKED_FORMATS = ("gguf", "int8", "int4")
NEUTRAL_GENERATION_CONFIG = ("octavo", "vllm")
MAX_QUEUED_IN_A_SERVER = 16_384  # far beyond what any client waits for; a bound on memory


@dataclass(frozen=True)
class Resolved:
    """The configuration, and a line for each thing that was decided on the user's behalf."""

    config: EngineConfig
    decisions: list[str]


def resolve(
    args: EngineArgs,
    hf_config: HFConfig,
    platform: Platform,
    *,
    checkpoint: Checkpoint,
    generation_config: Mapping[str, Any] | None = None,
    native_architectures: Collection[str] = (),
    encoder_architectures: Collection[str] = (),
    encoder_decoder_architectures: Collection[str] = (),
    sentence_transformers: SentenceTransformers | None = None,
    label_token_ids: Collection[int] = (),
    chat_template: str | None = None,
    plugin_processors: Collection[str] = (),
    usage: Usage = "server",
) -> Resolved:
    """Decide everything. Raises ConfigError naming the options that cannot be honoured, and what to change.

    `generation_config` is the parsed generation_config.json, `native_architectures` those with a model file of Octavo's
    own, `encoder_architectures` and `encoder_decoder_architectures` likewise, `sentence_transformers` what such files say,
    `label_token_ids` the tokens whose logits are a classifier's classes, `chat_template` the text of the template that
    replaces the tokenizer's, `plugin_processors` the logits processors that installed plugins bring.
    """
    notes: list[str] = []
    hf = model_rules.override(hf_config, args.hf_overrides)
    text = hf.text()
    generation = dict(generation_config or {})
    encoder_decoder = resolve_encoder_decoder(args, hf, generation, encoder_decoder_architectures, notes)
    if encoder_decoder is not None:
        text = decoder_of(hf)
        native_architectures = encoder_decoder_architectures
    _check_parallel(args, text)
    _check_tokenizer(args)
    check_nvtx(args, platform)

    load_format = _load_format(args, checkpoint, notes)
    pooling = None
    if encoder_decoder is None:
        pooling = resolve_pooling(
            args,
            hf,
            sentence_transformers,
            decoders=native_architectures,
            encoders=encoder_architectures,
            label_token_ids=label_token_ids,
            notes=notes,
        )
    if pooling is not None:
        args = _for_pooling(args, hf, pooling, sentence_transformers)
        if pooling.config.is_encoder:  # no layer keeps anything
            text = HFConfig({**text.data, "num_hidden_layers": 0, "hidden_size": pooling.config.width})
    model_impl = pooling.model_impl if pooling is not None else _model_impl(args, hf, native_architectures, notes)
    stored_quantization = model_rules.stored_quantization(hf)
    quantization = (
        _fp8(args, text, stored_quantization, platform, load_format, model_impl, notes)
        or _online_int(args, platform, load_format, model_impl, notes)
        or _quantization(args, text, platform, checkpoint, load_format, model_impl, notes)
    )
    if quantization in PACKED_FORMATS:
        dtype, weights = "float32", _quantised_bytes(checkpoint)
    else:
        dtype = _dtype(args, text, platform, checkpoint, load_format, notes)
        weights = _weight_bytes(checkpoint, dtype) if quantization is None else _fp8_bytes(checkpoint, text, dtype)
    if encoder_decoder is not None:
        check_dtype(hf, dtype)
    kv_dtype = _kv_cache_dtype(args, text, platform, dtype, quantization, stored_quantization, notes)
    block_size = _block_size(args, platform)
    cache_bytes = _cache_bytes(args, platform, weights, dtype, notes)
    room = cache_bytes if cache_bytes is not None else _accelerator_room(args, platform, weights)
    max_model_len = _max_model_len(args, text, kv_dtype, block_size, room, notes)
    processors = _logits_processors(args, plugin_processors, usage, notes)
    max_encoder_len = 0 if encoder_decoder is None else max_model_len
    scheduler = _scheduler(args, platform, max_model_len, max_encoder_len, usage, bool(processors), notes)
    cache_bytes = _trim_cache(args, cache_bytes, text, kv_dtype, block_size, scheduler, notes)

    compilation = resolve_compilation(args, platform, scheduler.max_num_seqs, quantization)
    if encoder_decoder is not None and compilation.compiles_blocks:
        raise ConfigError(f"compile is not supported for {hf.architecture}, an encoder-decoder model.", param="compile")
    if args.batch_invariant:
        chosen = invariant_providers(args, text, platform, quantization, model_impl, compilation.compiles_blocks, notes)
        compilation = dataclasses.replace(compilation, op_providers=chosen)

    config = EngineConfig(
        model=ModelConfig(
            model=args.model,
            path=checkpoint.path,
            served_model_names=_served_names(args),
            hf_config=hf,
            architecture=hf.architecture if pooling is None else pooling.architecture,
            model_impl=model_impl,
            dtype=dtype,
            max_model_len=max_model_len,
            seed=args.seed,
            vocab_size=text.vocab_size,
            max_logprobs=args.max_logprobs,
            logprobs_mode=args.logprobs_mode,
            default_sampling_params=_sampling_defaults(args, generation, notes),
            eos_token_ids=model_rules.eos_token_ids(generation, hf),
            logits_processors=processors,
            enable_sleep_mode=args.enable_sleep_mode,
            enable_prompt_embeds=args.enable_prompt_embeds,
            encoder_decoder=encoder_decoder,
        ),
        tokenizer=TokenizerConfig(
            path=None if args.skip_tokenizer_init else checkpoint.tokenizer_path or checkpoint.path,
            mode=args.tokenizer_mode,
            revision=args.tokenizer_revision or args.revision,
            trust_remote_code=args.trust_remote_code,
            chat_template=chat_template,
        ),
        load=LoadConfig(
            load_format=load_format,
            quantization=quantization,
            quantization_config=dict(stored_quantization or {}),
            download_dir=args.download_dir,
            use_tqdm=args.use_tqdm_on_load,
        ),
        cache=CacheConfig(
            block_size=block_size,
            kv_cache_dtype=kv_dtype,
            memory_utilization=_utilization(args, platform),
            kv_cache_memory_bytes=cache_bytes,
            num_blocks_override=args.num_gpu_blocks_override,
            enable_prefix_caching=args.enable_prefix_caching is not False,
        ),
        scheduler=scheduler,
        parallel=ParallelConfig(executor=args.distributed_executor_backend or "uni"),
        device=DeviceConfig(platform=platform.name, device=platform.device, num_threads=platform.num_threads),
        compilation=compilation,
        observability=ObservabilityConfig(
            disable_log_stats=args.disable_log_stats,
            log_stats_interval=args.log_stats_interval,
            enable_log_requests=args.enable_log_requests,
            max_log_len=args.max_log_len,
            nvtx=args.enable_nvtx_tracing or args.enable_layerwise_nvtx_tracing,
            layerwise_nvtx=args.enable_layerwise_nvtx_tracing,
        ),
        supervision=_supervision(args, usage),
        profiler=resolve_profiler(args.profiler_config, platform),
        structured_outputs=resolve_structured_outputs(args),
        pooling=None if pooling is None else pooling.config,
    )
    return Resolved(config, notes)


def _for_pooling(
    args: EngineArgs, hf: HFConfig, pooling: PoolingModel, files: SentenceTransformers | None
) -> EngineArgs:
    """The options as such a model needs them; those that contradict it are refused."""
    config = pooling.config
    for name in ("logits_processors", "batch_invariant", "compile"):
        if getattr(args, name):
            raise ConfigError(f"{name} is for models that generate text, not for runner=pooling.", param=name)
    changes: dict[str, Any] = {"enforce_eager": True, "max_model_len": pooling_length(args, hf, files)}
    if config.is_encoder:
        for name in ("enable_chunked_prefill", "enable_prefix_caching"):
            if getattr(args, name):
                raise ConfigError(
                    f"{name}=True, but {hf.architecture} looks at whole prompts and keeps nothing of them; leave it out.",
                    param=name,
                )
        changes |= {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    return dataclasses.replace(args, **changes)


def _supervision(args: EngineArgs, usage: Usage) -> SupervisionConfig:
    for name in ("max_engine_restarts", "engine_stall_timeout"):
        if usage == "llm" and getattr(args, name) is not None:
            raise ConfigError(
                f"{name}={getattr(args, name)} needs a core in a process of its own, but LLM runs the core in yours, "
                "where nobody is left to restart it; leave it out, or use AsyncLLM or the server.",
                param=name,
            )
    defaults = SupervisionConfig()
    restarts, stall = args.max_engine_restarts, args.engine_stall_timeout
    return SupervisionConfig(
        max_restarts=defaults.max_restarts if restarts is None else restarts,
        stall_seconds=defaults.stall_seconds if stall is None else stall,
    )


def _check_parallel(args: EngineArgs, text: HFConfig) -> None:
    size = args.tensor_parallel_size
    if size > 1:
        heads, kv_heads = text.num_heads, text.num_kv_heads
        legal = [n for n in range(1, heads + 1) if heads % n == 0 and kv_heads % n == 0]
        if size not in legal:
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide num_attention_heads={heads} and "
                f"num_key_value_heads={kv_heads}; use {_either(legal)}.",
                param="tensor_parallel_size",
            )
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(args, name) > 1:
            raise ConfigError(
                f"{name}={getattr(args, name)} is not supported yet: an engine runs on one device; use {name}=1.",
                param=name,
            )


def _either(values: list[int]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _check_tokenizer(args: EngineArgs) -> None:
    if not args.skip_tokenizer_init:
        return
    for name in ("tokenizer", "chat_template"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"skip_tokenizer_init and {name} contradict each other; leave one of them out.", param=name
            )


def _served_names(args: EngineArgs) -> list[str]:
    names = [args.served_model_name] if isinstance(args.served_model_name, str) else args.served_model_name
    if names is not None and (not names or not all(names)):
        raise ConfigError("served_model_name needs at least one name, and no empty one.", param="served_model_name")
    return list(names) if names else [args.model]


def _load_format(args: EngineArgs, checkpoint: Checkpoint, notes: list[str]) -> str:
    wanted = args.load_format
    if args.quantization == "gguf":
        if wanted not in ("auto", "gguf"):
            raise ConfigError(f"quantization=gguf and load_format={wanted} contradict each other.", param="load_format")
        wanted = "gguf"
    if wanted == "dummy":
        return wanted
    if not checkpoint.formats:
        raise ConfigError(
            f"{checkpoint.path} holds no weights: no *.safetensors, pytorch_model*.bin or *.gguf file. Download them, "
            "or start with load_format=dummy for random ones.",
            param="model",
        )
    if wanted == "auto":
        chosen = next(name for name in WEIGHT_FORMATS if name in checkpoint.formats)
        if len(checkpoint.formats) > 1:
            notes.append(f"load_format={chosen}: preferred among {', '.join(checkpoint.formats)}, which are all there")
        return chosen
    if wanted not in checkpoint.formats:
        raise ConfigError(
            f"load_format={wanted}, but {checkpoint.path} holds {' and '.join(checkpoint.formats)}; "
            "leave load_format out.",
            param="load_format",
        )
    return wanted


def _dtype(
    args: EngineArgs, text: HFConfig, platform: Platform, checkpoint: Checkpoint, load_format: str, notes: list[str]
) -> str:
    asked = model_rules.DTYPE_NAMES.get(args.dtype, args.dtype)
    if asked != "auto":
        if asked not in platform.supported_dtypes:
            raise ConfigError(
                f"dtype={args.dtype} is not supported on {platform.name}; "
                f"use {' or '.join(platform.supported_dtypes)}.",
                param="dtype",
            )
        return asked
    stored = checkpoint.stored_dtype or model_rules.stored_dtype(text) or "float32"
    preferred = platform.preferred_dtype
    if platform.supports_graphs:  # an accelerator: 16 bits, the checkpoint's own kind where it can
        if stored in ("float16", "bfloat16") and stored in platform.supported_dtypes:
            return stored
        notes.append(
            f"dtype={preferred}: the checkpoint is {stored}, and {preferred} is what {platform.name} is built for"
        )
        return preferred
    if stored == preferred:
        return stored
    if stored == "float32":
        notes.append("dtype=float32: that of the checkpoint")
        return stored
    if preferred == "float32" and not _fits(checkpoint, "float32", platform):
        fallback = stored if stored in platform.supported_dtypes else "bfloat16"
        notes.append(f"dtype={fallback}: the weights would not fit in memory as float32")
        return fallback
    notes.append(
        f"dtype={preferred}: the checkpoint is {stored}, and this {platform.name} computes fastest in {preferred}"
    )
    return preferred


def _quantization(
    args: EngineArgs,
    text: HFConfig,
    platform: Platform,
    checkpoint: Checkpoint,
    load_format: str,
    model_impl: str,
    notes: list[str],
) -> str | None:
    """Whether weights are computed from their quantised blocks; None: as floating point numbers, decoded on load.

    A data type that is asked for is a wish for exact arithmetic in it, unless quantization is asked for too.
    """
    possible = (
        load_format == "gguf"
        and checkpoint.stored_dtype == "quantised"
        and platform.name == "cpu"
        and model_impl == "octavo"
    )
    if not possible or (args.quantization is None and args.dtype != "auto"):
        return None
    if text.num_experts:
        if args.quantization == "gguf":
            raise ConfigError(
                "quantization=gguf has no kernels for experts; leave it out: their blocks are decoded on load.",
                param="quantization",
            )
        notes.append("GGUF blocks are decoded on load: there are no kernels for experts in them")
        return None
    if args.dtype not in ("auto", "float32", "float"):
        raise ConfigError(
            f"quantization=gguf computes in float32 and int8, not in dtype={args.dtype}; leave one of them out.",
            param="dtype",
        )
    notes.append(
        "quantization=gguf: weights stay in their blocks (dtype=float32 decodes them: exact, larger and slower)"
    )
    return "gguf"


def _online_int(
    args: EngineArgs, platform: Platform, load_format: str, model_impl: str, notes: list[str]
) -> str | None:
    """Whether linears are rounded to integers of 8 or 4 bits while they load."""
    if args.quantization not in ("int8", "int4"):
        return None
    for refused, why in (
        (platform.name != "cpu", f"it is for CPUs; on {platform.name} there is fp8"),
        (load_format == "gguf", "GGUF weights have a quantisation of their own"),
        (load_format == "dummy", "dummy weights are made in floating point"),
        (model_impl == "transformers", "models run by transformers keep the weights they load"),
        (args.dtype not in ("auto", "float32", "float"), f"it computes in float32 and int8, not in dtype={args.dtype}"),
    ):
        if refused:
            raise ConfigError(f"quantization={args.quantization} is not supported here: {why}.", param="quantization")
    notes.append(f"quantization={args.quantization}: weights are rounded while they load, activations as they come")
    return args.quantization


def _fp8(
    args: EngineArgs,
    text: HFConfig,
    stored: Mapping[str, Any] | None,
    platform: Platform,
    load_format: str,
    model_impl: str,
    notes: list[str],
) -> str | None:
    """Whether linears are computed in 8-bit floating point: as the checkpoint is, or rounded while it is read."""
    if stored is not None:
        read_fp8_scheme(stored)  # refuses what is not FP8
    if stored is not None and args.quantization not in (None, "fp8"):
        raise ConfigError(
            f"quantization={args.quantization}, but the checkpoint is FP8; leave quantization out.",
            param="quantization",
        )
    if stored is None and args.quantization != "fp8":
        return None
    for refused, why in (
        (platform.fp8_refusal is not None, platform.fp8_refusal),
        (load_format == "gguf", "GGUF weights have a quantisation of their own"),
        (model_impl == "transformers", "models run by transformers keep the weights they load"),
    ):
        if refused:
            raise ConfigError(f"quantization=fp8 is not supported here: {why}.", param="quantization")
    if not platform.supports_graphs:
        notes.append(f"quantization=fp8: on {platform.name} by the reference operators, which are right and very slow")
    if text.num_experts:
        done = "stay as they are" if stored is None else "are decoded while they load"
        notes.append(f"quantization=fp8: experts {done}, and take the bytes of the model's data type")
    return "fp8"


def _fp8_bytes(checkpoint: Checkpoint, text: HFConfig, dtype: str) -> int:
    """A byte a number, and `dtype` for the embedding and the head; for all where there are experts, which outweigh the rest."""
    if text.num_experts:
        return _weight_bytes(checkpoint, dtype)
    tables = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
    plain = min(tables, checkpoint.num_parameters)
    return plain * DTYPE_BYTES[dtype] + checkpoint.num_parameters - plain


def _weight_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    return checkpoint.num_parameters * DTYPE_BYTES[dtype]


def _quantised_bytes(checkpoint: Checkpoint) -> int:
    """An upper bound: 8 bits and a scale for every 16 numbers."""
    return checkpoint.num_parameters * 9 // 8


def _fits(checkpoint: Checkpoint, dtype: str, platform: Platform) -> bool:
    """Whether the weights leave a quarter of the free memory for everything else."""
    return _weight_bytes(checkpoint, dtype) <= platform.available_memory() * 3 // 4


def _kv_cache_dtype(
    args: EngineArgs,
    text: HFConfig,
    platform: Platform,
    dtype: str,
    quantization: str | None,
    stored: Mapping[str, Any] | None,
    notes: list[str],
) -> str:
    asked = model_rules.DTYPE_NAMES.get(args.kv_cache_dtype, args.kv_cache_dtype)
    if asked == "auto" and stored is not None and asks_for_fp8_cache(stored):
        if platform.supports_graphs:
            asked = "fp8"
            notes.append("kv_cache_dtype=fp8_e4m3: the checkpoint is made for it")
        else:
            notes.append(f"kv_cache_dtype={dtype}: the checkpoint is made for fp8, which {platform.name} reads slowly")
    if asked in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return _fp8_cache(text, platform, asked, notes)
    if quantization in PACKED_FORMATS:
        # The kernels convert as they read; half the bytes, and weights of a few bits hide the rounding.
        return "float16" if asked == "auto" else asked
    if asked not in ("auto", dtype):
        raise ConfigError(
            f"kv_cache_dtype={args.kv_cache_dtype} with dtype={dtype} is not supported yet: the cache keeps the "
            "model's data type; leave kv_cache_dtype out or change dtype.",
            param="kv_cache_dtype",
        )
    return dtype


def _fp8_cache(text: HFConfig, platform: Platform, asked: str, notes: list[str]) -> str:
    for refused, why in (
        (asked == "fp8_e5m2", "E4M3 keeps a bit more of every number; use fp8"),
        (platform.fp8_refusal is not None, platform.fp8_refusal),
        (text.get("kv_lora_rank"), "cached latents keep the model's data type"),
        (text.get("is_encoder_decoder"), "what an encoder makes is kept in the model's data type"),
    ):
        if refused:
            raise ConfigError(f"kv_cache_dtype={asked} is not supported here: {why}.", param="kv_cache_dtype")
    if not platform.supports_graphs:
        notes.append(f"kv_cache_dtype=fp8_e4m3: on {platform.name} by the reference operators, half the bytes but slow")
    return "fp8_e4m3"


def _block_size(args: EngineArgs, platform: Platform) -> int:
    size = args.block_size or platform.default_block_size
    if size & (size - 1):
        raise ConfigError(f"block_size={size} is not a power of two; use 16, 32, 64 or 128.", param="block_size")
    return size


def _utilization(args: EngineArgs, platform: Platform) -> float:
    return args.gpu_memory_utilization or platform.default_memory_utilization or 1.0


def _cache_bytes(args: EngineArgs, platform: Platform, weights: int, dtype: str, notes: list[str]) -> int | None:
    """Bytes of the KV cache where they are known before the device is measured; None: the worker takes its share."""
    sizing = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")
    given = [name for name in sizing if getattr(args, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} all size the KV cache; give one of them.", param=given[0])
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    if given or platform.default_memory_utilization is not None:
        return None
    available = platform.available_memory()
    if available <= weights:
        raise ConfigError(
            f"the weights take {_gib(weights)} as {dtype}, but {_gib(available)} of memory are free; use a smaller "
            "model or free memory.",
            param="model",
        )
    size = min((available - weights) // 2, MAX_DEFAULT_CPU_CACHE)
    notes.append(
        f"kv_cache_memory_bytes={size}: at most half of the {_gib(available - weights)} that weights leave free, "
        f"and at most {_gib(MAX_DEFAULT_CPU_CACHE)}"
    )
    return size


def _accelerator_room(args: EngineArgs, platform: Platform, weights: int) -> int:
    """About how many bytes the worker will find for the KV cache."""
    share = int(platform.total_memory() * _utilization(args, platform))
    return max(0, share - weights - WORKING_SPACE_GUESS)


def _max_model_len(args: EngineArgs, text: HFConfig, dtype: str, block_size: int, room: int, notes: list[str]) -> int:
    limit, why = model_rules.context_length(text, disable_sliding_window=args.disable_sliding_window)
    asked = args.max_model_len
    if asked == 0:
        raise ConfigError(
            "max_model_len=0 leaves no room for a token; leave it out or give at least 1.", param="max_model_len"
        )
    if isinstance(asked, int) and asked > 0:
        if asked > limit:
            raise ConfigError(
                f"max_model_len={asked} is more than the {limit} tokens the model is made for ({why}); lower it, or "
                "extend the model through hf_overrides (rope_parameters, max_position_embeddings).",
                param="max_model_len",
            )
        return asked
    if args.num_gpu_blocks_override is not None:
        room = 0
    fitting = limit if room == 0 else model_rules.longest_fitting(text, dtype, limit, room, block_size)
    if fitting < 1:
        raise ConfigError(
            f"a KV cache of {room} bytes holds not one block of {block_size} tokens; raise kv_cache_memory_bytes.",
            param="kv_cache_memory_bytes",
        )
    if fitting < limit:
        notes.append(f"max_model_len={fitting}: a KV cache of {_gib(room)} holds no request of {limit} tokens ({why})")
    else:
        notes.append(f"max_model_len={limit}: {why}")
    return fitting


def _scheduler(
    args: EngineArgs,
    platform: Platform,
    max_model_len: int,
    max_encoder_len: int,
    usage: Usage,
    has_processors: bool,
    notes: list[str],
) -> SchedulerConfig:
    defaults = platform.batch_defaults(usage)
    chunked = args.enable_chunked_prefill is not False
    if not chunked and args.long_prefill_token_threshold:
        raise ConfigError(
            "long_prefill_token_threshold cuts prompts into chunks, which enable_chunked_prefill=False forbids; leave "
            "one of them out.",
            param="long_prefill_token_threshold",
        )
    budget, num_seqs = args.max_num_batched_tokens, args.max_num_seqs
    if budget is not None and not chunked and budget < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={max_model_len}, and "
            "enable_chunked_prefill=False computes a prompt in one step; raise the budget, lower max_model_len or "
            "allow chunks.",
            param="max_num_batched_tokens",
        )
    if budget is not None and num_seqs is not None and num_seqs > budget:
        raise ConfigError(
            f"max_num_seqs={num_seqs} is more than max_num_batched_tokens={budget}, and each running request needs a "
            "token a step; lower the one or raise the other.",
            param="max_num_seqs",
        )
    if budget is None:
        budget = max(defaults.max_num_batched_tokens, num_seqs or 0, 0 if chunked else max_model_len)
        budget = min(budget, (num_seqs or defaults.max_num_seqs) * max_model_len)
        if max_encoder_len:  # an encoder's input is computed in one step, beside all that runs
            budget = max(budget, max_encoder_len + (num_seqs or defaults.max_num_seqs))
        notes.append(
            f"max_num_batched_tokens={budget}: default of {platform.name} ({usage}), given context and max_num_seqs"
        )
    if num_seqs is None:
        num_seqs = max(1, min(defaults.max_num_seqs, budget - max_encoder_len))
        notes.append(f"max_num_seqs={num_seqs}: default of {platform.name} ({usage})")
    if max_encoder_len and budget < max_encoder_len + num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than the {max_encoder_len} tokens an encoder may read, which are "
            f"computed in one step, and max_num_seqs={num_seqs}; raise it, or lower max_model_len.",
            param="max_num_batched_tokens",
        )
    overlap = args.async_scheduling
    if has_processors and overlap:
        raise ConfigError(
            "async_scheduling=True launches a step before the tokens of the last are known, which custom logits "
            "processors are told; leave async_scheduling out.",
            param="async_scheduling",
        )
    if has_processors:
        overlap = False
        notes.append("async_scheduling=False: custom logits processors need to know the last token")
    elif overlap is None:
        overlap = platform.default_async_scheduling
        reason = "the device computes while the host schedules" if overlap else "host and device are the same cores"
        notes.append(f"async_scheduling={overlap}: {reason}")
    return SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        policy=args.scheduling_policy,
        priority_aging_seconds=args.priority_aging_seconds,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        async_scheduling=overlap,
        stream_interval=args.stream_interval,
        max_num_queued_reqs=args.max_num_queued_reqs or (MAX_QUEUED_IN_A_SERVER if usage == "server" else None),
        max_num_queued_tokens=args.max_num_queued_tokens,
        max_encoder_len=max_encoder_len,
    )


def _logits_processors(args: EngineArgs, plugins: Collection[str], usage: Usage, notes: list[str]) -> list[str]:
    given = [str(name) for name in args.logits_processors]
    for name in given:
        if usage != "llm" and is_local(name):
            raise ConfigError(
                f"the logits processor {name} is defined in this script, which the engine's own process cannot import; "
                "move it to a module.",
                param="logits_processors",
            )
    found = list(dict.fromkeys([*plugins, *given]))
    if plugins:
        notes.append(f"logits_processors: plugins bring {', '.join(plugins)}")
    return found


def _trim_cache(
    args: EngineArgs,
    cache_bytes: int | None,
    text: HFConfig,
    dtype: str,
    block_size: int,
    scheduler: SchedulerConfig,
    notes: list[str],
) -> int | None:
    """Cut a default cache to what every row at full length could use: more would be allocated for nothing."""
    if cache_bytes is None or args.kv_cache_memory_bytes is not None:
        return cache_bytes
    whole_blocks = -(-scheduler.max_model_len // block_size) * block_size
    # A chunk and its window may lie across the borders of two blocks more.
    chunk = scheduler.max_num_batched_tokens + 2 * block_size
    one_request = model_rules.kv_bytes(text, dtype, whole_blocks, chunk)
    null_block = model_rules.kv_bytes(text, dtype, block_size, block_size)
    useful = one_request * scheduler.max_num_seqs + null_block
    if useful < cache_bytes:
        notes.append(f"kv_cache_memory_bytes={useful}: enough for {scheduler.max_num_seqs} requests of full length")
    return min(useful, cache_bytes)


def _model_impl(args: EngineArgs, hf: HFConfig, native: Collection[str], notes: list[str]) -> str:
    is_native = hf.architecture in native
    if args.model_impl in ("octavo", "vllm") and not is_native:
        raise ConfigError(
            f"model_impl={args.model_impl}, but Octavo has no model file for {hf.architecture}; use "
            f"model_impl=transformers, or a model of {', '.join(sorted(native))}.",
            param="model_impl",
        )
    if args.model_impl == "transformers" or not is_native:
        if args.model_impl == "auto":
            notes.append(f"model_impl=transformers: Octavo has no model file of its own for {hf.architecture}")
        return "transformers"
    if hf.text() is not hf:
        notes.append(f"{hf.architecture}: its text part alone is run, and reads nothing but text")
    return "octavo"


def _sampling_defaults(args: EngineArgs, generation: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    own = {} if args.generation_config in NEUTRAL_GENERATION_CONFIG else model_rules.sampling_defaults(generation)
    defaults = model_rules.check_sampling_defaults(
        own | model_rules.sampling_overrides(args.override_generation_config)
    )
    if defaults:
        shown = ", ".join(f"{key}={value}" for key, value in defaults.items())
        notes.append(f"default sampling parameters: {shown} (generation_config=octavo turns the model's off)")
    return defaults


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
