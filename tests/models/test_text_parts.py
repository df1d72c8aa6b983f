"""Models of text and images, asked for text: their decoders against the whole models of transformers."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from octavo.config.hf import HFConfig
from octavo.models.registry import TEXT_PARTS
from tests.models.harness import check_engine
from tests.models.table import GATED_DELTA, GEMMA4, LLAMA4
from tests.models.tiny import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
LLAMA4_VISION = {
    **VISION,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
GEMMA4_VISION = {**VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
PARTS = {
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text", {}, {**VISION, "patch_size": 14}),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4_text", GEMMA4, GEMMA4_VISION),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", "gemma4_unified_text", GEMMA4, {"mm_embed_dim": 32}),
    "Llama4ForConditionalGeneration": ("llama4", "llama4_text", LLAMA4, LLAMA4_VISION),
    "Mistral3ForConditionalGeneration": ("mistral3", "ministral3", {}, {**VISION, "patch_size": 14, "head_dim": 16}),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5_text", GATED_DELTA, QWEN_VISION),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_5_moe_text", GATED_DELTA, QWEN_VISION),
}


def write_whole(architecture: str, folder: Path) -> torch.nn.Module:
    model_type, text_type, changes, vision = PARTS[architecture]
    text = tiny_config(text_type, changes)
    config = transformers.CONFIG_MAPPING[model_type](
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data * 3 + (0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0)
    model.save_pretrained(folder)
    assert type(model).__name__ == architecture
    # Without images the whole of transformers' Llama 4 asks its decoder for an output that it has not.
    return model.language_model if model_type == "llama4" else model


@pytest.mark.parametrize("architecture", TEXT_PARTS)
def test_answers_are_those_of_the_whole_model(architecture, tmp_path):
    check_engine(tmp_path, write_whole(architecture, tmp_path))


def test_checkpoints_with_older_names(tmp_path):
    """As transformers 4 wrote them: every part with the decoder's whole name before it."""
    oracle = write_whole("Gemma3ForConditionalGeneration", tmp_path)
    file = tmp_path / "model.safetensors"
    old = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        name = name.replace("model.language_model.", "language_model.model.").replace(
            "lm_head.", "language_model.lm_head."
        )
        old[name.removeprefix("model.")] = tensor
    safetensors.torch.save_file(old, file, metadata={"format": "pt"})
    check_engine(tmp_path, oracle)


def test_what_gemma_3_leaves_out_of_its_configuration():
    """google/gemma-3-4b-it states five numbers; the others are transformers' defaults."""
    stated = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    stated |= {"sliding_window": 1024}
    text = HFConfig(
        json.loads(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": stated}))
    ).text()
    expected = transformers.CONFIG_MAPPING["gemma3_text"](**stated)
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        assert text.require(name) == getattr(expected, name)
    assert text.require("query_pre_attn_scalar") == expected.query_pre_attn_scalar
