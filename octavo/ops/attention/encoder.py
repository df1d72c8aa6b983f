"""Attention in both directions over whole texts, without a cache: what encoders compute."""

import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F

from octavo.ops.registry import op


@op
def encoder_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    bias: torch.Tensor | None = None,
    query_start_loc_cpu: list[int] | None = None,
) -> torch.Tensor:
    """Attention of every token to all tokens of its own request, computed in float32.

    q [tokens, num_heads, head_dim]; k, v [tokens, num_kv_heads, head_dim]; request r has rows query_start_loc[r] …
    query_start_loc[r + 1]. `window` > 0 lets a token see those less than `window` away, on both sides; `bias`
    [num_heads, max_query_len, max_query_len] is added to the scaled scores (relative positions: a shorter request
    takes the corner). Returns [tokens, num_heads, head_dim] in q's dtype.
    """
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for start, end in _bounds(query_start_loc, query_start_loc_cpu):
        keys, values = (t[start:end].float().repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * scale
        if bias is not None:
            scores = scores + bias[:, : end - start, : end - start].float()
        if window > 0:
            scores = scores.masked_fill(~_near(end - start, window, q.device), float("-inf"))
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out


def _bounds(query_start_loc: torch.Tensor, query_start_loc_cpu: list[int] | None) -> list[tuple[int, int]]:
    starts = query_start_loc.tolist() if query_start_loc_cpu is None else query_start_loc_cpu
    return [(start, end) for start, end in itertools.pairwise(starts) if start < end]


def _near(length: int, window: int, device: torch.device) -> torch.Tensor:
    positions = torch.arange(length, device=device)
    return (positions[:, None] - positions[None, :]).abs() < window


@encoder_attention.register("sdpa")
def _encoder_attention_sdpa(
    q, k, v, query_start_loc, max_query_len, scale, window=0, bias=None, query_start_loc_cpu=None
):
    """torch's scaled_dot_product_attention, one request at a time: no padding, and a result that neighbours cannot touch."""
    out = torch.empty_like(q)
    for start, end in _bounds(query_start_loc, query_start_loc_cpu):
        length = end - start
        mask = None if bias is None else bias[:, :length, :length].to(q.dtype)[None]
        if 0 < window < length:
            near = _near(length, window, q.device)
            mask = near if mask is None else mask.masked_fill(~near, float("-inf"))
        query, key, value = (t[start:end].transpose(0, 1)[None] for t in (q, k, v))
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out[start:end] = attended[0].transpose(0, 1)
    return out


def _has_varlen() -> bool:
    return torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability()[0] >= 8


def _accepts_varlen(q, k, v, query_start_loc, max_query_len, scale, window=0, bias=None, query_start_loc_cpu=None):
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and bias is None and q.shape[-1] <= 256


@encoder_attention.register("varlen", supported=_has_varlen, accepts=_accepts_varlen)
def _encoder_attention_varlen(
    q, k, v, query_start_loc, max_query_len, scale, window=0, bias=None, query_start_loc_cpu=None
):
    """The flash attention that torch ships, over all requests at once."""
    from torch.nn.attention.varlen import varlen_attn

    side = window - 1 if window > 0 else -1
    # torch 2.11 wants a key for every query head, and has no such argument.
    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    return varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        query_start_loc,
        query_start_loc,
        max_query_len,
        max_query_len,
        scale=scale,
        window_size=(side, side),
        **options,
    )


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for heads, kv_heads, dim, lens, window, has_bias in (
        (4, 4, 32, (1, 17, 5), 0, False),
        (6, 2, 64, (9, 40, 1), 0, False),
        (4, 4, 64, (33, 7), 6, False),
        (4, 4, 16, (12, 30), 0, True),
    ):
        starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        # Queries wide enough that the softmax is far from uniform: a wrong mask or border then shows.
        q = (3 * torch.randn(starts[-1], heads, dim, generator=rng)).to(device, dtype)
        k, v = (torch.randn(starts[-1], kv_heads, dim, generator=rng).to(device, dtype) for _ in range(2))
        bias = torch.randn(heads, max(lens), max(lens), generator=rng).to(device) if has_bias else None
        yield q, k, v, torch.tensor(starts, dtype=torch.int32, device=device), max(lens), dim**-0.5, window, bias


encoder_attention.inputs = _inputs
