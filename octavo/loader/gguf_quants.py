"""ggml block formats decoded with torch, on whatever device the blocks lie.

A tensor is a sequence of blocks along its last dimension; each block packs 32 or 256 small integers with the scales
that turn them into floats. Every decoder takes blocks `[num_blocks, bytes a block]` uint8 and returns float32
`[num_blocks, values a block]`. The order of the multiplications and additions is that of the format's reference, so the
results are equal to it bit for bit: keep it when touching this file, and fuse nothing.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.loader.gguf_file import GGML_TYPES
from octavo.ops.linear.packed import NONLINEAR

# Values decoded at a time on a CPU; the intermediate tensors stay within its cache.
CHUNK_VALUES = 1 << 17
# On an accelerator launches cost more than memory; large tensors still go in pieces to bound the working space.
CHUNK_VALUES_ACCELERATOR = 1 << 25

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
INTEGER_TYPES = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
PLAIN_TYPES = FLOAT_TYPES | INTEGER_TYPES


def dequantize(data: Tensor, ggml_type: str, dtype: torch.dtype) -> Tensor:
    """Decode raw bytes `[..., bytes a row]` of any supported type to `[..., values a row]`.

    Block types come out as `dtype` (decoded in float32, then rounded once); plain types keep their own.
    """
    if ggml_type in PLAIN_TYPES:
        return data.view(PLAIN_TYPES[ggml_type])
    decode = DECODERS.get(ggml_type)
    if decode is None:
        raise LoadError(f"GGUF type {ggml_type} cannot be decoded; supported: {', '.join([*PLAIN_TYPES, *DECODERS])}")
    block_values, block_bytes = _BLOCK_SIZES[ggml_type]
    blocks = data.reshape(-1, block_bytes)
    out = torch.empty(blocks.shape[0], block_values, dtype=dtype, device=data.device)
    on_cpu = data.device.type == "cpu"
    step = (CHUNK_VALUES if on_cpu else CHUNK_VALUES_ACCELERATOR) // block_values

    def decode_piece(start: int) -> None:
        out[start : start + step] = decode(blocks[start : start + step])

    starts = range(0, blocks.shape[0], step)
    if on_cpu:
        _run_in_threads(decode_piece, starts)
    else:
        for start in starts:
            decode_piece(start)
    return out.view(*data.shape[:-1], data.shape[-1] // block_bytes * block_values)


def _run_in_threads(work: Callable[[int], None], items: Sequence[int]) -> None:
    """Spread pieces of CPU work over as many threads as torch would use, each running its operators alone.

    A decoder is a chain of cheap operators. Torch's own threads would meet at a barrier after each of them, which is
    slow everywhere and takes twenty times as long when other processes want the cores.
    """
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # for this thread, and what threads made from now on start with
        if num_threads == 1 or len(items) == 1:
            for item in items:
                work(item)
            return
        with ThreadPoolExecutor(min(num_threads, len(items))) as pool:
            for _ in pool.map(work, items):
                pass
    finally:
        torch.set_num_threads(num_threads)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at a byte offset of each block: `[num_blocks, 1]` float32."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, bits: int, count: int) -> Tensor:
    """Split bytes `[..., k]` into their `count` fields of `bits` bits, lowest first: `[..., count, k]` uint8."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> (bits * i)) & mask for i in range(count)], dim=-2)


def _bits32(blocks: Tensor, offset: int) -> Tensor:
    """Four bytes at an offset as 32 single bits, lowest first: `[num_blocks, 32]` uint8."""
    return _fields(blocks[:, offset : offset + 4], 1, 8).transpose(-1, -2).reshape(-1, 32)


def _nibbles32(blocks: Tensor, offset: int) -> Tensor:
    """Sixteen bytes as 32 values: all low nibbles, then all high ones. `[num_blocks, 32]` uint8."""
    return _fields(blocks[:, offset : offset + 16], 4, 2).reshape(-1, 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles32(blocks, 2).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles32(blocks, 4).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles32(blocks, 6) | (_bits32(blocks, 2) << 4)
    return _half(blocks, 0) * (q.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles32(blocks, 8) | (_bits32(blocks, 4) << 4)
    return _half(blocks, 0) * q.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _iq4_nl(blocks: Tensor) -> Tensor:
    values = torch.tensor(NONLINEAR, dtype=torch.float32, device=blocks.device)
    return _half(blocks, 0) * values[_nibbles32(blocks, 2).int()]


# The K formats: 256 values in sub-blocks of 16 or 32, each with its own small scale.


def _q2_k(blocks: Tensor) -> Tensor:
    """16 bytes of (scale, minimum) nibbles, 64 bytes of 2-bit values, d, dmin. Sub-blocks of 16."""
    scales = blocks[:, :16]
    scale = (_half(blocks, 80) * (scales & 15).float()).unsqueeze(-1)
    minimum = (_half(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    q = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16)
    return (scale * q.float() - minimum).view(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of high bits, 64 of low 2-bit values, 12 of 6-bit scales, d. Sub-blocks of 16."""
    # Scales: low nibbles of bytes 0-7 (scales 0-7, then 8-15), their two high bits in bytes 8-11.
    low = _fields(blocks[:, 96:104], 4, 2).reshape(-1, 16)
    high = _fields(blocks[:, 104:108], 2, 4).reshape(-1, 16)
    scale = (_half(blocks, 108) * ((low | (high << 4)).float() - 32)).unsqueeze(-1)
    q = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16).float()
    # A high bit that is not set takes 4 away.
    borrow = (_fields(blocks[:, :32], 1, 8).reshape(-1, 16, 16) ^ 1) << 2
    return (scale * (q - borrow.float())).view(-1, 256)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima, each `[num_blocks, 8]` uint8.

    Bytes 0-3 and 4-7 hold the first four of each in their low six bits; bytes 8-11 hold the low nibbles of the last
    four (scale low, minimum high), whose top two bits are the top bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=-1)
    return scales, minima


def _q4_k(blocks: Tensor) -> Tensor:
    """d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles. Sub-blocks of 32."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales.float()).unsqueeze(-1)
    minimum = (_half(blocks, 2) * minima.float()).unsqueeze(-1)
    q = _fields(blocks[:, 16:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return (scale * q.float() - minimum).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales.float()).unsqueeze(-1)
    minimum = (_half(blocks, 2) * minima.float()).unsqueeze(-1)
    low = _fields(blocks[:, 48:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    high = _fields(blocks[:, 16:48], 1, 8)
    return (scale * (low | (high << 4)).float() - minimum).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of high 2-bit values, 16 int8 scales, d. Sub-blocks of 16."""
    scale = (_half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()).unsqueeze(-1)
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), 4, 2).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4).reshape(-1, 8, 32)
    q = (low | (high << 4)).float() - 32
    return (scale * q.view(-1, 16, 16)).view(-1, 256)


DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}

_BLOCK_SIZES: dict[str, Sequence[int]] = {name: (values, size) for name, values, size in GGML_TYPES.values()}
