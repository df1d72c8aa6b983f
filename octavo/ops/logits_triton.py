"""Triton kernels behind `octavo.ops.logits`."""

import torch
import triton
import triton.language as tl

from octavo.ops.triton_utils import launch

# Bit 30 of a count says that the token is in the prompt; a context is far shorter than 2^30.
_IN_PROMPT = tl.constexpr(1 << 30)
# Elements a program handles; both kernels are bound by memory, 8 to 16 elements a thread keep enough loads in flight.
_BLOCK = 1024
# Products and sums are rounded apart, as in the reference.
_EXACT = {"enable_fp_fusion": False}


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_prompt: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `octavo.ops.logits.apply_penalties`. Rows without a penalty cost two empty launches' worth of programs."""
    num, vocab_size = logits.shape
    counts = torch.zeros(num, vocab_size, dtype=torch.int32, device=logits.device)
    penalties = (repetition, presence, frequency)
    launch(
        _count_tokens, (triton.cdiv(token_ids.shape[1], _BLOCK), num), rows, token_ids, num_prompt, num_tokens,
        *penalties, counts, token_ids.stride(0), vocab_size,
        BLOCK=_BLOCK, **_EXACT,
    )  # fmt: skip
    launch(
        _penalize, (triton.cdiv(vocab_size, _BLOCK), num), logits, rows, *penalties, counts, logits.stride(0), vocab_size,
        BLOCK=_BLOCK, **_EXACT,
    )  # fmt: skip


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor | None) -> None:
    """See `octavo.ops.logits.apply_token_bitmask`."""
    vocab_size = logits.shape[1]
    launch(
        _mask_tokens,
        (triton.cdiv(vocab_size, _BLOCK), bitmask.shape[0]),
        logits,
        bitmask,
        bitmask if indices is None else indices,
        logits.stride(0),
        bitmask.stride(0),
        vocab_size,
        HAS_INDICES=indices is not None,
        BLOCK=_BLOCK,
        **_EXACT,
    )


@triton.jit
def _load_penalties(row, repetition, presence, frequency):
    """(repetition, presence, frequency, whether any of them does anything)."""
    r = tl.load(repetition + row)
    p = tl.load(presence + row)
    f = tl.load(frequency + row)
    return r, p, f, (r != 1.0) | (p != 0.0) | (f != 0.0)


@triton.jit
def _count_tokens(
    rows,  # [num]
    token_ids,  # [max_rows, max_len]
    num_prompt,  # [max_rows]
    num_tokens,  # [num]
    repetition, presence, frequency,  # [max_rows]
    counts,  # out [num, vocab_size], zeroed: times generated, and _IN_PROMPT
    stride, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a stretch of one row's tokens."""
    start = tl.program_id(0) * BLOCK
    i = tl.program_id(1)
    length = tl.load(num_tokens + i)
    if start >= length:
        return
    row = tl.load(rows + i)
    _, _, _, is_penalized = _load_penalties(row, repetition, presence, frequency)
    if not is_penalized:
        return
    place = start + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + row.to(tl.int64) * stride + place, mask=place < length, other=0)
    mine = counts + i.to(tl.int64) * vocab_size + ids
    in_prompt = place < tl.load(num_prompt + row)
    tl.atomic_or(mine, _IN_PROMPT, mask=in_prompt & (place < length), sem="relaxed")
    tl.atomic_add(mine, 1, mask=(place < length) & (place >= tl.load(num_prompt + row)), sem="relaxed")


@triton.jit
def _penalize(
    logits,  # in and out [num, vocab_size]
    rows,  # [num]
    repetition, presence, frequency,  # [max_rows]
    counts,  # [num, vocab_size]
    stride, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a stretch of one row of logits."""
    i = tl.program_id(1)
    r, p, f, is_penalized = _load_penalties(tl.load(rows + i), repetition, presence, frequency)
    if not is_penalized:
        return
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < vocab_size
    count = tl.load(counts + i.to(tl.int64) * vocab_size + offsets, mask=mask, other=0)
    mine = logits + i.to(tl.int64) * stride + offsets
    x = tl.load(mine, mask=mask, other=0.0)
    repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + r), x * r)
    x = tl.where(count != 0, repeated, x)
    times = count & (_IN_PROMPT - 1)
    x -= f * times.to(tl.float32) + p * (times > 0).to(tl.float32)
    tl.store(mine, x, mask=mask)


@triton.jit
def _mask_tokens(
    logits,  # in and out [num, vocab_size]
    bitmask,  # [n, words]
    indices,  # [n] row of logits, with HAS_INDICES
    stride, bitmask_stride, vocab_size,
    HAS_INDICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a stretch of one masked row."""
    j = tl.program_id(1)
    i = j
    if HAS_INDICES:
        i = tl.load(indices + j).to(tl.int32)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < vocab_size
    words = tl.load(bitmask + j.to(tl.int64) * bitmask_stride + offsets // 32, mask=mask, other=-1)
    is_masked = (words >> (offsets % 32)) & 1 == 0
    tl.store(logits + i.to(tl.int64) * stride + offsets, float("-inf"), mask=mask & is_masked)
