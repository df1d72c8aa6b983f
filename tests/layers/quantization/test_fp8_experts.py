"""Checkpoints whose experts are FP8, of every kind of scale: what is loaded must be the numbers they stand for."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.errors import LoadError
from octavo.ops.linear.fp8 import BLOCK, FP8, FP8_MAX, dequantize_weight
from tests.models.harness import check_engine, random_checkpoint
from tests.models.table import LATENT

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
ROWS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}},
}
# Widths that end inside a block.
QWEN = {"hidden_size": 144, "moe_intermediate_size": 160, "num_experts": 3, "head_dim": 16}
DEEPSEEK = {**LATENT, "kv_lora_rank": 144, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1}
PLAIN = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
PLAIN += [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "shared_experts",
    "lm_head",
]


def scales_of(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """A scale for all, each row or each block."""
    if kind == "tensor":
        return weight.abs().max() / FP8_MAX
    if kind == "row":
        return weight.abs().amax(1) / FP8_MAX
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.unflatten(1, (columns, BLOCK)).unflatten(0, (rows, BLOCK)).abs().amax((1, 3)) / FP8_MAX


def write(folder: Path, model_type: str, changes: dict, config: dict, kind: str) -> torch.nn.Module:
    """A random checkpoint with FP8 experts, and FP8 latents where it has those; the oracle has the numbers they stand for."""
    random_checkpoint(model_type, changes, folder / "plain")
    coded, plain = {}, safetensors.torch.load_file(folder / "plain" / "model.safetensors")
    for name, weight in plain.items():
        coded[name] = weight
        if weight.dim() != 2 or not (".experts." in name or ".kv_b_proj." in name):
            continue
        scale = scales_of(weight, kind)
        codes = (weight / dequantize_weight(torch.ones_like(weight), scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        stem = name.removesuffix("weight")
        coded |= {name: codes, f"{stem}weight_scale_inv" if kind == "block" else f"{stem}weight_scale": scale}
        if kind == "tensor":
            coded[f"{stem}input_scale"] = torch.tensor(0.1)
        plain[name] = dequantize_weight(codes, scale)
    safetensors.torch.save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(coded, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((folder / "plain" / "config.json").read_text())
    stated["quantization_config"] = {**config, "ignore" if kind == "row" else "modules_to_not_convert": PLAIN}
    (folder / "config.json").write_text(json.dumps(stated))
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("model_type", "changes", "config", "kind"),
    [
        ("qwen3_moe", QWEN, BLOCKS, "block"),
        ("qwen3_moe", QWEN, TENSORS, "tensor"),
        ("mixtral", {"num_local_experts": 3}, ROWS, "row"),
        ("deepseek_v3", DEEPSEEK, BLOCKS, "block"),
        ("minimax_m2", {}, BLOCKS, "block"),
    ],
)
def test_answers_are_those_of_the_decoded_numbers(model_type, changes, config, kind, tmp_path):
    check_engine(tmp_path, write(tmp_path, model_type, changes, config, kind))


def test_what_is_missing_or_misshapen_is_named(tmp_path):
    write(tmp_path, "qwen3_moe", QWEN, BLOCKS, "block")
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"]
    tensors["model.layers.0.mlp.experts.0.down_proj.weight_scale_inv"] = torch.ones(1, 1)
    tensors["model.layers.2.mlp.experts.1.gate_proj.weight"] = torch.ones(160, 144)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError) as caught:
        LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=2**22)
    for fragment in ("experts.2.up_proj of", "expects shape [2, 2]", "does not list the layer as unquantised"):
        assert fragment in str(caught.value)


def test_experts_of_a_floating_point_checkpoint_stay_as_they_are(tmp_path):
    """Where the other linears are rounded."""
    random_checkpoint("qwen3_moe", {}, tmp_path)
    settings = {"max_model_len": 64, "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), quantization="fp8", dtype="bfloat16", **settings) as llm:
        answer = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=3, detokenize=False))
    assert len(answer[0].outputs[0].token_ids) == 3
