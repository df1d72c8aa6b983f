"""`resolve`: each "auto", each refused combination, on made-up machines and models; no file and no device is touched."""

import dataclasses
import re
from typing import Any

import msgspec
import pytest

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.engine import EngineConfig, ProfilerConfig, SupervisionConfig
from octavo.config.hf import HFConfig
from octavo.config.resolve import Resolved, resolve
from octavo.errors import ConfigError
from octavo.platforms.base import BatchDefaults, Platform

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
KV_BYTES_PER_TOKEN_FP32 = 2 * 3 * 64 * 4 * 30


class FakeCpu(Platform):
    name = "cpu"
    device = "cpu"
    default_block_size = 32
    default_async_scheduling = False
    default_memory_utilization = None
    supports_graphs = False
    supported_dtypes = ("float32", "bfloat16", "float16")
    preferred_dtype = "float32"
    memory = 16 * GIB

    @classmethod
    def is_available(cls) -> bool:
        return True

    def total_memory(self) -> int:
        return self.memory

    def available_memory(self) -> int:
        return self.memory

    def batch_defaults(self, usage: str) -> BatchDefaults:
        return BatchDefaults(4096, 256) if usage == "llm" else BatchDefaults(2048, 128)


class FakeGpu(FakeCpu):
    name = "cuda"
    device = "cuda:0"
    default_block_size = 64
    default_async_scheduling = True
    default_memory_utilization = 0.92
    supports_graphs = True
    supported_dtypes = ("bfloat16", "float16", "float32")
    preferred_dtype = "bfloat16"
    memory = 80 * GIB

    def batch_defaults(self, usage: str) -> BatchDefaults:
        return BatchDefaults(16384 if usage == "llm" else 8192, 1024)


CHECKPOINT = Checkpoint(path="/m", formats=("safetensors",), num_parameters=135_000_000)


def decide(
    platform: Platform | None = None,
    *,
    hf: dict[str, Any] | None = None,
    checkpoint: Checkpoint = CHECKPOINT,
    generation: dict[str, Any] | None = None,
    usage: Any = "server",
    chat_template: str | None = None,
    **args: Any,
) -> Resolved:
    return resolve(
        EngineArgs(model="m", **args),
        HFConfig(LLAMA | (hf or {})),
        platform or FakeCpu(),
        checkpoint=checkpoint,
        generation_config=generation,
        native_architectures={"LlamaForCausalLM"},
        chat_template=chat_template,
        usage=usage,
    )


def config(*positional: Any, **keywords: Any) -> EngineConfig:
    return decide(*positional, **keywords).config


def refused(message: str, **keywords: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        decide(**keywords)


def test_the_result_is_frozen_plain_data_that_msgpack_carries():
    made = config()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=EngineConfig) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.model.dtype = "float16"  # type: ignore[misc]


def test_defaults_on_a_cpu():
    made = config()
    assert (made.model.dtype, made.model.max_model_len, made.model.model_impl) == ("float32", 8192, "octavo")
    assert (made.cache.block_size, made.cache.kv_cache_dtype, made.cache.enable_prefix_caching) == (32, "float32", True)
    assert (made.scheduler.max_num_batched_tokens, made.scheduler.max_num_seqs) == (2048, 128)
    assert (made.scheduler.async_scheduling, made.compilation.capture_sizes) == (False, [])
    assert not made.compilation.enforce_eager
    assert made.cache.kv_cache_memory_bytes == 4 * GIB
    assert made.model.served_model_names == ["m"]
    assert made.tokenizer.path == "/m"


def test_defaults_on_a_gpu():
    made = config(FakeGpu())
    assert (made.model.dtype, made.cache.block_size, made.scheduler.async_scheduling) == ("bfloat16", 64, True)
    assert (made.cache.memory_utilization, made.cache.kv_cache_memory_bytes) == (0.92, None)
    sizes = made.compilation.capture_sizes
    assert sizes[:4] == [1, 2, 4, 8] and sizes[-1] == 512 and sizes == sorted(set(sizes))
    assert not made.compilation.enforce_eager
    assert config(FakeGpu(), max_num_seqs=5).compilation.capture_sizes == [1, 2, 4, 5]


