"""Parsing GGUF headers: every value type, and every way a file can be damaged."""

import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest

from octavo.errors import LoadError
from octavo.loader.gguf_file import GGML_TYPES, open_gguf, open_gguf_parts, read_gguf_metadata
from tests.loader.gguf_files import write_gguf

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(5, dtype=np.float16),
}


@pytest.fixture
def small(tmp_path):
    return write_gguf(tmp_path / "small.gguf", "llama", {".block_count": 7, "words": ["one", "zwei", "三"]}, TENSORS)


def test_every_value_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 1 << 60)
    writer.add_int64("i64", -(1 << 60))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße 😀")
    writer.add_array("strings", ["", "a", "日本"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_metadata(tmp_path / "values.gguf")
    assert metadata == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 4_000_000_000,
        "i32": -70000,
        "u64": 1 << 60,
        "i64": -(1 << 60),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "grüße 😀",
        "strings": ["", "a", "日本"],
        "ints": [1, -2, 3],
        "floats": [0.5, -1.5],
        "bools": [True, False],
    }


def test_tensor_places_equal_the_reference_reader(small):
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(small).tensors}
    tensors = open_gguf(small).tensors
    assert list(tensors) == list(reference)
    for name, info in tensors.items():
        assert info.shape == tuple(int(dim) for dim in reversed(reference[name].shape))
        assert (info.offset, info.num_bytes) == (reference[name].data_offset, reference[name].n_bytes)
        assert info.ggml_type == reference[name].tensor_type.name


def test_type_sizes_equal_the_reference():
    for type_id, (name, values, size) in GGML_TYPES.items():
        assert gguf.GGMLQuantizationType(type_id).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)] == (values, size)


def test_lists_of_strings_can_be_passed_over(small):
    whole, bare = open_gguf(small), open_gguf(small, vocabulary=False)
    assert bare.tensors == whole.tensors
    left_out = [key for key, value in whole.metadata.items() if isinstance(value, list) and isinstance(value[0], str)]
    assert left_out
    assert bare.metadata == {key: value for key, value in whole.metadata.items() if key not in left_out}


@pytest.mark.parametrize("vocabulary", [True, False])
def test_every_truncation_is_one_line_with_the_path(small, tmp_path, vocabulary):
    content = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, len(content), 97), len(content) - 32]:
        cut.write_bytes(content[:length])
        with pytest.raises(LoadError, match=r"cut\.gguf") as caught:
            open_gguf(cut, vocabulary)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "value type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + b"k", "truncated"),
    ],
)
def test_damaged_headers_say_what_is_wrong(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(LoadError, match=message):
        open_gguf(tmp_path / "bad.gguf")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LoadError, match=r"nothing\.gguf does not exist"):
        open_gguf(tmp_path / "nothing.gguf")


def test_split_files_are_opened_together(small, tmp_path):
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(small.read_bytes())
    parts = open_gguf_parts(tmp_path / "m-00002-of-00002.gguf")
    assert [part.path.name for part in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(LoadError, match=r"missing beside it: m-00001-of-00002\.gguf"):
        open_gguf_parts(tmp_path / "m-00002-of-00002.gguf")


def test_reading_metadata_does_not_import_torch():
    code = (
        "import sys, octavo.loader, octavo.loader.gguf_metadata, octavo.loader.find\n"
        "assert not {'torch', 'numpy', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
