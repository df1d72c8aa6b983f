"""Architectures that run through transformers: equal where they run, refused by name where they cannot."""

import pytest

from octavo.config.hf import HFConfig
from octavo.errors import ConfigError, LoadError
from octavo.models.transformers_backend import TransformersForCausalLM
from tests.models.harness import check_against_transformers, random_checkpoint

GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
RUNS = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {"sliding_window": 16},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "sliding_window": 16},
    "gptj": {**GPT2, "rotary_dim": 8},
    "granitemoe": {},
    "mixtral": {"num_local_experts": 4},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "olmoe": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "seed_oss": {},
    "starcoder2": {},
}

REFUSED = {
    "bloom": "does not use transformers' attention interface",
    "diffllama": "not plain attention",
    "doge": "an attention mask of its own",
    "falcon": "its own attention classes",
    "mamba": "does not use transformers' attention interface",
    "stablelm": "does not use transformers' attention interface",
}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, about configurations as small as these


@pytest.mark.parametrize("model_type", RUNS)
def test_backend_equals_transformers(model_type, tmp_path):
    oracle = random_checkpoint(model_type, RUNS[model_type], tmp_path)
    check_against_transformers(tmp_path, oracle, "transformers")


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_native_families_run_through_the_backend_too(model_type, tmp_path):
    oracle = random_checkpoint(model_type, {}, tmp_path)
    check_against_transformers(tmp_path, oracle, "transformers")


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_run_is_refused_by_name(model_type, tmp_path):
    random_checkpoint(model_type, {}, tmp_path)
    config = HFConfig.from_file(tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[model_type]) as caught:
        TransformersForCausalLM(config)
    assert config.architecture in str(caught.value)


def test_unknown_model_type_is_refused():
    with pytest.raises(ConfigError, match="'no_such_model'"):
        TransformersForCausalLM(HFConfig({"model_type": "no_such_model", "architectures": ["NoSuchForCausalLM"]}))


def test_missing_tensors_are_named(tmp_path):
    import safetensors.torch
    import torch

    random_checkpoint("gpt_neox", {}, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    lost = next(name for name in tensors if "dense" in name)
    del tensors[lost]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    model = TransformersForCausalLM(HFConfig.from_file(tmp_path))
    with pytest.raises(LoadError, match=lost.replace(".", r"\.")):
        model.load_checkpoint(str(tmp_path), "safetensors", lambda path, layer: None, torch.float32, "cpu")