def test_llm_and_server_have_different_batches():
    assert config(usage="llm").scheduler.max_num_batched_tokens == 4096
    assert config(FakeGpu(), usage="llm").scheduler.max_num_batched_tokens == 16384


def test_every_choice_is_written_down_with_its_reason():
    lines = decide(generation={"temperature": 0.6}).decisions
    for start in ("dtype=float32: ", "max_model_len=8192: ", "max_num_batched_tokens=2048: ", "max_num_seqs=128: "):
        assert any(line.startswith(start) and len(line) > len(start) + 10 for line in lines), start
    assert any("temperature=0.6" in line for line in lines)
    explicit = decide(
        dtype="float32", max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4, async_scheduling=True,
        kv_cache_memory_bytes=GIB,
    )  # fmt: skip
    assert explicit.decisions == []


@pytest.mark.parametrize(
    ("platform", "stored", "expected"),
    [
        (FakeCpu(), "float32", "float32"),
        (FakeCpu(), "bfloat16", "float32"),
        (FakeCpu(), "quantised", "float32"),
        (FakeGpu(), "float32", "bfloat16"),
        (FakeGpu(), "float16", "float16"),
        (FakeGpu(), "quantised", "bfloat16"),
    ],
)
def test_dtype_auto(platform, stored, expected):
    checkpoint = dataclasses.replace(CHECKPOINT, stored_dtype=stored)
    assert config(platform, checkpoint=checkpoint).model.dtype == expected


def test_dtype_auto_on_a_cpu_that_likes_bfloat16_or_lacks_memory():
    fast = FakeCpu()
    fast.preferred_dtype = "bfloat16"
    assert config(fast).model.dtype == "bfloat16"
    assert config(fast, checkpoint=dataclasses.replace(CHECKPOINT, stored_dtype="float32")).model.dtype == "float32"
    large = dataclasses.replace(CHECKPOINT, num_parameters=4_000_000_000)
    assert config(checkpoint=large).model.dtype == "bfloat16"
    old_gpu = FakeGpu()
    old_gpu.supported_dtypes, old_gpu.preferred_dtype = ("float16", "float32"), "float16"
    assert config(old_gpu).model.dtype == "float16"


def test_dtype_names_and_refusals():
    assert config(dtype="half").model.dtype == "float16"
    assert config(dtype="float").cache.kv_cache_dtype == "float32"
    old_gpu = FakeGpu()
    old_gpu.supported_dtypes, old_gpu.preferred_dtype = ("float16", "float32"), "float16"
    refused("dtype=bfloat16 is not supported on cuda; use float16 or float32", platform=old_gpu, dtype="bfloat16")
    refused("kv_cache_dtype=float16 with dtype=float32", kv_cache_dtype="float16")


def test_fp8_kv_cache():
    made = decide(FakeGpu(), kv_cache_dtype="fp8")
    assert made.config.cache.kv_cache_dtype == "fp8_e4m3" and made.config.model.dtype == "bfloat16"
    on_cpu = decide(kv_cache_dtype="fp8_e4m3")
    assert on_cpu.config.cache.kv_cache_dtype == "fp8_e4m3"
    assert any("by the reference operators" in note for note in on_cpu.decisions)
    refused("kv_cache_dtype=fp8_e5m2 is not supported here: E4M3 keeps a bit more", kv_cache_dtype="fp8_e5m2")
    refused("cached latents keep the model's data type", kv_cache_dtype="fp8", hf={"kv_lora_rank": 512})

    class OldGpu(FakeGpu):
        fp8_refusal = "it needs compute capability 8.9"

    refused("kv_cache_dtype=fp8 is not supported here: it needs", platform=OldGpu(), kv_cache_dtype="fp8")


