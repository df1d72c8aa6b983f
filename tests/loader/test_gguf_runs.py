"""GGUF files of several families from end to end: a random model of transformers, written as its converter would write it."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.loader.gguf_families import FAMILIES
from octavo.loader.gguf_metadata import read_gguf_config
from tests.loader.gguf_files import LLAMA_METADATA, write_gguf
from tests.models.harness import check_engine

pytestmark = pytest.mark.filterwarnings("ignore")

METADATA = {
    **LLAMA_METADATA,
    ".attention.layer_norm_epsilon": 1e-5,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(512)],
    "tokenizer.ggml.token_type": [1] * 512,
}
# What some families ask for besides.
MORE = {
    "cohere2": {".attention.sliding_window": 16, ".logit_scale": 0.5},
    "command-r": {".logit_scale": 0.5},
    "qwen3moe": {".expert_count": 4, ".expert_used_count": 2, ".expert_feed_forward_length": 32},
}


def as_gguf(name: str, weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors under a family's GGUF names, changed as its converter does."""
    family, tensors = FAMILIES[name], {}
    for module, target in family.names.items():
        for place in {(module.replace("{}", str(i)), target.replace("{}", str(i))) for i in range(2)}:
            for ending in ("weight", "bias"):
                parts = [f"{place[1].replace('{expert}', str(i))}.{ending}" for i in range(4)]
                if parts[0] not in weights:
                    continue
                is_stacked = "{expert}" in target
                weight = torch.stack([weights[part] for part in parts]) if is_stacked else weights[parts[0]]
                if ending == "weight" and module.rpartition(".")[2] in family.transposed:
                    weight = weight.T
                if ending == "weight" and family.norm_plus_one and "norm" in module:
                    weight = weight + 1
                tensors[f"{place[0]}.{ending}"] = weight.contiguous().numpy()
    return tensors


def write_random(name: str, folder: Path) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """A random model of the configuration that a file's metadata give, and its tensors as GGUF has them."""
    tensors = {"token_embd.weight": np.zeros((512, 64), dtype=np.float32)}
    tensors["blk.0.ffn_up_exps.weight"] = np.zeros((4, 32, 64), dtype=np.float32)
    config, _ = read_gguf_config(write_gguf(folder / "empty.gguf", name, METADATA | MORE.get(name, {}), tensors))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data * 3 + (0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0)
    model.save_pretrained(folder / "checkpoint")
    return model, as_gguf(name, load_file(folder / "checkpoint" / "model.safetensors"))


@pytest.mark.parametrize("name", ["gpt2", "phi2", "olmo2", "nemotron", "command-r", "cohere2", "qwen3moe"])
def test_answers_are_those_of_transformers(name, tmp_path):
    oracle, tensors = write_random(name, tmp_path)
    check_engine(write_gguf(tmp_path / "model.gguf", name, METADATA | MORE.get(name, {}), tensors), oracle)


def test_blocks_of_experts_are_decoded(tmp_path):
    """Without being asked: the kernels for blocks know no experts."""
    oracle, tensors = write_random("qwen3moe", tmp_path)
    weights, blocks = dict(oracle.named_parameters()), {}
    for name, array in tensors.items():
        if "_exps" in name:
            blocks[name] = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0), "Q8_0"
            tensors[name] = gguf.quants.dequantize(blocks[name][0], gguf.GGMLQuantizationType.Q8_0)
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.tensor(tensors[f"blk.{layer}.ffn_{part}_exps.weight"]) for part in ("gate", "up", "down")
        )
        weights[f"{experts}.gate_up_proj"].data = torch.cat((gate, up), 1)
        weights[f"{experts}.down_proj"].data = down
    file = write_gguf(tmp_path / "model.gguf", "qwen3moe", METADATA | MORE["qwen3moe"], tensors | blocks)
    check_engine(file, oracle, dtype="auto")
