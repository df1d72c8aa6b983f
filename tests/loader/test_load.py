"""Filling a model: every tensor in its place, and every misfit named."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from octavo.config.engine import LoadConfig
from octavo.errors import LoadError
from octavo.loader import load_model
from tests.fixtures.checkpoints import write_random_llama
from tests.loader.tiny_model import TinyLlama, Weight, expected_state

CPU = torch.device("cpu")


def load(model, path, load_format="auto", dtype=torch.float32, **kwargs):
    return load_model(model, LoadConfig(load_format, use_tqdm=False), str(path), dtype=dtype, device=CPU, **kwargs)


def assert_state(model, expected):
    state = model.state_dict()
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_file(write_random_llama(tmp_path_factory.mktemp("load"), tokenizer=False) / "model.safetensors")


@pytest.fixture
def problems(tmp_path, checkpoint):
    """Load an edited checkpoint and give back the error's text."""

    def run(edit, model=None):
        tensors = dict(checkpoint)
        edit(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(LoadError) as caught:
            load(model or TinyLlama(), tmp_path)
        return str(caught.value)

    return run


@pytest.fixture
def warnings(monkeypatch):
    """The texts of warnings logged while loading."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    handler.setLevel(logging.WARNING)
    monkeypatch.setattr(logging.getLogger("octavo"), "handlers", [handler])
    return texts


def write_shards(folder, tensors, write=save_file, stem="model", ending="safetensors"):
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-0000{number}-of-00002.{ending}"
        write({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    whole = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[ending]
    (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_safetensors(tmp_path, checkpoint):
    save_file(checkpoint, tmp_path / "model.safetensors")
    model = TinyLlama()
    report = load(model, tmp_path)
    assert_state(model, expected_state(checkpoint))
    assert report.load_format == "safetensors" and report.num_tensors == len(checkpoint)
    num_bytes = sum(tensor.numel() * 4 for tensor in checkpoint.values())
    assert report.checkpoint_bytes == report.parameter_bytes == num_bytes


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards(tmp_path, checkpoint, ending):
    write_shards(tmp_path, checkpoint, save_file if ending == "safetensors" else torch.save, ending=ending)
    model = TinyLlama()
    assert len(load(model, tmp_path).files) == 2
    assert_state(model, expected_state(checkpoint))


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_files_of_both_kinds(tmp_path, checkpoint, zipped):
    torch.save(checkpoint, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    model = TinyLlama()
    assert load(model, tmp_path).load_format == "pt"
    assert_state(model, expected_state(checkpoint))


def test_a_checkpoint_that_transformers_saved(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.fixtures.checkpoints import llama_config

    reference = LlamaForCausalLM(LlamaConfig(**llama_config()))
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = TinyLlama()
    load(model, tmp_path)
    assert_state(model, expected_state(reference.state_dict()))


def test_meta_parameters_are_allocated_here(tmp_path, checkpoint):
    save_file(checkpoint, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = TinyLlama()
    load(model, tmp_path)
    assert_state(model, expected_state(checkpoint))
    assert isinstance(model.lm_head.weight, nn.Parameter)


def test_a_table_left_on_meta_is_refused(tmp_path, checkpoint):
    save_file(checkpoint, tmp_path / "model.safetensors")
    model = TinyLlama()
    model.register_buffer("cos", torch.empty(4, device="meta"), persistent=False)
    with pytest.raises(LoadError, match="tables without values on the meta device: cos"):
        load(model, tmp_path)


def test_parameters_keep_their_own_dtype(tmp_path, checkpoint):
    save_file(checkpoint, tmp_path / "model.safetensors")
    model = TinyLlama().bfloat16()
    load(model, tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert_state(model, expected_state(checkpoint))


def test_a_checkpoint_packed_already_fills_the_module_whole(tmp_path, checkpoint):
    save_file(expected_state(checkpoint), tmp_path / "model.safetensors")
    model = TinyLlama()
    load(model, tmp_path)
    assert_state(model, expected_state(checkpoint))


def test_known_useless_tensors_are_ignored_and_reported(tmp_path, checkpoint):
    useless = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(checkpoint | {useless: torch.ones(8)}, tmp_path / "model.safetensors")
    assert load(TinyLlama(), tmp_path).ignored == [useless]


# Renaming


def test_renames_apply_in_order(tmp_path, checkpoint):
    class Renamed(TinyLlama):
        renames = {r"^transformer\.": "model.", r"^model\.h\.(\d+)": r"model.layers.\1"}

    old = {
        name.replace("model.layers", "transformer.h").replace("model.", "transformer."): tensor
        for name, tensor in checkpoint.items()
    }
    save_file(old, tmp_path / "model.safetensors")
    model = Renamed()
    load(model, tmp_path)
    assert_state(model, expected_state(checkpoint))


def test_remap_may_split_a_tensor(tmp_path):
    class Split(nn.Module):
        packing = {"both": ("left", "right")}

        def __init__(self):
            super().__init__()
            self.a, self.b = Weight(2, 3), Weight(4, 3)

        def remap(self, name, tensor):
            return [("a.weight", tensor[:2]), ("b.weight", tensor[2:])] if name == "ab.weight" else []

    whole = torch.randn(6, 3)
    save_file({"ab.weight": whole, "dropped": torch.ones(1)}, tmp_path / "model.safetensors")
    model = Split()
    load(model, tmp_path)
    assert torch.equal(torch.cat([model.a.weight, model.b.weight]), whole)


def test_packing_may_span_several_parts_of_a_name(tmp_path):
    class Experts(nn.Module):
        packing = {"experts.gate_up": ("experts.0.gate.weight", "experts.0.up.weight", "experts.1.gate.weight")}

        def __init__(self):
            super().__init__()
            self.experts = nn.Module()
            self.experts.gate_up = nn.Parameter(torch.empty(3, 2, 2), requires_grad=False)
            self.experts.gate_up.weight_loader = lambda param, tensor, shard: param[shard].copy_(tensor)

    parts = torch.randn(3, 2, 2)
    names = Experts.packing["experts.gate_up"]
    save_file({name: parts[i].clone() for i, name in enumerate(names)}, tmp_path / "model.safetensors")
    model = Experts()
    load(model, tmp_path)
    assert torch.equal(model.experts.gate_up, parts)


# The ledger


def test_all_problems_are_reported_together(problems):
    def edit(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.layers.0.mlp.gate_proj.weight"]
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.extra.weight"] = torch.ones(3)
        tensors["lm_head.weight"] = torch.ones(512, 63)
        tensors["model.layers.0.self_attn.v_proj.weight"] = torch.ones(31, 64)

    text = problems(edit)
    assert "(6 problems)" in text
    for line in (
        "missing: model.norm.weight (64,): not in the checkpoint",
        "missing: k_proj of model.layers.1.self_attn.qkv_proj.weight: not in the checkpoint",
        "missing: model.layers.0.mlp.gate_up_proj.weight (256, 64), made of gate_proj, up_proj: not in the checkpoint",
        "unused: model.layers.0.extra.weight (3,): the model has no place for it",
        "misshapen: lm_head.weight for lm_head.weight: (512, 63) in the checkpoint, (512, 64) in the model",
        "misshapen: model.layers.0.self_attn.v_proj.weight for model.layers.0.self_attn.qkv_proj.weight: (31, 64)",
    ):
        assert line in text


def test_a_scalar_does_not_spread_over_a_vector(problems):
    text = problems(lambda tensors: tensors.update({"model.norm.weight": torch.ones(1)}))
    assert "(1,) in the checkpoint, (64,) in the model" in text


def test_the_same_place_twice_is_refused(problems, checkpoint):
    packed = expected_state(checkpoint)["model.layers.0.self_attn.qkv_proj.weight"]
    text = problems(lambda tensors: tensors.update({"model.layers.0.self_attn.qkv_proj.weight": packed}))
    assert "duplicated" in text and "model.layers.0.self_attn.qkv_proj.weight, which is filled already" in text


def test_a_tensor_in_two_files_is_refused(tmp_path, checkpoint):
    save_file(checkpoint, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "b.safetensors")
    with pytest.raises(LoadError, match=r"duplicated: model\.norm\.weight is in a\.safetensors and again in b\."):
        load(TinyLlama(), tmp_path)


def test_integers_for_floats_are_refused(problems):
    text = problems(lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    assert "torch.int32 in the checkpoint, torch.float32 in the model" in text


def test_values_beyond_float16_are_refused(problems):
    def edit(tensors):
        tensors["model.norm.weight"] = torch.full((64,), -70000.0)

    assert "values up to 7e+04 do not fit float16" in problems(edit, TinyLlama().half())


def test_a_packed_parameter_without_a_loader_is_refused(problems):
    model = TinyLlama()
    del model.model.layers[0].mlp.gate_up_proj.weight.weight_loader
    assert "it is part 0 of a packed parameter, which has no weight_loader" in problems(lambda tensors: None, model)


def test_long_lists_are_cut_and_counted(problems):
    text = problems(lambda tensors: tensors.update({f"junk.{i}": torch.ones(1) for i in range(50)}))
    assert "(50 problems)" in text and "unused: and 30 more" in text


def test_an_index_that_lies_is_refused(tmp_path, checkpoint):
    weight_map = write_shards(tmp_path, checkpoint)
    first, second = sorted(set(weight_map.values()))
    moved = next(name for name, file in weight_map.items() if file == first)
    index = {"weight_map": weight_map | {moved: second, "ghost.weight": first}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError) as caught:
        load(TinyLlama(), tmp_path)
    assert f"missing: ghost.weight: the index places it in {first}, which lacks it" in str(caught.value)
    assert f"misplaced: {moved}: the index places it in {second}, it is in {first}" in str(caught.value)


# Tied heads (FC-150)


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("same_object", [True, False])
def test_a_head_that_is_absent_is_the_embedding(tmp_path, checkpoint, same_object, meta):
    tensors = {name: tensor for name, tensor in checkpoint.items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.device("meta" if meta else "cpu"):
        model = TinyLlama(tied=True, same_object=same_object)
    report = load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, checkpoint["model.embed_tokens.weight"])
    assert report.shared == {"lm_head.weight": "model.embed_tokens.weight"}
    assert report.parameter_bytes == sum(tensor.numel() * 4 for tensor in tensors.values())


@pytest.mark.parametrize("same_object", [True, False])
def test_a_head_that_differs_is_used_although_tied(tmp_path, checkpoint, same_object, warnings):
    save_file(checkpoint, tmp_path / "model.safetensors")
    model = TinyLlama(tied=True, same_object=same_object)
    report = load(model, tmp_path)
    assert_state(model, expected_state(checkpoint))
    assert not report.shared
    assert warnings == ["The checkpoint's lm_head.weight differs from model.embed_tokens.weight; both are used."]


def test_a_head_that_equals_the_embedding_is_shared(tmp_path, checkpoint, warnings):
    save_file(
        checkpoint | {"lm_head.weight": checkpoint["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    model = TinyLlama(tied=True)
    load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not warnings


def test_a_checkpoint_with_the_head_alone_fills_the_embedding(tmp_path, checkpoint):
    tensors = {name: tensor for name, tensor in checkpoint.items() if name != "model.embed_tokens.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    model = TinyLlama(tied=True)
    load(model, tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, checkpoint["lm_head.weight"])


def test_an_absent_head_of_an_untied_model_is_missing(problems):
    text = problems(lambda tensors: tensors.pop("lm_head.weight"))
    assert "(1 problem)" in text and "missing: lm_head.weight (512, 64)" in text


# Damaged files


def assert_one_line(path, message):
    with pytest.raises(LoadError, match=message) as caught:
        load(TinyLlama(), path)
    assert "\n" not in str(caught.value)


def test_truncated_safetensors(tmp_path, checkpoint):
    file = tmp_path / "model.safetensors"
    save_file(checkpoint, file)
    content = file.read_bytes()
    for length in (0, 4, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        assert_one_line(tmp_path, r"model\.safetensors (is truncated|cannot be read)")


def test_truncated_pytorch_file(tmp_path, checkpoint):
    file = tmp_path / "pytorch_model.bin"
    torch.save(checkpoint, file)
    content = file.read_bytes()
    for length in (0, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        assert_one_line(tmp_path, r"pytorch_model\.bin cannot be read")


def test_a_pickle_that_runs_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    assert_one_line(tmp_path, r"pytorch_model\.bin cannot be read")


def header(fields, data=b""):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(b"[]"), "not a JSON object"),
        (header(b"{nonsense"), "damaged safetensors header"),
        (header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)), r"F32 \[3\] but has 8 bytes"),
        (
            header(
                {
                    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                    "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
                },
                bytes(12),
            ),
            "overlaps",
        ),
        (header(b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}'), "'a' appears twice"),
    ],
)
def test_damaged_safetensors_headers(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert_one_line(tmp_path, message)


def test_an_unknown_safetensors_dtype_is_named(tmp_path, checkpoint):
    fields = {"model.norm.weight": {"dtype": "F4", "shape": [64], "data_offsets": [0, 32]}}
    (tmp_path / "a.safetensors").write_bytes(header(fields, bytes(32)))
    save_file(
        {name: tensor for name, tensor in checkpoint.items() if name != "model.norm.weight"}, tmp_path / "b.safetensors"
    )
    with pytest.raises(LoadError, match=r"unreadable: model\.norm\.weight: safetensors dtype F4 is not supported"):
        load(TinyLlama(), tmp_path)


# Random weights


def test_dummy_weights_depend_on_seed_and_name_only():
    first, second, other = TinyLlama(), TinyLlama(), TinyLlama()
    load(first, "nowhere", "dummy")
    torch.manual_seed(99)
    load(second, "nowhere", "dummy")
    load(other, "nowhere", "dummy", seed=1)
    assert_state(second, first.state_dict())
    assert not torch.equal(other.lm_head.weight, first.lm_head.weight)
    assert not torch.equal(first.model.layers[0].mlp.down_proj.weight, first.model.layers[1].mlp.down_proj.weight)


def test_dummy_weights_keep_activations_in_range():
    model = TinyLlama()
    load(model, "nowhere", "dummy")
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    y = x @ model.lm_head.weight.T
    assert 0.8 < float(y.std() / x.std()) < 1.25
    assert 0.9 <= float(model.model.norm.weight.min()) <= float(model.model.norm.weight.max()) <= 1.1


def test_dummy_weights_tie_and_fill_meta_and_large_and_integer_tensors():
    with torch.device("meta"):
        model = TinyLlama(tied=True)
        model.large = nn.Parameter(torch.empty(1100, 1000), requires_grad=False)
        model.packed = nn.Parameter(torch.empty(100, dtype=torch.int32), requires_grad=False)
    load(model, "nowhere", "dummy")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.large.abs().max() > 0 and model.large[-1].abs().max() > 0
    assert model.packed.unique().numel() > 90


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM from /proc")
def test_peak_memory_is_the_model_once(tmp_path):
    """A model of 192 MB raises the peak of a process by that and a constant (torch itself, one tensor), not by 384 MB."""
    big = {f"part{i}.weight": torch.zeros(2048, 2048) for i in range(12)}
    save_file(big, tmp_path / "model.safetensors")
    code = f"""
import torch
from torch import nn
from octavo.config.engine import LoadConfig
from octavo.loader.load import load_model

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

with torch.device("meta"):
    model = nn.ModuleDict({{f"part{{i}}": nn.Linear(2048, 2048, bias=False) for i in range(12)}})
before = peak()
load_model(model, LoadConfig("safetensors", use_tqdm=False), {str(tmp_path)!r}, dtype=torch.float32,
           device=torch.device("cpu"))
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(result.stdout) < 1.5 * 192
