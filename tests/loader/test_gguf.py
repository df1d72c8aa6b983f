"""GGUF weights: names, the converter's changes undone, helpers and unknown tensors, a real file."""

import logging

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo.config.engine import LoadConfig
from octavo.errors import LoadError
from octavo.loader import load_model
from octavo.loader.gguf import open_gguf_tensors
from octavo.loader.gguf_file import open_gguf
from octavo.loader.gguf_quants import DECODERS, dequantize
from tests.fixtures.checkpoints import llama_config, write_random_llama
from tests.loader.gguf_files import LLAMA_METADATA, interleave_rows, write_gguf
from tests.loader.test_gguf_quants import random_blocks
from tests.loader.tiny_model import TinyLlama, expected_state

CPU = torch.device("cpu")
METADATA = LLAMA_METADATA | {".embedding_length": 64}


def read_all(path, dtype=torch.float32):
    return {tensor.name: tensor.read(dtype, CPU).clone() for tensor in open_gguf_tensors([path])}


def load(model, path):
    return load_model(model, LoadConfig("gguf", use_tqdm=False), str(path), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_file(write_random_llama(tmp_path_factory.mktemp("gguf"), tokenizer=False) / "model.safetensors")


def as_llama_converter_writes(checkpoint):
    """The checkpoint's tensors under GGUF names, q and k interleaved."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    config = llama_config()
    tensors = {}
    for name, tensor in checkpoint.items():
        weight = tensor.numpy()
        if "q_proj" in name:
            weight = interleave_rows(weight, config["num_attention_heads"])
        if "k_proj" in name:
            weight = interleave_rows(weight, config["num_key_value_heads"])
        tensors[names.get_name(name, try_suffixes=(".weight",))] = weight
    return tensors


@pytest.fixture
def warnings(monkeypatch):
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    handler.setLevel(logging.WARNING)
    monkeypatch.setattr(logging.getLogger("octavo"), "handlers", [handler])
    return texts


def test_a_converted_llama_is_the_checkpoint_again(tmp_path, checkpoint, warnings):
    path = write_gguf(tmp_path / "m.gguf", "llama", METADATA, as_llama_converter_writes(checkpoint))
    model = TinyLlama()
    report = load(model, path)
    for name, tensor in expected_state(checkpoint).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert report.load_format == "gguf" and report.num_tensors == len(checkpoint)
    assert not warnings


def test_restored_rows_rotate_half_split(tmp_path):
    """FC-149, by meaning: attention scores with adjacent-pair rotation on the stored rows equal those with half-split
    rotation on the rows we read."""
    heads, head_dim = 4, 16
    rng = np.random.default_rng(0)
    stored = rng.normal(size=(heads * head_dim, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", METADATA, {"blk.0.attn_q.weight": stored})
    (read,) = read_all(path).values()
    x = torch.from_numpy(rng.normal(size=(5, 64)).astype(np.float32))
    positions = torch.arange(5).float()
    angles = positions[:, None] / 100.0 ** (torch.arange(head_dim // 2) / (head_dim // 2))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(first, second):
        return first * cos - second * sin, second * cos + first * sin

    adjacent = (x @ torch.from_numpy(stored).T).view(5, heads, head_dim // 2, 2)
    adjacent = torch.stack(rotate(adjacent[..., 0], adjacent[..., 1]), -1).flatten(2)
    halves = (x @ read.T).view(5, heads, 2, head_dim // 2)
    halves = torch.cat(rotate(halves[:, :, 0], halves[:, :, 1]), -1)

    def scores(q):
        return torch.einsum("ihd,jhd->hij", q, q)

    torch.testing.assert_close(scores(adjacent), scores(halves), rtol=1e-4, atol=1e-3)
    assert not torch.equal(read, torch.from_numpy(stored))


def test_row_order_is_restored_in_biases_and_in_raw_blocks(tmp_path):
    plain = random_blocks("Q4_0", 64, 2)
    bias = np.arange(64, dtype=np.float32)
    tensors = {
        "blk.0.attn_q.weight": (interleave_rows(plain, 4), "Q4_0"),
        "blk.0.attn_q.bias": interleave_rows(bias, 4),
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", METADATA, tensors)
    weight, read_bias = open_gguf_tensors([path])
    assert weight.ggml_type == "Q4_0" and weight.shape == (64, 64)
    assert torch.equal(weight.raw(), torch.from_numpy(plain))
    assert torch.equal(read_bias.read(torch.float32, CPU), torch.from_numpy(bias))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_families_converted_as_they_are_keep_their_rows(tmp_path, architecture):
    stored = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", architecture, METADATA, {"blk.0.attn_q.weight": stored})
    assert torch.equal(read_all(path)["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(stored))


def test_gemma_norms_lose_their_one(tmp_path):
    tensors = {
        "output_norm.weight": np.full(64, 1.25, dtype=np.float32),
        "blk.0.attn_q_norm.weight": np.full(16, 0.5, dtype=np.float32),
        "blk.0.attn_q.weight": np.ones((64, 64), dtype=np.float32),
    }
    read = read_all(write_gguf(tmp_path / "m.gguf", "gemma3", METADATA, tensors))
    assert torch.equal(read["model.norm.weight"], torch.full((64,), 0.25))
    assert torch.equal(read["model.layers.0.self_attn.q_norm.weight"], torch.full((16,), -0.5))
    assert torch.equal(read["model.layers.0.self_attn.q_proj.weight"], torch.ones(64, 64))


def test_gpt2_matrices_are_turned_back(tmp_path):
    stored = np.arange(192 * 64, dtype=np.float32).reshape(192, 64)
    path = write_gguf(tmp_path / "m.gguf", "gpt2", METADATA, {"blk.0.attn_qkv.weight": stored})
    (tensor,) = open_gguf_tensors([path])
    assert tensor.shape == (64, 192)
    assert torch.equal(tensor.read(torch.float32, CPU), torch.from_numpy(stored.T.copy()))


def test_stacked_experts_become_one_matrix_each(tmp_path):
    blocks = random_blocks("Q8_0", 3 * 8, 2)
    tensors = {
        "blk.0.ffn_up_exps.weight": (blocks.reshape(3, 8, -1), "Q8_0"),
        "blk.0.ffn_gate_inp_shexp.weight": np.ones(64, dtype=np.float32),
    }
    read = read_all(write_gguf(tmp_path / "m.gguf", "qwen2moe", METADATA, tensors))
    whole = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    for expert in range(3):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        assert torch.equal(read[name], whole[expert * 8 : expert * 8 + 8])
    assert read["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, 64)


@pytest.mark.parametrize("ggml_type", [*DECODERS, "F32", "F16", "BF16"])
def test_every_type_through_a_file(tmp_path, ggml_type):
    """FC-155, with an odd number of rows."""
    quant_type = gguf.GGMLQuantizationType[ggml_type]
    if ggml_type in DECODERS:
        data = random_blocks(ggml_type, 7, 2)
    else:
        data = gguf.quants.quantize(np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32), quant_type)
    path = write_gguf(tmp_path / "m.gguf", "llama", METADATA, {"token_embd.weight": (data, ggml_type)})
    (read,) = read_all(path).values()
    reference = gguf.quants.dequantize(data, quant_type)
    assert read.shape == reference.shape
    assert np.array_equal(read.float().numpy().view(np.uint32), reference.view(np.uint32))


def test_a_type_we_cannot_decode_is_named(tmp_path, checkpoint):
    tensors = as_llama_converter_writes(checkpoint)
    tensors["blk.0.ffn_down.weight"] = (np.zeros((64, 66), dtype=np.uint8), "IQ2_XXS")
    with pytest.raises(LoadError, match=r"unreadable: model\.layers\.0\.mlp\.down_proj\.weight: GGUF type IQ2_XXS"):
        load(TinyLlama(), write_gguf(tmp_path / "m.gguf", "llama", METADATA, tensors))


def test_a_type_nobody_knows_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", METADATA, {"output.weight": np.zeros((4, 8), dtype=np.float32)})
    content = path.read_bytes()
    at = content.index(b"output.weight") + len("output.weight") + 4 + 16
    assert content[at : at + 4] == bytes(4)  # F32
    path.write_bytes(content[:at] + (777).to_bytes(4, "little") + content[at + 4 :])
    assert open_gguf(path).tensors["output.weight"].ggml_type == "type 777"
    (tensor,) = open_gguf_tensors([path])
    with pytest.raises(LoadError, match="type 777"):
        tensor.read(torch.float32, CPU)


def test_helpers_are_passed_over_and_unknown_tensors_warned_about_once(tmp_path, checkpoint, warnings):
    """FC-151."""
    tensors = as_llama_converter_writes(checkpoint) | {
        "rope_freqs.weight": np.ones(8, dtype=np.float32),
        "blk.0.mystery.weight": np.ones(3, dtype=np.float32),
        "riddle.bias": np.ones(3, dtype=np.float32),
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", METADATA, tensors)
    report = load(TinyLlama(), path)
    assert report.num_tensors == len(checkpoint)
    assert warnings == [
        f"{path} has 2 tensors that are unknown for llama and are not used: blk.0.mystery.weight, riddle.bias"
    ]


def test_a_split_file_loads_whole(tmp_path, checkpoint):
    tensors = list(as_llama_converter_writes(checkpoint).items())
    write_gguf(tmp_path / "m-00001-of-00002.gguf", "llama", METADATA, dict(tensors[:5]))
    write_gguf(tmp_path / "m-00002-of-00002.gguf", "llama", {}, dict(tensors[5:]))
    model = TinyLlama()
    load(model, tmp_path)
    assert torch.equal(model.lm_head.weight, checkpoint["lm_head.weight"])


def test_smollm2_equals_the_reference_reader(smollm2_gguf):
    """Every kind of tensor of a real file; q and k after undoing the interleaving."""
    infos = open_gguf(smollm2_gguf).tensors
    data = np.memmap(smollm2_gguf, mode="r")
    seen = 0
    for tensor in open_gguf_tensors([smollm2_gguf]):
        seen += 1
        if tensor.gguf_name.startswith("blk.") and not tensor.gguf_name.startswith(("blk.0.", "blk.29.")):
            continue
        info = infos[tensor.gguf_name]
        raw = np.array(data[info.offset : info.offset + info.num_bytes])
        quant_type = gguf.GGMLQuantizationType[info.ggml_type]
        values = gguf.quants.dequantize(raw.reshape(*info.shape[:-1], -1), quant_type).reshape(info.shape)
        read = tensor.read(torch.float32, CPU).numpy()
        for kind, heads in (("attn_q", 9), ("attn_k", 3)):
            if kind in tensor.gguf_name:
                read = interleave_rows(read, heads)
        assert np.array_equal(read, values), tensor.name
    assert seen == len(infos) == 272


def test_blocks_are_decoded_straight_to_the_models_dtype(smollm2_gguf):
    tensor = next(t for t in open_gguf_tensors([smollm2_gguf]) if t.name == "model.layers.3.mlp.up_proj.weight")
    read = tensor.read(torch.bfloat16, CPU)
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, dequantize(tensor.raw(), "Q4_1", torch.float32).bfloat16())