def test_batch_invariant():
    made = decide(FakeGpu(), batch_invariant=True, kv_cache_dtype="fp8")
    chosen = made.config.compilation.op_providers
    assert chosen["linear"] == chosen["paged_attention"] == chosen["decode_attention"] == "triton_invariant"
    assert any("batch_invariant: linear=triton_invariant" in note for note in made.decisions)
    assert config(batch_invariant=True).compilation.op_providers["linear"] == "by_row"
    assert config(batch_invariant=False).compilation.op_providers == {}
    gpu = FakeGpu()
    for message, options in (
        ("op_providers chooses others", {"op_providers": {"*": "torch"}}),
        ("attention_backend=sdpa chooses another", {"attention_backend": "sdpa"}),
        ("products in fp8 are chosen by the number of tokens", {"quantization": "fp8"}),
        ("LlamaForCausalLM is run by transformers' modules", {"model_impl": "transformers"}),
        ("experts are computed for all their tokens at once", {"hf": {"num_experts": 8}}),
        ("latent attention has no such operators yet", {"hf": {"kv_lora_rank": 512}}),
        ("recurrent layers compute in chunks", {"hf": {"mamba_d_state": 128}}),
        ("compiled blocks choose their own kernels", {"compile": True}),
    ):
        refused(f"batch_invariant is not supported here: {message}", platform=gpu, batch_invariant=True, **options)
    stored = dataclasses.replace(CHECKPOINT, formats=("gguf",), stored_dtype="quantised")
    refused("use dtype=float32 to decode them", checkpoint=stored, batch_invariant=True)
    assert config(checkpoint=stored, batch_invariant=True, dtype="float32").load.quantization is None


def test_context_that_fits_doubles_with_an_fp8_kv_cache():
    room = 1000 * KV_BYTES_PER_TOKEN_FP32
    whole = config(kv_cache_memory_bytes=room, block_size=16, max_model_len=-1).model.max_model_len
    halved = config(kv_cache_memory_bytes=room, block_size=16, max_model_len=-1, kv_cache_dtype="fp8")
    # Next to the null block: 1000 tokens are 62 whole blocks; in a quarter of the bytes, 250.
    assert (whole, halved.model.max_model_len) == (61 * 16, 249 * 16)


@pytest.mark.parametrize(
    ("platform", "asked", "chosen", "note"),
    [
        (FakeGpu, "auto", "fp8_e4m3", "the checkpoint is made for it"),
        (FakeGpu, "bfloat16", "bfloat16", ""),
        (FakeCpu, "auto", "float32", "which cpu reads slowly"),
    ],
)
def test_kv_cache_of_a_checkpoint_made_for_fp8(platform, asked, chosen, note):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    stored = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }
    made = decide(platform(), hf={"quantization_config": stored}, kv_cache_dtype=asked)
    assert made.config.cache.kv_cache_dtype == chosen
    assert any(note in line for line in made.decisions)


def test_context_from_the_model_and_from_rope_scaling():
    assert config(hf={"max_position_embeddings": None}).model.max_model_len == 2048
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert config(hf={"rope_scaling": yarn}).model.max_model_len == 16384
    assert config(hf={"rope_scaling": {"type": "linear", "factor": 2.0}}).model.max_model_len == 16384
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024}
    assert config(hf={"rope_scaling": llama3}).model.max_model_len == 8192
    assert config(hf={"sliding_window": 1024}).model.max_model_len == 8192
    assert config(hf={"sliding_window": 1024}, disable_sliding_window=True).model.max_model_len == 1024


def test_context_longer_than_the_model_is_refused_unless_overridden():
    refused("max_model_len=10000 is more than the 8192 tokens the model is made for", max_model_len=10000)
    refused("hf_overrides", max_model_len=10000)
    refused("max_model_len=0", max_model_len=0)
    assert config(max_model_len=10000, hf_overrides={"max_position_embeddings": 10000}).model.max_model_len == 10000
    assert config(max_model_len=100).scheduler.max_model_len == 100


