"""`Worker`: brings one device up in order — model, memory plan, KV cache, graphs — and then runs steps."""

import time
from collections.abc import Callable
from typing import Any

import torch

from octavo import ops
from octavo.config.engine import EngineConfig
from octavo.config.hf import HFConfig
from octavo.errors import ConfigError
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.build import attention_layers, materialise, process_after_loading
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear, LinearMethod
from octavo.layers.moe.experts import Experts
from octavo.layers.quantization import choose_method
from octavo.layers.ssm.state import row_states
from octavo.loader import load_model
from octavo.logger import get_logger
from octavo.models.registry import model_class
from octavo.ops.registry import REGISTRY, force_providers
from octavo.ops.triton_compile import KernelCompiler
from octavo.ops.triton_support import has_triton
from octavo.ops.triton_utils import record_launches
from octavo.platforms import get_platform
from octavo.types.kv_spec import CrossAttentionSpec, KVCacheConfig, KVGroup, KVSpec, max_blocks_held
from octavo.types.sampling_params import SamplingParams
from octavo.types.step import NewRow, SchedulerOutput, TokenMasks
from octavo.worker.compile import compile_blocks
from octavo.worker.cpu_programs import CpuPrograms
from octavo.worker.custom_logits import make_custom_processors, validate_params
from octavo.worker.graphs import DecodeGraphs
from octavo.worker.input_batch import InputBatch
from octavo.worker.memory import (
    MemoryPlan,
    count_blocks,
    kv_cache_bytes,
    measure_working_bytes,
    weight_bytes,
    zero_bytes,
)
from octavo.worker.model_runner import ModelRunner, StepHandle
from octavo.worker.pooling_model import load_dense, pooling_class
from octavo.worker.pooling_runner import PoolingRunner
from octavo.worker.profiler import WorkerProfiler, add_layer_ranges
from octavo.worker.rows import Rows
from octavo.worker.sampler import Sampler
from octavo.worker.sleep import HostWeights, release_memory

logger = get_logger(__name__)

# The CPU's worst step is measured on a fraction of its tokens and scaled: running it whole would take seconds of the start.
CPU_MEASURED_TOKENS = 16

# Bytes left free on a GPU for the memory of captured graphs.
GRAPH_RESERVE = 1 << 30

# Token counts of mixed steps that between them meet every kernel the linears choose by the number of tokens.
MIXED_STEP_TOKENS = (1, 2, 16, 32, 64, 128, 256, 1024)

# Sampling parameters that between them use every kernel a plain greedy step does without.
SAMPLING_EXTRAS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.1),
)


