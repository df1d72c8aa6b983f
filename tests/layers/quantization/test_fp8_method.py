"""FP8 weights in a whole model: rounded while loading, and from checkpoints of every kind, written here.

The oracle is a float32 model of the numbers the FP8 weights stand for, whose linears round their inputs: the loaded weights
must be those numbers exactly, and the logits its logits. Without the rounding they must still be near.
"""

import json
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.engine import LoadConfig
from octavo.config.hf import HFConfig
from octavo.errors import ConfigError, LoadError
from octavo.layers.build import materialise, process_after_loading
from octavo.layers.causal_lm import CausalLM
from octavo.layers.linear import Linear, UnquantizedMethod
from octavo.layers.quantization import choose_method
from octavo.layers.quantization.fp8 import Fp8Method
from octavo.loader import load_model
from octavo.models.registry import model_class
from octavo.ops.linear.fp8 import BLOCK, FP8, FP8_MAX, dequantize_weight
from tests.fixtures.checkpoints import llama_config, llama_shapes, write_checkpoint, write_random_llama
from tests.models.harness import PagedRun

# Every shard is whole blocks; with 64-wide keys and values it is not.
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 2, "num_hidden_layers": 2}
PACKING = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load(folder: Path, quantization: str | None, load_format: str = "safetensors") -> CausalLM:
    """A model as the worker builds it, in float32."""
    config = HFConfig.from_file(folder)
    stored = config.get("quantization_config", {}) if quantization else {}
    how = LoadConfig(load_format, quantization=quantization, quantization_config=stored, use_tqdm=False)
    make, device = model_class("LlamaForCausalLM", "octavo"), torch.device("cpu")
    method = choose_method(how, make.packing)
    model = materialise(lambda: make(config), method.for_layer, torch.float32, device)
    load_model(model, how, str(folder), dtype=torch.float32, device=device)
    process_after_loading(model)
    return model


def logits(model: CausalLM) -> torch.Tensor:
    """Of 12 tokens, prefilled at once."""
    ids = torch.randint(3, 200, (12,), generator=torch.Generator().manual_seed(0))
    return PagedRun(model, 1, 16).step({0: ids})[0]


class RoundingMethod(UnquantizedMethod):
    """Floating point weights, inputs rounded as a checkpoint's scheme says."""

    def __init__(self, group: int | None = None, scale: float | None = None):
        self.group, self.scale = group, scale

    def apply(self, layer, x, norm, activation, residual, scale):
        x = x if norm is None else norm(x)
        groups = x.view(x.shape[0], -1, self.group or x.shape[1])
        step = groups.abs().amax(-1, keepdim=True) / FP8_MAX if self.scale is None else torch.tensor(self.scale)
        rounded = (groups / step).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * step
        return super().apply(layer, rounded.view(x.shape), None, activation, residual, scale)


def round_inputs(oracle: CausalLM, group: int | None = None, scales: dict[str, float] | None = None) -> CausalLM:
    """Let the oracle's linears, but not its head, round their inputs; `scales` by the layer's path."""
    for path, layer in oracle.named_modules():
        if isinstance(layer, Linear) and path != "lm_head":
            layer.method = RoundingMethod(group, None if scales is None else scales[path])
    return oracle


# Equal, as a rule; float32 sums in another order may carry an input over to the next 8-bit float. Unrounded inputs are
# 0.07 and more apart.
ONE_STEP = 0.04


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def numbers(layer: Linear) -> torch.Tensor:
    """What a layer's weight stands for."""
    if layer.weight.dtype != FP8:
        return layer.weight.data
    return dequantize_weight(layer.weight, layer.weight_scale)