def test_context_is_cut_to_what_the_cache_holds_and_says_so():
    small = 1000 * KV_BYTES_PER_TOKEN_FP32
    made = decide(kv_cache_memory_bytes=small)
    # 1000 tokens are 31 whole blocks of 32, of which one is the null block.
    assert made.config.model.max_model_len == 30 * 32
    assert any(line.startswith("max_model_len=960: a KV cache of") for line in made.decisions)
    assert config(kv_cache_memory_bytes=small, max_model_len="auto").model.max_model_len == 960
    assert config(kv_cache_memory_bytes=small, max_model_len=-1).model.max_model_len == 960
    # Asked for by number, it stays: a request that can never fit is refused at the door.
    assert config(kv_cache_memory_bytes=small, max_model_len=2048).model.max_model_len == 2048
    refused("holds not one block", kv_cache_memory_bytes=1000)


def test_windowed_layers_need_less_cache():
    room = 1200 * KV_BYTES_PER_TOKEN_FP32
    hf = {"sliding_window": 512, "layer_types": ["sliding_attention"] * 29 + ["full_attention"]}
    assert config(hf=hf, kv_cache_memory_bytes=room).model.max_model_len == 8192
    assert config(kv_cache_memory_bytes=room).model.max_model_len < 1200


def test_default_cpu_cache_is_modest_and_not_larger_than_useful():
    tight = FakeCpu()
    tight.memory = 2 * GIB
    weights = 135_000_000 * 4
    assert config(tight).cache.kv_cache_memory_bytes == (2 * GIB - weights) // 2
    few = config(max_model_len=64, max_num_seqs=2).cache.kv_cache_memory_bytes
    assert few == (2 * 64 + 32) * KV_BYTES_PER_TOKEN_FP32
    tight.memory = 100 << 20
    refused("the weights take", platform=tight, dtype="float32")
    assert config(gpu_memory_utilization=0.5).cache.kv_cache_memory_bytes is None
    assert config(num_gpu_blocks_override=50).cache.num_blocks_override == 50


def test_one_way_to_size_the_cache():
    refused("all size the KV cache", kv_cache_memory_bytes=GIB, gpu_memory_utilization=0.5)
    refused("all size the KV cache", kv_cache_memory_bytes=GIB, num_gpu_blocks_override=10)
    refused("block_size=48 is not a power of two", block_size=48)


