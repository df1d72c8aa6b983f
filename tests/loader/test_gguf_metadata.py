"""config.json and generation_config.json from GGUF metadata, read back by transformers' configuration classes."""

import gguf
import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.errors import LoadError
from octavo.loader.gguf_families import FAMILIES, MIXTRAL, family_of
from octavo.loader.gguf_metadata import read_gguf_config
from tests.loader.gguf_files import LLAMA_METADATA, write_gguf

EMBEDDING = {"token_embd.weight": np.zeros((40, 64), dtype=np.float32)}


def read(tmp_path, architecture="llama", metadata=None, tensors=None):
    path = tmp_path / "model.gguf"
    return read_gguf_config(
        write_gguf(path, architecture, LLAMA_METADATA | (metadata or {}), EMBEDDING | (tensors or {}))
    )


def as_transformers(config):
    return AutoConfig.for_model(**config)


def test_smollm2(smollm2_gguf):
    """FC-154: everything from the file."""
    config, generation = read_gguf_config(smollm2_gguf)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert generation == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}


def test_end_ids_are_those_named_and_the_turn_ends_of_the_vocabulary(tmp_path):
    _, generation = read(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 2})
    assert generation["eos_token_id"] == [1, 2, 3]


def test_a_turn_end_that_is_ordinary_text_does_not_end_an_answer(tmp_path):
    _, generation = read(tmp_path, metadata={"tokenizer.ggml.token_type": [3, 3, 1, 1]})
    assert generation["eos_token_id"] == [1]


def test_head_and_dtype_follow_the_tensors(tmp_path):
    config, _ = read(tmp_path)
    assert config["tie_word_embeddings"] and config["dtype"] == "float32"
    config, _ = read(tmp_path, tensors={"output.weight": np.zeros((40, 64), dtype=np.float16)})
    assert not config["tie_word_embeddings"]
    q8 = (np.zeros((40, 68), dtype=np.uint8), "Q8_0")
    config, _ = read(tmp_path, tensors={"token_embd.weight": q8})
    assert "dtype" not in config


