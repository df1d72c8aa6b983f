"""Every causal language model of the table against transformers in float32, and that the table leaves out none."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo import LLM, SamplingParams
from octavo.config.hf import HFConfig
from octavo.errors import ConfigError, LoadError
from octavo.models.transformers_backend import TransformersForCausalLM
from tests.models.harness import check_against_transformers, check_engine, load_octavo, random_checkpoint
from tests.models.table import ELSEWHERE, GATED_DELTA, LONGROPE, REASONS, REFUSED, ROWS, TAKES_ROUNDED, VARIANTS
from tests.models.tiny import tiny_config

# transformers' own, about configurations as small as these
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("architecture", ROWS)
def test_equals_transformers(architecture: str, tmp_path: Path):
    row = ROWS[architecture]
    oracle = random_checkpoint(row.model_type, row.changes, tmp_path)
    assert type(oracle).__name__ == architecture
    check_against_transformers(tmp_path, oracle)
    cached = check_engine(tmp_path, oracle)
    assert (max(cached) > 0) is row.shares_prefixes


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_transformers(name: str, tmp_path: Path):
    row = VARIANTS[name]
    check_against_transformers(tmp_path, random_checkpoint(row.model_type, row.changes, tmp_path))


def test_kimi_k2_is_deepseek_v3(tmp_path: Path):
    """Its checkpoints name a model type that transformers does not know, and DeepSeek-V3's architecture."""
    oracle = random_checkpoint("deepseek_v3", {"n_group": 1, "topk_group": 1}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    check_engine(tmp_path, oracle)


@pytest.mark.parametrize("also_first", [True, False])
def test_shared_blocks_may_lie_with_any_layer_that_calls_them(also_first: bool, tmp_path: Path):
    """As fine-tuned checkpoints have them: several times, or once under a later layer's name."""
    row = ROWS["Zamba2ForCausalLM"]
    oracle = random_checkpoint(row.model_type, row.changes, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    first = [name for name in tensors if ".layers.1.shared_transformer." in name]
    moved = {name.replace(".layers.1.", ".layers.4."): tensors[name].clone() for name in first}
    assert moved and not moved.keys() & tensors.keys()
    kept = {name: tensor for name, tensor in tensors.items() if also_first or name not in first}
    safetensors.torch.save_file(kept | moved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_against_transformers(tmp_path, oracle)


@pytest.mark.parametrize("architecture", sorted(TAKES_ROUNDED))
def test_takes_rounded_weights(architecture: str, tmp_path: Path):
    """They are right where llama's are (tests/layers): here every linear must have found its weights."""
    row = ROWS[architecture]
    random_checkpoint(row.model_type, row.changes, tmp_path)
    settings = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    for quantization, dtype in (("fp8", "bfloat16"), ("int4", "auto")):
        with LLM(str(tmp_path), quantization=quantization, dtype=dtype, **settings) as llm:
            output = llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy, use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_native_families_run_through_the_backend_too(model_type: str, tmp_path: Path):
    changes = GATED_DELTA if model_type == "qwen3_next" else {}
    check_against_transformers(tmp_path, random_checkpoint(model_type, changes, tmp_path), "transformers")


def test_transformers_modules_that_cannot_go_on_from_a_state_are_refused(tmp_path: Path):
    random_checkpoint("mamba", {}, tmp_path)
    with pytest.raises(ConfigError, match="MambaMixer begins every chunk from nothing"):
        load_octavo(tmp_path, "transformers")


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Qwen3NextForCausalLM", "DeepseekV32ForCausalLM"])
def test_preempted_requests_go_on_as_they_would_have(architecture: str, tmp_path: Path):
    row = ROWS[architecture]
    oracle = random_checkpoint(row.model_type, row.changes, tmp_path)
    # One request of full length fits, three of the five do not.
    check_engine(tmp_path, oracle, num_gpu_blocks_override=18 if row.shares_prefixes else 10)


def test_the_default_cache_holds_a_request_of_a_windowed_model(tmp_path: Path):
    """Chunks take blocks beyond the window, and groups of unequal size leave some unused."""
    random_checkpoint("gemma3_text", {}, tmp_path)
    settings = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 24, "skip_tokenizer_init": True}
    greedy = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True, detokenize=False)
    with LLM(str(tmp_path), dtype="float32", **settings) as llm:
        output = llm.generate([{"prompt_token_ids": [5] * 100}], greedy, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 28


def test_a_context_within_the_original_one_is_rotated_as_it_was(tmp_path: Path):
    """LongRoPE has two sets of factors; what is served decides, not what the model could reach. With Phi-3's configuration."""
    rope = {**LONGROPE, "original_max_position_embeddings": 96}
    oracle = random_checkpoint("llama", {"rope_parameters": rope}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    stated = config.pop("rope_parameters")
    config["rope_theta"] = stated["rope_theta"]
    config["original_max_position_embeddings"] = stated["original_max_position_embeddings"]
    config["rope_scaling"] = {"type": "longrope"} | {key: stated[key] for key in ("short_factor", "long_factor")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_engine(tmp_path, oracle, max_model_len=96)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_run_is_refused_by_name(architecture: str):
    row = REFUSED[architecture]
    config = tiny_config(row.model_type, row.changes).to_dict()
    with pytest.raises(ConfigError, match=re.escape(row.reason)) as caught:
        TransformersForCausalLM(HFConfig({**config, "architectures": [architecture]}))
    assert architecture in str(caught.value)
    assert row.reason in REASONS


def test_no_architecture_is_left_out():
    known = {*ROWS, *REFUSED, *ELSEWHERE}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) <= known
    assert len(ROWS) >= 120


def test_unknown_model_type_is_refused():
    with pytest.raises(ConfigError, match="'no_such_model'"):
        TransformersForCausalLM(HFConfig({"model_type": "no_such_model", "architectures": ["NoSuchForCausalLM"]}))


def test_missing_tensors_are_named(tmp_path: Path):
    random_checkpoint("gpt_neox", {}, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    lost = next(name for name in tensors if "dense" in name)
    del tensors[lost]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    model = TransformersForCausalLM(HFConfig.from_file(tmp_path))
    with pytest.raises(LoadError, match=lost.replace(".", r"\.")):
        model.load_checkpoint(str(tmp_path), "safetensors", lambda path, layer: None, torch.float32, "cpu")