class Worker:
    """One device. Call in order: load_model, kv_specs, plan_memory, initialize_kv_cache, warm_up; then execute."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.device = torch.device(config.device.device)
        self.dtype = getattr(torch, config.model.dtype)
        self.model: Any = None
        self._profiler = None if config.profiler is None else WorkerProfiler(config.profiler, self.device)
        self._host_weights: HostWeights | None = None  # while the model's own are away
        self._kv: KVCacheConfig
        self.runner: ModelRunner | PoolingRunner
        self.rows: Rows
        if config.device.num_threads:
            torch.set_num_threads(config.device.num_threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        ops.load_providers(self.device.type)
        force_providers(config.compilation.op_providers, config.compilation.attention_backend)
        self.custom_processors = make_custom_processors(config, self.device)
        self._kernel_compiler = self._make_kernel_compiler()
        total, free = self._device_memory()
        self._taken_at_start = total - free  # by other processes, which have shares of their own, and by the driver

    def _make_kernel_compiler(self) -> KernelCompiler | None:
        if self.device.type != "cuda" or torch.version.hip or not has_triton():
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        return KernelCompiler(major * 10 + minor)

    @torch.no_grad()
    def load_model(self) -> None:
        """Build the model and fill it from the checkpoint."""
        model, load, pooling = self.config.model, self.config.load, self.config.pooling
        # The table of positions must cover the served context, which may be longer than the trained one.
        hf_config = HFConfig({**model.hf_config.data, "max_model_len": model.max_model_len})
        if pooling is not None:
            hf_config = HFConfig({**hf_config.data, "num_labels": len(pooling.labels)})
        make: Callable[[HFConfig], Any] = model_class(model.architecture, model.model_impl, pools=pooling is not None)
        self._method = choose_method(load, getattr(make, "packing", {}))
        if pooling is not None:
            make = pooling_class(make, pooling)
        self.model = materialise(lambda: make(hf_config), self._method_for, self.dtype, self.device)
        if model.model_impl == "transformers":
            said = self.model.load_checkpoint(model.path, load.load_format, self._method_for, self.dtype, self.device)
            logger.info("%s", said)
        else:
            load_model(self.model, load, model.path, dtype=self.dtype, device=self.device, seed=model.seed)
        if pooling is not None and pooling.dense:
            self.model.projection = load_dense(pooling, self.device)
        process_after_loading(self.model)
        if self.config.compilation.compiles_blocks:
            compile_blocks(self.model)
        if self.config.cache.kv_cache_dtype == "fp8_e4m3":
            layers = [layer for layer in self.model.modules() if isinstance(layer, PagedAttention)]
            stored = sum(layer.has_stored_scales for layer in layers)
            logger.info(
                "8-bit KV cache: %d of %d layers have scales in the checkpoint, the others 1", stored, len(layers)
            )
        if self.config.observability.layerwise_nvtx:
            add_layer_ranges(self.model)

    def _method_for(self, path: str, layer: Linear | Embedding | Experts) -> LinearMethod:
        return self._method.for_layer(path, layer)

    def kv_specs(self) -> dict[str, KVSpec]:
        """What each attention layer keeps, by the layer's path."""
        cache = self.config.cache
        return {
            name: layer.kv_spec(cache.block_size, cache.kv_cache_dtype)
            for name, layer in attention_layers(self.model).items()
        }

    def has_row_states(self) -> bool:
        """Whether some layers are recurrent."""
        return bool(row_states(self.model))

    @torch.inference_mode()
    def plan_memory(self, groups: list[KVGroup]) -> MemoryPlan:
        """Measure the worst step, subtract, and see how many blocks are left."""
        scheduler, cache = self.config.scheduler, self.config.cache
        self._make_runner(KVCacheConfig(2, groups))
        self._compile_kernels()
        weights = weight_bytes(self.model)
        tokens, requests = (
            scheduler.max_num_batched_tokens,
            min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        )
        if self.config.compilation.compiles_blocks:  # before anything is measured
            for num in (1, min(tokens, 2 * requests)):
                self.runner.dummy_step(num, min(num, requests))
        if self.device.type == "cpu":
            part = min(tokens, CPU_MEASURED_TOKENS)
            measured = measure_working_bytes(
                lambda: self.runner.dummy_step(part, max(1, requests * part // tokens)), self.device
            )
            working = measured * tokens // part
        else:
            # Loads the kernels, so that the measured run allocates only what a step needs.
            self.runner.dummy_step(tokens, requests)
            working = measure_working_bytes(lambda: self.runner.dummy_step(tokens, requests), self.device)
        total, free = self._device_memory()
        limit = int(total * cache.memory_utilization)
        states = sum(state.row_bytes for state in row_states(self.model)) * (scheduler.max_num_seqs + 1)
        other = self._runtime_bytes(total, free, weights + states)
        spec = groups[0].spec
        shape = KVCacheConfig(1, groups)
        if cache.num_blocks_override is not None:
            kv_bytes = cache.num_blocks_override * shape.block_bytes
        elif cache.kv_cache_memory_bytes is not None:
            kv_bytes = cache.kv_cache_memory_bytes
        else:
            room = free - working - GRAPH_RESERVE if self.device.type == "cuda" else None
            kv_bytes = kv_cache_bytes(limit, weights + states + working + other, room)
        chunk = scheduler.max_num_batched_tokens
        blocks_per_request = 0
        for group in groups:
            is_cross = isinstance(group.spec, CrossAttentionSpec)
            longest = scheduler.max_encoder_len if is_cross else scheduler.max_model_len
            blocks_per_request += max_blocks_held(group.spec, longest, chunk)
        useful = 1 + scheduler.max_num_seqs * blocks_per_request
        num_blocks = count_blocks(
            kv_bytes,
            shape.block_bytes,
            1 + blocks_per_request,
            lambda got: (
                f"the KV cache gets {kv_bytes:,} bytes, but one request of max_model_len={scheduler.max_model_len} tokens "
                f"needs {(1 + blocks_per_request) * shape.block_bytes:,}; lower --max-model-len to "
                f"{max(got - 1, 0) // len(groups) * spec.block_size} or give it more memory "
                "(--gpu-memory-utilization, --kv-cache-memory-bytes)."
            ),
        )
        if cache.num_blocks_override is None:
            num_blocks = min(num_blocks, useful) if shape.block_bytes else useful
        return MemoryPlan(
            total=total,
            limit=limit,
            weights=weights,
            working=working,
            other=other,
            kv_cache=num_blocks * shape.block_bytes,
            block_bytes=shape.block_bytes,
            block_tokens=spec.block_size,
            num_groups=len(groups),
            num_blocks=num_blocks,
            states=states,
        )

    def _compile_kernels(self) -> None:
        """Note what every kind of step would launch, and have it all compiled before the first one runs."""
        if self._kernel_compiler is None:
            return
        runner, max_tokens = self.runner, self.config.scheduler.max_num_batched_tokens
        requests = min(self.config.scheduler.max_num_seqs, max_tokens)
        with record_launches() as launches:
            for tokens in (*MIXED_STEP_TOKENS, max_tokens):
                tokens = min(tokens, max_tokens)
                runner.dummy_step(tokens, -(-tokens // self.config.model.max_model_len))
            runner.dummy_step(max_tokens, requests)
            runner.dummy_step(requests, requests)
            if isinstance(runner, ModelRunner):
                self._run_decodes(runner)
        self._kernel_compiler.compile(launches)

    def _run_decodes(self, runner: ModelRunner) -> None:
        for size in self._capture_sizes():
            runner.decode_step(size)
        for params in SAMPLING_EXTRAS:
            runner.sampler.add_row(runner.rows.scratch, NewRow(runner.rows.scratch, "", [], 0, 0, params, [], []))
            runner.dummy_step(1, 1)
            runner.sampler.remove_row(runner.rows.scratch)

    def _capture_sizes(self) -> list[int]:
        """Batch sizes whose decode step becomes a CUDA graph."""
        if self.device.type != "cuda" or self.config.compilation.enforce_eager:
            return []
        return [size for size in self.config.compilation.capture_sizes if size <= self.config.scheduler.max_num_seqs]

    def _device_memory(self) -> tuple[int, int]:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return total, free
        platform = get_platform(self.config.device.device)
        return platform.total_memory(), platform.available_memory()

    def _runtime_bytes(self, total: int, free: int, weights: int) -> int:
        """Memory in use that is neither weights nor the step: the libraries' on a GPU, all others' on a CPU; and a reserve."""
        if self.device.type == "cpu":
            return max(total - free - weights, 0)
        held = torch.cuda.memory_reserved(self.device)
        return max(total - free - held - self._taken_at_start, 0) + GRAPH_RESERVE

    def _make_runner(self, kv: KVCacheConfig) -> None:
        """Allocate rows, buffers and cache for `kv`, and point the attention layers at their pages."""
        scheduler, vocab_size = self.config.scheduler, self.config.model.vocab_size
        self.rows = Rows(scheduler.max_num_seqs, scheduler.max_model_len, self.device, scheduler.max_encoder_len)
        self.rows.make_block_tables(kv)
        batch = InputBatch(self.rows, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self._allocate_kv_cache(kv)
        for state in row_states(self.model):
            state.allocate(scheduler.max_num_seqs + 1, self.device)
        if self.config.pooling is not None:
            self.runner = PoolingRunner(self.model, self.config.pooling, self.rows, batch)
            return
        sampler = Sampler(
            scheduler.max_num_seqs + 1,
            vocab_size,
            self.device,
            self.config.model.logprobs_mode,
            self.custom_processors,
        )
        model = self.config.model
        width = model.hf_config.text().hidden_size if model.enable_prompt_embeds else None
        self.runner = ModelRunner(self.model, self.rows, batch, sampler, None, self.dtype, width)

    def _allocate_kv_cache(self, kv: KVCacheConfig) -> None:
        layers = attention_layers(self.model)
        buffers = [zero_bytes(kv.num_blocks * kv.page_bytes, self.device) for _ in range(kv.group_size)]
        for index, group in enumerate(kv.groups):
            spec = group.spec
            dtype = torch.float8_e4m3fn if spec.dtype == "fp8_e4m3" else getattr(torch, spec.dtype)
            for i, name in enumerate(group.layer_names):
                buffer, start = kv.place(group, i)
                pages = buffers[buffer].view(kv.num_blocks, kv.page_bytes)[:, start : start + spec.page_bytes]
                layers[name].group = index
                layers[name].kv_cache = pages.view(dtype).unflatten(1, spec.page_shape)

    @torch.inference_mode()
    def initialize_kv_cache(self, kv: KVCacheConfig) -> None:
        """Allocate the cache the scheduler will hand out."""
        for layer in attention_layers(self.model).values():
            layer.kv_cache = torch.empty(0)  # drop the measuring one first
        self._make_runner(kv)
        self._kv = kv

    def warm_up(self) -> None:
        """Run what would be slow the first time: kernels, then graphs."""
        started = time.perf_counter()
        if self.device.type != "cpu":
            self.runner.dummy_step(1, 1)
        if isinstance(self.runner, ModelRunner):
            self.runner.graphs = self._make_graphs(self.runner)
        logger.info("warm-up took %.2f s", time.perf_counter() - started)
        used = {name: op.chosen() for name, op in sorted(REGISTRY.items()) if op.is_in_use}
        serving = ", ".join(f"{name}={provider}" for name, provider in used.items() if provider != "torch")
        logger.info("operators served by: %s; the others by torch", serving)

    def _make_graphs(self, runner: ModelRunner) -> DecodeGraphs | CpuPrograms | None:
        compilation = self.config.compilation
        if sizes := self._capture_sizes():
            return self._capture(runner, sizes)
        if self.device.type == "cpu" and not compilation.enforce_eager and not compilation.compiles_blocks:
            return CpuPrograms.try_make(runner)
        return None

    def _capture(self, runner: ModelRunner, sizes: list[int]) -> DecodeGraphs | None:
        graphs = DecodeGraphs(runner.decode_step, sizes)
        # Our own models are written to be captured; of others' code it has to be seen.
        wait = graphs.find_wait() if self.config.model.model_impl == "transformers" else None
        if wait is not None:
            logger.warning("no graphs: this model's code waits for the device, at %s", wait)
            return None
        graphs.capture()
        return graphs

    def free_cache(self) -> None:
        """Sleep: let go of the KV cache, and of rows, buffers and graphs with it."""
        runner = vars(self).pop("runner", None)  # none, when making one failed
        if runner is not None:
            runner.graphs = runner.forward_mixed = None  # they hold the runner, and the runner them
        vars(self).pop("rows", None)
        for layer in attention_layers(self.model).values():
            layer.kv_cache = torch.empty(0)
        for state in row_states(self.model):
            state.states = []
        release_memory(self.device)

    def restore_cache(self) -> None:
        """Undo `free_cache`, by the calls of the start."""
        try:
            self.initialize_kv_cache(self._kv)
            self.warm_up()
        except Exception:
            self.free_cache()
            raise

    @torch.no_grad()
    def free_weights(self, level: int) -> None:
        """Sleep: keep the weights in host memory (level 1; on a CPU they are there), or forget them (level 2)."""
        if level == 2:
            self.model = None
        elif self.device.type != "cpu":
            self._host_weights = HostWeights(self.model)
        release_memory(self.device)

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Undo `free_weights`; what was forgotten is read from disk."""
        if self.model is None:
            try:
                self.load_model()
            except Exception:
                self.model = None
                raise
        elif self._host_weights is not None:
            self._host_weights.restore()
            self._host_weights = None

    def reload_weights(self) -> None:
        """Read the weights from disk again, by `collective_rpc`: between waking them and waking the cache."""
        if "runner" in vars(self):
            raise ConfigError("reload_weights needs a sleeping KV cache: sleep(level=2), then wake_up(['weights']).")
        self.free_weights(2)
        self.restore_weights()

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch one step."""
        if self._profiler is not None:
            self._profiler.before_step()
        return self.runner.execute(step)

    def sample(self, masks: TokenMasks) -> None:
        """Launch the rest of the last step, which awaits these."""
        self.runner.sample(masks)

    def start_profile(
        self, prefix: str | None = None, delay_iterations: int | None = None, max_iterations: int | None = None
    ) -> None:
        """Begin a profile as configured; numbers given here come first."""
        self._checked_profiler().start(prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> str | None:
        """End the profile; the file it was written to."""
        return self._checked_profiler().stop()

    def _checked_profiler(self) -> WorkerProfiler:
        if self._profiler is None:
            raise ConfigError("no profiler is configured; set profiler_config, with a torch_profiler_dir.")
        return self._profiler

    def validate_params(self, params: SamplingParams) -> None:
        """Raise ClientError when a custom logits processor cannot take a request."""
        validate_params(self.custom_processors, params)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a worker method by name (collective_rpc)."""
        found = getattr(self, method, None)
        if method.startswith("_") or not callable(found):
            raise ConfigError(f"the worker has no method {method!r}.")
        return found(*args, **kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        """Run `func(model)` (in-process engines only)."""
        return func(self.model)
