"""FP8 in the configuration: which checkpoints and machines are taken, which refused, and with what words."""

import dataclasses
import re
from typing import Any

import pytest

from octavo.config.fp8 import ONLINE, Fp8Scheme, read_fp8_scheme
from octavo.errors import ConfigError
from tests.config.test_resolve import CHECKPOINT, LLAMA, FakeCpu, FakeGpu, decide

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
    activations = None if inputs is None else INPUTS | inputs
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}} | extra


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (FP8, Fp8Scheme("tensor", False, "weight_scale")),
        (FP8 | {"activation_scheme": "static"}, Fp8Scheme("tensor", True, "weight_scale")),
        (FP8 | {"weight_block_size": [128, 128], "fmt": "e4m3"}, Fp8Scheme("block", False, "weight_scale_inv")),
        (FP8 | {"modules_to_not_convert": ["a"]}, Fp8Scheme("tensor", False, "weight_scale", ("a",))),
        (FP8 | {"ignored_layers": ["a"]}, Fp8Scheme("tensor", False, "weight_scale", ("a",))),
        (compressed({}, {}), Fp8Scheme("row", False, "weight_scale")),
        (
            compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}, ignore=["lm_head"]),
            Fp8Scheme("tensor", True, "weight_scale", ("lm_head",)),
        ),
        (
            compressed({"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}),
            Fp8Scheme("block", False, "weight_scale"),
        ),
    ],
)
def test_schemes(config, scheme):
    assert read_fp8_scheme(config) == scheme


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq"}, "quantised (gptq)"),
        ({}, "quantised (?)"),
        (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size=[64, 64]"),
        (FP8 | {"activation_scheme": "static", "weight_block_size": [128, 128]}, "activation_scheme=static"),
        (FP8 | {"fmt": "e5m2"}, "fmt=e5m2"),
        (compressed({"num_bits": 4}, {}), "weights 4-bit float"),
        (compressed({"type": "int"}, {}), "weights 8-bit int"),
        (compressed({}, None), "input_activations absent"),
        (compressed({}, {"strategy": "group", "group_size": 128}), "strategy=group, weights by row"),
        (compressed({"strategy": "group"}, {}), "weights strategy=group"),
        (compressed({}, {}, kv_cache_scheme={"num_bits": 4, "type": "int"}), "kv_cache_scheme of num_bits=4, type=int"),
        (compressed({}, {}) | {"config_groups": {}}, "0 config_groups"),
    ],
)
def test_refused_schemes(config, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_fp8_scheme(config)


def test_ignored_names():
    scheme = Fp8Scheme("row", False, "weight_scale", ("lm_head", "layers.1.mlp", "re:model\\.layers\\.2\\..*q_proj"))
    for name in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.2.self_attn.q_proj"):
        assert scheme.ignores([name])
    for name in ("model.layers.11.mlp.up_proj", "model.layers.2.self_attn.k_proj", "lm_head_2"):
        assert not scheme.ignores([name])
    with pytest.raises(ConfigError, match=r"keeps model\.layers\.2\.self_attn\.q_proj unquantised"):
        scheme.ignores([f"model.layers.2.self_attn.{name}_proj" for name in "qkv"])
    assert not ONLINE.ignores(["model.layers.0.mlp.up_proj"])


class OldGpu(FakeGpu):
    fp8_refusal = "it needs compute capability 8.9, and cuda:0 has 8.0"


def test_asked_for():
    made = decide(FakeGpu(), quantization="fp8").config
    assert (made.load.quantization, made.load.quantization_config, made.model.dtype) == ("fp8", {}, "bfloat16")
    with pytest.raises(ConfigError, match=re.escape("not supported here: it needs compute capability 8.9")):
        decide(OldGpu(), quantization="fp8")
    with pytest.raises(ConfigError, match="run by transformers"):
        decide(FakeGpu(), quantization="fp8", model_impl="transformers")
    slow = decide(FakeCpu(), quantization="fp8")
    assert slow.config.load.quantization == "fp8"
    assert any("very slow" in note for note in slow.decisions)


def test_found_in_the_checkpoint():
    made = decide(FakeGpu(), hf={"quantization_config": FP8}).config
    assert (made.load.quantization, made.load.quantization_config) == ("fp8", FP8)
    both = dataclasses.replace(CHECKPOINT, formats=("safetensors", "gguf"))
    with pytest.raises(ConfigError, match="quantization=gguf, but the checkpoint is FP8"):
        decide(FakeGpu(), hf={"quantization_config": FP8}, quantization="gguf", checkpoint=both)
    with pytest.raises(ConfigError, match=re.escape("quantised (gptq)")):
        decide(FakeGpu(), hf={"quantization_config": {"quant_method": "gptq"}}, quantization="fp8")


def test_memory_is_planned_for_a_byte_a_number():
    """Twice the weights would leave no room on this machine."""

    class Small(FakeCpu):
        memory = 500_000_000  # 135 million parameters are 540 MB in float32

    with pytest.raises(ConfigError, match="the weights take"):
        decide(Small(), dtype="float32")
    tables = 2 * LLAMA["vocab_size"] * LLAMA["hidden_size"]
    expected = tables * 4 + 135_000_000 - tables
    made = decide(Small(), dtype="float32", quantization="fp8").config
    assert made.cache.kv_cache_memory_bytes == (Small.memory - expected) // 2