def test_rope_freqs_become_the_rope_factors(tmp_path):
    """FC-151: the helper tensor is used."""
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    config, _ = read(tmp_path, tensors={"rope_freqs.weight": factors})
    scaling = config["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    assert scaling["short_factor"] == scaling["long_factor"] == factors.tolist()
    # transformers divides its frequencies by them.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, attention = ROPE_INIT_FUNCTIONS["longrope"](as_transformers(config), device="cpu", seq_len=300)
    plain = 1.0 / 50000.0 ** (np.arange(0, 16, 2) / 16)
    assert attention == 1.0
    np.testing.assert_allclose(inverse.numpy(), plain / factors, rtol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({".rope.scaling.type": "none"}, None),
        ({".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({".rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 64,
                ".rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, expected):
    config, _ = read(tmp_path, metadata=metadata)
    assert config.get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({".rope.scaling.type": "spiral", ".rope.scaling.factor": 2.0}, "rope scaling 'spiral'"),
        ({".rope.scaling.type": "yarn", ".rope.scaling.factor": 2.0, ".rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({".attention.head_count": [4, 2]}, "differs between layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, metadata, message):
    with pytest.raises(LoadError, match=message):
        read(tmp_path, metadata=metadata)


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    with pytest.raises(LoadError, match=r"'sphinx' is not supported; supported: .*llama"):
        read_gguf_config(write_gguf(tmp_path / "x.gguf", "sphinx", {}, EMBEDDING))


def test_phi3_longrope(tmp_path):
    long, short = np.full(8, 2.0, dtype=np.float32), np.ones(8, dtype=np.float32)
    config, _ = read(
        tmp_path,
        "phi3",
        metadata={".rope.scaling.original_context_length": 64, ".rope.scaling.attn_factor": 1.25},
        tensors={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
    )
    parsed = as_transformers(config)
    assert parsed.rope_parameters["rope_type"] == "longrope"
    assert parsed.rope_parameters["long_factor"] == [2.0] * 8
    assert parsed.rope_parameters["attention_factor"] == 1.25
    assert parsed.original_max_position_embeddings == 64


def test_gemma3(tmp_path):
    config, _ = read(
        tmp_path,
        "gemma3",
        metadata={".block_count": 7, ".attention.key_length": 32, ".attention.sliding_window": 512},
    )
    parsed = as_transformers(config)
    assert type(parsed).__name__ == "Gemma3TextConfig"
    assert (parsed.head_dim, parsed.sliding_window, parsed.query_pre_attn_scalar) == (32, 512, 32)
    assert [kind[0] for kind in parsed.layer_types] == list("sssssfs")
    assert parsed.rope_parameters["full_attention"]["rope_theta"] == 50000.0
    assert parsed.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0


# Tiny sizes for transformers' configuration of each family.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ALWAYS_TIED = ("gemma", "gemma2", "command-r", "cohere2")  # the format has no head for these
# Configurations in which all of the family's optional tensors are there.
FULL = {
    "llama": {"attention_bias": True},
    "starcoder2": {"use_bias": True},
    "stablelm": {"use_qkv_bias": True},
    "glm4": {"attention_bias": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("architecture", sorted(set(FAMILIES) - {"qwen2moe", "qwen3moe"}))
def test_every_checkpoint_name_comes_back(architecture):
    """The converter's own name map, run forward, then ours, gives each name of transformers' model."""
    import torch

    family = FAMILIES[architecture]
    config = AutoConfig.for_model(family.model_type, **(SIZES | FULL.get(architecture, {})))
    with torch.device("meta"):
        names = list(AutoModelForCausalLM.from_config(config).state_dict())
    gguf_id = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    forward = gguf.get_tensor_name_map(gguf_id, 2)
    assert len(names) > 10
    for name in names:
        if name == "lm_head.weight" and architecture in ALWAYS_TIED:
            continue
        stored = forward.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        assert family.checkpoint_name(stored) == name


@pytest.mark.parametrize(
    ("family", "stored", "name"),
    [
        (FAMILIES["qwen3moe"], "blk.1.ffn_gate_exps.weight", "model.layers.1.mlp.experts.{expert}.gate_proj.weight"),
        (FAMILIES["qwen3moe"], "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
        (FAMILIES["qwen2moe"], "blk.0.ffn_gate_inp_shexp.weight", "model.layers.0.mlp.shared_expert_gate.weight"),
        (FAMILIES["qwen2moe"], "blk.0.ffn_down_shexp.weight", "model.layers.0.mlp.shared_expert.down_proj.weight"),
        (MIXTRAL, "blk.0.ffn_down_exps.weight", "model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"),
        (MIXTRAL, "blk.0.ffn_nonsense.weight", None),
    ],
)
def test_names_of_experts(family, stored, name):
    assert family.checkpoint_name(stored) == name


def test_llama_with_experts_is_mixtral(tmp_path):
    assert family_of("llama", num_experts=8) is MIXTRAL
    config, _ = read(tmp_path, metadata={".expert_count": 8, ".expert_used_count": 2})
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_transformers_reads_every_familys_config(tmp_path, architecture):
    extra = {
        ".attention.sliding_window": 16,
        ".attention.layer_norm_epsilon": 1e-4,
        ".expert_count": 4,
        ".expert_used_count": 2,
        ".expert_feed_forward_length": 24,
        ".expert_shared_feed_forward_length": 20,
    }
    if "moe" not in architecture:
        extra = {key: value for key, value in extra.items() if "expert" not in key}
    tensors = {
        "blk.0.ffn_up_exps.weight": np.zeros((4, 24, 64), dtype=np.float32),
        "blk.0.ffn_up_shexp.weight": np.zeros((20, 64), dtype=np.float32),
    }
    config, _ = read(tmp_path, architecture, metadata=extra, tensors=tensors if "moe" in architecture else None)
    parsed = as_transformers(config)
    assert parsed.architectures == [FAMILIES[architecture].architecture]
    assert (parsed.hidden_size, parsed.num_hidden_layers, parsed.num_attention_heads) == (64, 2, 4)
    assert (parsed.vocab_size, parsed.max_position_embeddings) == (40, 256)
    assert parsed.bos_token_id == 0 and parsed.eos_token_id == 1
    if architecture != "gpt2":
        assert parsed.num_key_value_heads == 2