def test_budget_and_rows_fit_each_other():
    assert config(max_num_batched_tokens=16).scheduler.max_num_seqs == 16
    assert config(max_num_seqs=4000).scheduler.max_num_batched_tokens == 4000
    assert config(max_model_len=8, max_num_seqs=4).scheduler.max_num_batched_tokens == 32
    assert config(enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 8192
    refused("max_num_seqs=64 is more than max_num_batched_tokens=32", max_num_seqs=64, max_num_batched_tokens=32)
    refused("is less than max_model_len=8192", enable_chunked_prefill=False, max_num_batched_tokens=4096)
    refused("enable_chunked_prefill=False forbids", enable_chunked_prefill=False, long_prefill_token_threshold=64)


@pytest.mark.parametrize("size", [2, 4, 9])
def test_tensor_parallel_sizes_that_do_not_divide_are_refused_with_the_legal_ones(size):
    refused(
        f"tensor_parallel_size={size} does not divide num_attention_heads=9 and num_key_value_heads=3; use 1 or 3.",
        tensor_parallel_size=size,
    )


@pytest.mark.parametrize(
    "args", [{"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}]
)
def test_parallel_sizes_are_not_supported_yet(args):
    refused(f"{next(iter(args))}={next(iter(args.values()))} is not supported yet", **args)


def test_model_implementation():
    other = {"architectures": ["GPT2LMHeadModel"]}
    assert config(hf=other).model.model_impl == "transformers"
    assert config(model_impl="transformers").model.model_impl == "transformers"
    assert config(model_impl="vllm").model.model_impl == "octavo"
    refused("Octavo has no model file for GPT2LMHeadModel", hf=other, model_impl="octavo")
    refused("encoder-decoder", hf={"is_encoder_decoder": True})
    refused("quantised (gptq), which is not supported yet", hf={"quantization_config": {"quant_method": "gptq"}})


def test_load_format():
    both = dataclasses.replace(CHECKPOINT, formats=("safetensors", "pt"))
    assert config(checkpoint=both).load.load_format == "safetensors"
    assert config(checkpoint=both, load_format="pt").load.load_format == "pt"
    gguf = dataclasses.replace(CHECKPOINT, formats=("gguf",))
    assert config(checkpoint=gguf, quantization="gguf").load.load_format == "gguf"
    none = dataclasses.replace(CHECKPOINT, formats=())
    assert config(checkpoint=none, load_format="dummy").load.load_format == "dummy"
    refused("/m holds no weights", checkpoint=none)
    refused("load_format=gguf, but /m holds safetensors", load_format="gguf")
    refused("contradict each other", quantization="gguf", load_format="pt")


def test_sampling_defaults_come_from_the_model_and_can_be_turned_off():
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 7,
        "do_sample": True,
        "pad_token_id": 1,
    }
    assert config(generation=generation).model.default_sampling_params == {
        "temperature": 0.6,
        "top_k": 20,
        "max_tokens": 7,
    }
    for neutral in ("octavo", "vllm"):
        assert config(generation=generation, generation_config=neutral).model.default_sampling_params == {}
    mixed = config(generation=generation, override_generation_config={"top_k": 5, "min_p": 0.1})
    assert mixed.model.default_sampling_params["top_k"] == 5
    assert mixed.model.default_sampling_params["min_p"] == 0.1
    refused("override_generation_config has topk", override_generation_config={"topk": 5})
    refused("top_p=3.0 is not allowed", generation={"top_p": 3.0})


def test_eos_ids_are_those_of_both_files():
    assert config(generation={"eos_token_id": [7, 2]}).model.eos_token_ids == [7, 2]
    assert config(generation={"eos_token_id": 7}).model.eos_token_ids == [7, 2]
    assert config(generation={"eos_token_id": 7}, generation_config="octavo").model.eos_token_ids == [7, 2]
    assert config(hf={"eos_token_id": None}).model.eos_token_ids == []


def test_overrides_are_merged_key_by_key():
    hf = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}}
    made = config(hf=hf, hf_overrides={"rope_scaling": {"factor": 8.0}})
    assert made.model.max_model_len == 32768
    assert made.model.hf_config.data["rope_scaling"]["rope_type"] == "yarn"


def test_tokenizer_options():
    assert config(skip_tokenizer_init=True).tokenizer.path is None
    made = config(tokenizer="t", checkpoint=dataclasses.replace(CHECKPOINT, tokenizer_path="/t"), chat_template="x")
    assert (made.tokenizer.path, made.tokenizer.chat_template) == ("/t", "x")
    refused("skip_tokenizer_init and tokenizer contradict", skip_tokenizer_init=True, tokenizer="t")
    refused("served_model_name needs", served_model_name=[])


