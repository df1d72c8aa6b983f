"""GGUF files for tests, written with the public package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, str]],
) -> Path:
    """Write a file. Metadata keys are complete, or start with "." for `<architecture>.`; a tensor may come as raw block
    bytes with the name of their type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, architecture + key if key.startswith(".") else key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            data, ggml_type = tensor
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[ggml_type])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


LLAMA_METADATA: dict[str, Any] = {
    ".block_count": 2,
    ".context_length": 256,
    ".embedding_length": 64,
    ".feed_forward_length": 128,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 1e-5,
    ".rope.dimension_count": 16,
    ".rope.freq_base": 50000.0,
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "<|im_end|>"],
    "tokenizer.ggml.token_type": [3, 3, 1, 3],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def interleave_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What the llama converter does to q and k: rows i and i + half of a head become neighbours."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + row
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for row in (pair, pair + head_dim // 2)
    ]
    return weight[order]
