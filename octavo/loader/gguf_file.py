"""GGUF files: the header parsed, the tensor data mapped but not read.

One pass over the header yields the metadata and the place of each tensor; nothing here decodes weights and nothing here
imports torch or numpy, so that configuration and tokenizer code can read a file's metadata in a fraction of a second.

Layout (little endian): magic "GGUF", u32 version, u64 number of tensors, u64 number of metadata pairs, the pairs, the
tensor infos, padding to the alignment, then the data. Dimensions are stored innermost first; `GGUFTensorInfo.shape` is
outermost first, as torch has it.
"""

import functools
import mmap
import re
import struct
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import LoadError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 8

_TYPE_STRING, _TYPE_ARRAY, _TYPE_BOOL = 8, 9, 7
# GGUF value type → struct code; the codes are the same for `array`, except that `array` has no bool.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ARRAY_NESTING = 4

# ggml type id → (name, elements a block, bytes a block). Every type that files contain, decodable or not: a reader
# must know the size of a tensor to check it, and its name to refuse it.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class GGUFTensorInfo:
    """Where a tensor lies in its file and how it is encoded."""

    name: str
    ggml_type: str  # "Q4_K", or "type 99" when the id is unknown
    shape: tuple[int, ...]  # outermost first, as in torch
    offset: int  # bytes from the start of the file
    num_bytes: int  # 0 when the type is unknown


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header and the mapping it came from; `data` stays open as long as a view of it lives."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorInfo]
    data: mmap.mmap = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "?"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`. One given per layer but equal in all of them counts as one value."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(element == value[0] for element in value):
            return value[0]
        return value

    def require(self, key: str) -> Any:
        """The value of `<architecture>.<key>`; LoadError when there is none, or one for each layer."""
        value = self.get(key)
        if value is None:
            raise LoadError(f"{self.path} lacks the metadata key {self.architecture}.{key}.")
        if isinstance(value, list):
            raise LoadError(f"{self.path}: {self.architecture}.{key} differs between layers, which is not supported.")
        return value


def open_gguf(path: str | Path, vocabulary: bool = True) -> GGUFFile:
    """Map one GGUF file and parse its header; LoadError when it is missing, truncated or not GGUF.

    Config and tokenizer both ask for it, and a vocabulary takes a while to parse: an unchanged file is parsed once. Without
    `vocabulary` lists of strings are passed over, and the metadata lacks them.
    """
    path = Path(path)
    try:
        stat = path.stat()
    except OSError:
        return _open_gguf(path, 0, 0, vocabulary)  # which says what is wrong
    return _open_gguf(path, stat.st_size, stat.st_mtime_ns, vocabulary)


def forget_gguf() -> None:
    """Let go of the files parsed so far: a vocabulary of strings is 20 MB and more that nobody asks for after the start."""
    _open_gguf.cache_clear()


@functools.lru_cache(maxsize=16)
def _open_gguf(path: Path, size: int, changed: int, vocabulary: bool) -> GGUFFile:
    try:
        with open(path, "rb") as file:
            # Copy-on-write: torch wants writable memory, and nothing we do reaches the file.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}.") from None
    return _HeaderReader(path, data, vocabulary).read()


def open_gguf_parts(path: str | Path) -> list[GGUFFile]:
    """Open a GGUF file and, when it is one of a split set (`…-00001-of-00003.gguf`), all of its siblings in order.

    The first part carries the metadata of the whole.
    """
    return [open_gguf(part) for part in split_parts(path)]


def split_parts(path: str | Path) -> list[Path]:
    """The files of the set that `path` belongs to; just `path` for an unsplit file."""
    path = Path(path)
    match = _SPLIT_NAME.match(path.name)
    if not match:
        return [path]
    stem, count = match["stem"], int(match["count"])
    parts = [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise LoadError(f"{path} is one of {count} parts, and these are missing beside it: {', '.join(missing)}.")
    return parts


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Every key and value of a GGUF file's metadata; arrays come as lists, strings as str.

    For a split set, give any of the parts: the metadata is that of the first.
    """
    return open_gguf(split_parts(path)[0]).metadata


class _HeaderReader:
    """Cursor over the mapped bytes. Every length is checked against the file before it is used."""

    def __init__(self, path: Path, data: mmap.mmap, vocabulary: bool):
        self.path = path
        self.vocabulary = vocabulary
        self.data = data
        self.size = len(data)
        self.position = 0

    def read(self) -> GGUFFile:
        if self.data[:4] != MAGIC:
            raise LoadError(f"{self.path} is not a GGUF file (it starts with {self.data[:4]!r}).")
        self.position = 4
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "it is big-endian" if swapped in SUPPORTED_VERSIONS else f"its version is {version}"
            raise LoadError(f"{self.path} cannot be read: {why}; little-endian versions 2 and 3 are supported.")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            value = self._value(self._scalar("I"))
            if key in metadata:
                raise LoadError(f"{self.path} has the metadata key {key!r} twice.")
            if value is not None:
                metadata[key] = value
        tensors = self._tensor_infos(num_tensors, int(metadata.get("general.alignment", DEFAULT_ALIGNMENT)))
        return GGUFFile(self.path, version, metadata, tensors, self.data)

    def _tensor_infos(self, count: int, alignment: int) -> dict[str, GGUFTensorInfo]:
        if alignment <= 0:
            raise LoadError(f"{self.path} is damaged: general.alignment is {alignment}.")
        raw: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = self._string()
            num_dims = self._scalar("I")
            if num_dims > MAX_DIMS:
                raise LoadError(f"{self.path} is damaged: tensor {name!r} has {num_dims} dimensions.")
            dims = tuple(self._scalar("Q") for _ in range(num_dims))
            raw.append((name, dims[::-1], self._scalar("I"), self._scalar("Q")))
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for name, shape, type_id, offset in raw:
            if name in tensors:
                raise LoadError(f"{self.path} has the tensor {name!r} twice.")
            tensors[name] = self._tensor_info(name, shape, type_id, data_start + offset)
        return tensors

    def _tensor_info(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensorInfo:
        if type_id not in GGML_TYPES:
            return GGUFTensorInfo(name, f"type {type_id}", shape, offset, 0)
        type_name, block_elements, block_bytes = GGML_TYPES[type_id]
        num_elements = 1
        for dim in shape:
            num_elements *= dim
        if (shape[-1] if shape else 1) % block_elements:
            raise LoadError(
                f"{self.path} is damaged: rows of tensor {name!r} have {shape[-1]} values, "
                f"not a multiple of the {block_elements} of a {type_name} block."
            )
        num_bytes = num_elements // block_elements * block_bytes
        if offset + num_bytes > self.size:
            raise LoadError(
                f"{self.path} is truncated: tensor {name!r} needs bytes {offset} to {offset + num_bytes}, "
                f"the file has {self.size}."
            )
        return GGUFTensorInfo(name, type_name, shape, offset, num_bytes)

    def _advance(self, num_bytes: int) -> int:
        """Move past `num_bytes`; returns where they start."""
        start = self.position
        if start + num_bytes > self.size:
            raise LoadError(f"{self.path} is truncated: its header goes past the end of the file ({self.size} bytes).")
        self.position = start + num_bytes
        return start

    def _scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self._advance(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        start = self._advance(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def _value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _TYPE_STRING:
            return self._string()
        if type_id == _TYPE_ARRAY:
            if depth == _MAX_ARRAY_NESTING:
                raise LoadError(f"{self.path} is damaged: arrays nested deeper than {_MAX_ARRAY_NESTING}.")
            return self._array(depth)
        if type_id not in _SCALARS:
            raise LoadError(f"{self.path} is damaged: unknown metadata value type {type_id}.")
        return self._scalar(_SCALARS[type_id])

    def _array(self, depth: int) -> list[Any] | None:
        element_type, count = self._scalar("I"), self._scalar("Q")
        if element_type == _TYPE_STRING:
            if self.vocabulary:
                return self._strings(count)
            self._skip_strings(count)
            return None
        if element_type == _TYPE_ARRAY:
            return [self._value(_TYPE_ARRAY, depth + 1) for _ in range(count)]
        if element_type not in _SCALARS:
            raise LoadError(f"{self.path} is damaged: unknown metadata value type {element_type}.")
        code = "B" if element_type == _TYPE_BOOL else _SCALARS[element_type]
        numbers = array(code)
        start = self._advance(count * numbers.itemsize)
        numbers.frombytes(self.data[start : self.position])
        if sys.byteorder == "big":
            numbers.byteswap()
        return [bool(n) for n in numbers] if element_type == _TYPE_BOOL else numbers.tolist()

    def _skip_strings(self, count: int) -> None:
        data, position, read_length = self.data, self.position, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                position += 8 + read_length(data, position)[0]
        except (struct.error, OverflowError):
            position = self.size + 1
        self._advance(position - self.position)  # raises where they go past the end

    def _strings(self, count: int) -> list[str]:
        """An array of strings. Vocabularies have hundreds of thousands, so this loop is kept flat."""
        data, position, size = self.data, self.position, self.size
        read_length = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = position + 8
            if start > size:
                self._advance(start - self.position)  # raises: truncated
            position = start + read_length(data, position)[0]
            if position > size:
                self._advance(position - self.position)  # raises: truncated
            strings.append(data[start:position].decode("utf-8", errors="replace"))
        self.position = position
        return strings