def test_profiling():
    assert config().profiler is None
    folder = {"torch_profiler_dir": "/t"}
    assert config(profiler_config={**folder, "torch_profiler_with_stack": False}).profiler == ProfilerConfig(
        "/t", False
    )
    assert config(FakeGpu(), profiler_config={"profiler": "cuda", "max_iterations": 3}).profiler == ProfilerConfig(
        max_iterations=3
    )
    refused("names no torch_profiler_dir", profiler_config={"max_iterations": 3})
    refused("needs an NVIDIA GPU", profiler_config={"profiler": "cuda"})
    refused("leave torch_profiler_dir out", platform=FakeGpu(), profiler_config={"profiler": "cuda", **folder})
    refused("use torch or cuda", profiler_config={"profiler": "proton", **folder})
    refused("has proto, which is not known", profiler_config={"proto": 1, **folder})
    for key, value, wanted in (
        ("torch_profiler_dir", "", "a folder"),
        ("delay_iterations", -1, "a number of steps"),
        ("max_iterations", True, "a number of steps"),
        ("torch_profiler_use_gzip", "yes", "true or false"),
    ):
        refused(f"{key}={value!r} must be {wanted}", profiler_config={**folder, key: value})
    made = config(FakeGpu(), enable_layerwise_nvtx_tracing=True, enforce_eager=True).observability
    assert made.nvtx and made.layerwise_nvtx
    refused("add enforce_eager", platform=FakeGpu(), enable_layerwise_nvtx_tracing=True)
    refused("needs an NVIDIA GPU", enable_nvtx_tracing=True)


def test_compilation():
    sizes = {"cudagraph_capture_sizes": [8, 1, 2000]}
    assert config(FakeGpu(), compilation_config=sizes, max_num_seqs=600).compilation.capture_sizes == [1, 8]
    assert config(FakeGpu(), enforce_eager=True).compilation.enforce_eager
    assert config(FakeGpu(), optimization_level=0).compilation.capture_sizes == []
    refused("cpu has no graphs", compilation_config=sizes)
    refused("enforce_eager", platform=FakeGpu(), compilation_config=sizes, enforce_eager=True)
    refused("compilation_config has passes", compilation_config={"passes": 1})
    refused("mode=4 is not known", compilation_config={"mode": 4})
    refused("cudagraph_mode='PIECEWISE' is not known", compilation_config={"cudagraph_mode": "PIECEWISE"})
    none = {"cudagraph_mode": "NONE"}
    assert (
        config(FakeGpu(), compilation_config=none).compilation.capture_sizes == config().compilation.capture_sizes == []
    )
    refused("cudagraph_mode is NONE", platform=FakeGpu(), compilation_config={**none, **sizes})
    assert not config().compilation.compiles_blocks
    for ask in ({"compile": True}, {"optimization_level": 3}, {"compilation_config": {"mode": 1}}):
        assert config(**ask).compilation.compiles_blocks and config(FakeGpu(), **ask).compilation.capture_sizes
        refused("contradict", **ask, enforce_eager=True)
        refused("quantization=fp8", platform=FakeGpu(), **ask, quantization="fp8")
    refused("must hold positive integers", platform=FakeGpu(), compilation_config={"cudagraph_capture_sizes": [0]})
    assert config(op_providers={"*": "torch"}).compilation.op_providers == {"*": "torch"}


def test_supervision_is_for_cores_with_a_process_of_their_own():
    assert config().supervision == SupervisionConfig(max_restarts=5, stall_seconds=120.0)
    made = config(max_engine_restarts=0, engine_stall_timeout=7)
    assert made.supervision == SupervisionConfig(max_restarts=0, stall_seconds=7.0)
    refused("nobody is left to restart it", usage="llm", max_engine_restarts=3)
    refused("engine_stall_timeout=9.0 needs a core", usage="llm", engine_stall_timeout=9.0)


def test_the_queue_of_a_server_is_bounded():
    assert config().scheduler.max_num_queued_reqs == 16384
    assert config(usage="llm").scheduler.max_num_queued_reqs is None
    assert config(max_num_queued_reqs=7).scheduler.max_num_queued_reqs == 7
    assert config(usage="llm", max_num_queued_reqs=7).scheduler.max_num_queued_reqs == 7


def test_transformers_models_are_captured_like_others():
    assert 256 in config(FakeGpu(), hf={"architectures": ["OtherForCausalLM"]}).compilation.capture_sizes
