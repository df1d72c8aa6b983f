"""Every block format equals the public reference reader bit for bit (FC-155)."""

import gguf
import numpy as np
import pytest
import torch

from octavo.errors import LoadError
from octavo.loader import gguf_quants
from octavo.loader.gguf_quants import DECODERS, dequantize

# Byte offsets of the float16 scales in a block; other bytes may be anything.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}


def random_blocks(ggml_type: str, num_rows: int, blocks_per_row: int, seed: int = 0) -> np.ndarray:
    """Random bytes `[num_rows, row bytes]` whose scales are finite floats of either sign."""
    rng = np.random.default_rng(seed)
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml_type]]
    blocks = rng.integers(0, 256, (num_rows * blocks_per_row, size), dtype=np.uint8)
    for offset in HALVES[ggml_type]:
        scales = rng.normal(0, 0.1, (len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("ggml_type", list(DECODERS))
def test_equals_the_reference_reader_bit_for_bit(ggml_type, num_rows, monkeypatch):
    monkeypatch.setattr(gguf_quants, "CHUNK_VALUES", 1024)  # several pieces, the last one short
    data = random_blocks(ggml_type, num_rows, 3)
    reference = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[ggml_type])
    decoded = dequantize(torch.from_numpy(data), ggml_type, torch.float32)
    assert decoded.shape == reference.shape
    assert np.array_equal(decoded.numpy().view(np.uint32), reference.view(np.uint32))


@pytest.mark.parametrize("ggml_type", ["F32", "F16", "BF16"])
def test_plain_types_keep_their_bits_and_type(ggml_type):
    dtype = gguf_quants.FLOAT_TYPES[ggml_type]
    values = torch.randn(5, 6).to(dtype)
    decoded = dequantize(values.view(torch.uint8), ggml_type, torch.float32)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, values)


def test_narrow_results_are_rounded_once_from_float32():
    data = torch.from_numpy(random_blocks("Q4_K", 3, 2))
    wide = dequantize(data, "Q4_K", torch.float32)
    assert torch.equal(dequantize(data, "Q4_K", torch.bfloat16), wide.bfloat16())


def test_leading_dimensions_are_kept():
    data = torch.from_numpy(random_blocks("Q8_0", 6, 2)).view(2, 3, -1)
    assert dequantize(data, "Q8_0", torch.float32).shape == (2, 3, 64)


def test_a_type_without_a_decoder_is_refused_by_name():
    with pytest.raises(LoadError, match="IQ2_XXS"):
        dequantize(torch.zeros(1, 66, dtype=torch.uint8), "IQ2_XXS", torch.float32)
