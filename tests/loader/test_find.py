"""Which files are read for which folder and load format."""

import json

import pytest

from octavo.errors import LoadError
from octavo.loader.find import find_weights


def touch(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def names(found):
    return [file.name for file in found.files]


def write_index(folder, files, name="model.safetensors.index.json"):
    (folder / name).write_text(json.dumps({"weight_map": {f"t{i}": file for i, file in enumerate(files)}}))


def test_safetensors_win_over_pytorch_and_gguf(tmp_path):
    touch(tmp_path, "model.safetensors", "pytorch_model.bin", "m.gguf", "config.json")
    assert find_weights(tmp_path).load_format == "safetensors"
    assert names(find_weights(tmp_path)) == ["model.safetensors"]
    assert names(find_weights(tmp_path, "pt")) == ["pytorch_model.bin"]
    assert names(find_weights(tmp_path, "gguf")) == ["m.gguf"]


def test_an_index_decides_the_files(tmp_path):
    touch(tmp_path, "model-1.safetensors", "model-2.safetensors", "stray.safetensors")
    write_index(tmp_path, ["model-2.safetensors", "model-1.safetensors", "model-2.safetensors"])
    found = find_weights(tmp_path)
    assert names(found) == ["model-1.safetensors", "model-2.safetensors"]
    assert found.weight_map["t0"] == "model-2.safetensors"


def test_other_files_of_the_same_ending_are_not_weights(tmp_path):
    touch(tmp_path, "a.safetensors", "consolidated.safetensors", "adapter_model.safetensors")
    assert names(find_weights(tmp_path)) == ["a.safetensors"]
    touch(tmp_path, "w.bin", "training_args.bin", "optimizer.bin")
    assert names(find_weights(tmp_path, "pt")) == ["w.bin"]
    touch(tmp_path, "m.gguf", "mmproj-m.gguf")
    assert names(find_weights(tmp_path, "gguf")) == ["m.gguf"]


def test_split_gguf_counts_as_one_model(tmp_path):
    touch(tmp_path, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert names(find_weights(tmp_path)) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert names(find_weights(tmp_path / "m-00001-of-00002.gguf")) == names(find_weights(tmp_path))


def test_a_single_file_is_taken_as_it_is(tmp_path):
    touch(tmp_path, "m.gguf", "notes.txt")
    assert find_weights(tmp_path / "m.gguf").load_format == "gguf"
    with pytest.raises(LoadError, match="is a gguf file, but load_format='pt'"):
        find_weights(tmp_path / "m.gguf", "pt")
    with pytest.raises(LoadError, match="not a weight file"):
        find_weights(tmp_path / "notes.txt")


def test_dummy_needs_no_files(tmp_path):
    assert find_weights(tmp_path / "nowhere", "dummy").files == ()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["../outside.safetensors"], "outside its folder"),
        (["absent.safetensors"], r"do not exist: absent\.safetensors"),
        ([], "empty"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path, files, message):
    write_index(tmp_path, files)
    with pytest.raises(LoadError, match=message):
        find_weights(tmp_path)


def test_an_unreadable_index_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(LoadError, match="not a readable index"):
        find_weights(tmp_path)


def test_nothing_to_load_says_what_is_there(tmp_path):
    touch(tmp_path, "README.md")
    with pytest.raises(LoadError, match=r"it holds: README\.md"):
        find_weights(tmp_path)
    with pytest.raises(LoadError, match="does not exist"):
        find_weights(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="'magic' is not known"):
        find_weights(tmp_path, "magic")
    touch(tmp_path, "a.gguf", "b.gguf")
    with pytest.raises(LoadError, match=r"several GGUF models: a\.gguf, b\.gguf"):
        find_weights(tmp_path)