def quantize(weight: torch.Tensor, scales: str) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers and scales as checkpoints have them."""
    if scales == "tensor":
        scale = weight.abs().max() / FP8_MAX
        return (weight / scale).to(FP8), scale
    if scales == "row":
        scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
        return (weight / scale).to(FP8), scale
    rows, columns = (-(-size // BLOCK) * BLOCK for size in weight.shape)
    padded = torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))
    scale = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).abs().amax((1, 3)) / FP8_MAX
    return (weight / dequantize_weight(torch.ones_like(weight), scale)).to(FP8), scale


def compressed(strategy: str, *, dynamic: bool, **extra) -> dict:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": dynamic}
    inputs["strategy"] = "token" if dynamic else "tensor"
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        inputs |= {"strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | extra


# name → (quantization_config, what shares a scale, the scale's name, whether activations have one)
KINDS = {
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "tensor", "weight_scale", False),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "weight_scale", True),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "block",
        "weight_scale_inv",
        False,
    ),
    "compressed-tensor": (compressed("tensor", dynamic=False), "tensor", "weight_scale", True),
    "compressed-channel": (compressed("channel", dynamic=True), "row", "weight_scale", False),
    "compressed-block": (compressed("block", dynamic=True), "block", "weight_scale", False),
}


def write_fp8(folder: Path, kind: str, ignored: tuple[str, ...] = (), **overrides) -> tuple[Path, Path]:
    """An FP8 checkpoint and the float32 one it stands for."""
    quantization, scales, scale_name, is_static = KINDS[kind]
    config = llama_config(**(WIDE | overrides))
    rng = torch.Generator().manual_seed(5)
    stored, plain = {}, {}
    for i, (name, shape) in enumerate(llama_shapes(config).items()):
        weight = torch.randn(shape, generator=rng)
        if len(shape) == 1:
            weight = 1 + 0.1 * weight
        elif "embed_tokens" not in name:
            # Shards of one layer differ in size, so that a scale in the wrong place shows.
            weight = weight * ((0.5 + i % 4) / shape[1] ** 0.5)
        stored[name] = plain[name] = weight
        if "proj" in name and not any(part in name for part in ignored):
            quants, scale = quantize(weight, scales)
            stored[name] = quants
            stored[name.removesuffix("weight") + scale_name] = scale
            plain[name] = dequantize_weight(quants, scale[:, 0] if scales == "row" else scale)
            if is_static:
                stored[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.04 * (1 + i % 3)])
    with_ignored = dict(quantization)
    if ignored:
        with_ignored["ignore" if "config_groups" in quantization else "modules_to_not_convert"] = list(ignored)
    write_checkpoint(folder / "fp8", config | {"quantization_config": with_ignored}, stored, tokenizer=False)
    write_checkpoint(folder / "plain", config, plain, tokenizer=False)
    return folder / "fp8", folder / "plain"


def check_same_numbers(model: CausalLM, oracle: CausalLM) -> None:
    layers = dict(oracle.named_modules())
    for path, layer in model.named_modules():
        if isinstance(layer, Linear):
            torch.testing.assert_close(numbers(layer), layers[path].weight.data, rtol=1e-6, atol=0, msg=path)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_checkpoints(kind, tmp_path):
    folder, plain = write_fp8(tmp_path, kind)
    model, oracle = load(folder, "fp8"), load(plain, None)
    check_same_numbers(model, oracle)
    layer = model.model.layers[0].self_attn.qkv_proj
    assert isinstance(layer.method, Fp8Method) and layer.weight.dtype == FP8
    assert layer.weight_scale.shape == ((4, 2) if "block" in kind else (512,))
    assert isinstance(model.lm_head.method, UnquantizedMethod)
    if KINDS[kind][3]:
        # q, k and v have tensors 2, 3 and 4 of the checkpoint: scales 0.12, 0.04 and 0.08.
        torch.testing.assert_close(layer.input_scale.data, torch.tensor(0.12))
    got = logits(model)
    assert error(got, logits(oracle)) < 0.2
    scales = None
    if KINDS[kind][3]:
        scales = {
            p: float(m.input_scale) for p, m in model.named_modules() if getattr(m, "input_scale", None) is not None
        }
    # A number on the edge may be rounded up here and down there.
    assert error(got, logits(round_inputs(oracle, BLOCK if "block" in kind else None, scales))) < ONE_STEP


@torch.inference_mode()
def test_blocks_that_end_inside_a_shard_are_decoded(tmp_path):
    folder, plain = write_fp8(tmp_path, "fp8-block", num_key_value_heads=1)
    model, oracle = load(folder, "fp8"), load(plain, None)
    check_same_numbers(model, oracle)
    block = model.model.layers[0]
    assert isinstance(block.self_attn.qkv_proj.method, UnquantizedMethod)
    assert isinstance(block.mlp.gate_up_proj.method, Fp8Method)
    assert error(logits(model), logits(oracle)) < 0.2


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("fp8-tensor", "model.layers.1.mlp.down_proj"),
        ("compressed-channel", "re:.*down_proj"),
        ("compressed-channel", "down_proj"),
    ],
)
def test_ignored_layers_keep_their_numbers(kind, entry, tmp_path):
    ignored = ("layers.1.mlp.down_proj",) if "layers" in entry else ("down_proj",)
    folder, plain = write_fp8(tmp_path, kind, ignored)
    config = json.loads((folder / "config.json").read_text())
    key = "ignore" if "compressed" in kind else "modules_to_not_convert"
    config["quantization_config"][key] = [entry]
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, "fp8")
    assert isinstance(model.model.layers[1].mlp.down_proj.method, UnquantizedMethod)
    assert isinstance(model.model.layers[0].mlp.down_proj.method, Fp8Method) == ("layers" in entry)
    check_same_numbers(model, load(plain, None))


def test_part_of_a_packed_layer_cannot_be_ignored(tmp_path):
    folder, _ = write_fp8(tmp_path, "fp8-tensor", ("k_proj",))
    with pytest.raises(ConfigError, match=r"keeps model\.layers\.0\.self_attn\.k_proj unquantised"):
        load(folder, "fp8")


def test_unlisted_floating_point_weights_are_an_error(tmp_path):
    folder, plain = write_fp8(tmp_path, "fp8-tensor")
    (folder / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match=r"expects torch\.float8_e4m3fn, the checkpoint has"):
        load(folder, "fp8")


@torch.inference_mode()
def test_online_rounds_each_row_as_it_arrives(tmp_path):
    folder = write_random_llama(tmp_path / "plain", dtype="bfloat16", tokenizer=False)
    model, oracle = load(folder, "fp8"), load(folder, None)
    plain = dict(oracle.named_modules())
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and path != "lm_head":
            assert layer.weight.dtype == FP8 and layer.weight_scale.shape == (layer.out_features,)
            weight = plain[path].weight
            torch.testing.assert_close(layer.weight_scale, weight.abs().amax(1) / FP8_MAX)
            # Half a step of a 3-bit mantissa, and half a step of the smallest numbers.
            torch.testing.assert_close(numbers(layer), weight, rtol=1 / 16, atol=float(layer.weight_scale.max()) / 512)
    assert torch.equal(model.lm_head.weight, oracle.lm_head.weight)
    assert error(logits(model), logits(oracle)) < 0.3
    for path, layer in plain.items():
        if isinstance(layer, Linear) and path != "lm_head":
            layer.weight.data = numbers(model.get_submodule(path))
    assert error(logits(model), logits(round_inputs(oracle))) < ONE_STEP


@pytest.mark.parametrize("kind", [None, *KINDS])
@torch.inference_mode()
def test_random_weights(kind, tmp_path):
    config = llama_config(**WIDE)
    if kind is not None:
        config["quantization_config"] = KINDS[kind][0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    got = logits(load(tmp_path, "fp8", "dummy"))
    assert got.isfinite().all() and got.std() > 0.01


def test_generates_on_a_cpu(tmp_path):
    folder = write_random_llama(tmp_path / "rand")
    llm = LLM(str(folder), quantization="fp8", max_model_len=64, kv_cache_memory_bytes=1 << 20)
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 20}]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert [len(ids) for ids in together] == [6, 6]
    assert list(map(list, together)) == list(map(list, alone))
