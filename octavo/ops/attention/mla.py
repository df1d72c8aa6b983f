"""Latent attention (DeepSeek-V2): what is cached of a token is one normalised latent and one rotated key for all heads.

    cache [num_blocks, block_size, rank + rope_dim]: latent | rotated key

Keys and values of a head are linear in the latent: k = [latent @ up_k.T | rotated key], v = latent @ up_v.T. Prefill computes
them; decode moves the two products over to the query and the result (`absorbed`), so that every head attends to the latents
as they lie in the cache: one key head of width rank + rope_dim, whose first rank elements are the values.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from octavo.ops.attention import _request_bounds
from octavo.ops.norm import rms_norm
from octavo.ops.registry import op
from octavo.ops.rope import apply_rope


@op
def latent_rope_write(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Normalise the latents, rotate keys and queries, write latents and keys; returns the rotated part of q.

    q [tokens, num_heads, nope_dim + rope_dim]; latent [tokens, rank + rope_dim] as projected; cos_sin [positions, rope_dim];
    slot -1 is dropped. Returns [tokens, num_heads, rope_dim].
    """
    rope_dim = cos_sin.shape[-1]
    table = cos_sin[positions]
    normed = rms_norm.reference(latent[:, :-rope_dim], norm_weight, eps)
    key = apply_rope(latent[:, None, -rope_dim:], table, interleaved)[:, 0]
    # A dropped slot lands in block 0, which no request owns: no data-dependent shape is needed.
    slots = slot_mapping.clamp(min=0)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat((normed, key), -1).to(cache.dtype)
    return apply_rope(q[..., -rope_dim:], table, interleaved)


@op
def latent_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a few tokens a request over the cached latents, computed in float32.

    q_latent [tokens, num_heads, rank] (any strides), q_rope [tokens, num_heads, rope_dim]; block_table [requests,
    max_blocks] int32; seq_lens [requests]; query_start_loc [requests + 1], or None: every request has one token. A row with
    seq_len 0 gives finite numbers. Returns [tokens, num_heads, rank].
    """
    if query_start_loc is not None:
        query_lens = query_start_loc[1:] - query_start_loc[:-1]
        hidden = (
            query_start_loc[1:].repeat_interleave(query_lens) - 1 - torch.arange(len(q_latent), device=cache.device)
        )
        seq_lens = seq_lens.repeat_interleave(query_lens) - hidden
        block_table = block_table.repeat_interleave(query_lens, 0)
    block_size, rank = cache.shape[1], q_latent.shape[-1]
    longest = min(max_seq_len, block_table.shape[1] * block_size)
    blocks = block_table[:, : -(-longest // block_size)].long()
    kv = cache[blocks].flatten(1, 2)[:, :longest].float()
    scores = torch.einsum("rhd,rkd->rhk", torch.cat((q_latent, q_rope), -1).float(), kv) * scale
    # Key 0 stands in where there is none, so that the softmax of an empty row is finite.
    visible = torch.arange(longest, device=cache.device) < seq_lens.clamp(min=1)[:, None]
    probs = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return torch.einsum("rhk,rkd->rhd", probs, kv[..., :rank]).to(q_latent.dtype)


@op
def latent_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    query_start_loc_cpu: list[int] | None = None,
    seq_lens_cpu: list[int] | None = None,
) -> torch.Tensor:
    """Causal attention of each request's new tokens over all its cached ones, keys and values computed from the latents.

    q_nope [tokens, num_heads, nope_dim], q_rope [tokens, num_heads, rope_dim]; up [num_heads, nope_dim + value_dim, rank]:
    a head's key rows, then its value rows; the rest as in `paged_attention`. Returns [tokens, num_heads, value_dim].
    """
    starts, lens = _request_bounds(query_start_loc, seq_lens, query_start_loc_cpu, seq_lens_cpu)
    num_heads, nope_dim, rank = up.shape[0], q_nope.shape[-1], up.shape[-1]
    out = q_nope.new_zeros(q_nope.shape[0], num_heads, up.shape[1] - nope_dim)
    for r, seq_len in enumerate(lens):
        start, end = starts[r], starts[r + 1]
        if end == start:
            continue
        kv = cache[block_table[r, : -(-seq_len // cache.shape[1])]].flatten(0, 1)[:seq_len].to(q_nope.dtype)
        expanded = torch.einsum("kr,hdr->hkd", kv[:, :rank], up)
        k = torch.cat((expanded[..., :nope_dim], kv[None, :, rank:].expand(num_heads, -1, -1)), -1)
        q = torch.cat((q_nope[start:end], q_rope[start:end]), -1).transpose(0, 1)
        mask = None
        if end - start < seq_len:
            query_pos = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
            mask = torch.arange(seq_len, device=q.device) <= query_pos
        out[start:end] = F.scaled_dot_product_attention(
            q, k, expanded[..., nope_dim:], attn_mask=mask, is_causal=mask is None, scale=scale
        ).transpose(0, 1)
    return out


def absorbed(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    query_start_loc: torch.Tensor | None = None,
    decode: Callable[..., torch.Tensor] = latent_decode,
) -> torch.Tensor:
    """`latent_attention` with the products moved over to query and result; query_start_loc as in `latent_decode`."""
    nope_dim = q_nope.shape[-1]
    q_latent = torch.bmm(q_nope.transpose(0, 1), up[:, :nope_dim]).transpose(0, 1)
    attended = decode(q_latent, q_rope, cache, block_table, seq_lens, max_seq_len, scale, query_start_loc)
    return torch.bmm(attended.transpose(0, 1), up[:, nope_dim:].transpose(1, 2)).transpose(0, 1)


@op
def latent_decode_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    up: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    interleaved: bool,
) -> torch.Tensor:
    """`latent_rope_write` then `latent_attention`, absorbed, for a step in which every request has one token.

    The arguments are those of the two. A row with seq_len 0 (graph padding) writes nothing; its output is unspecified but
    finite. Returns [requests, num_heads, value_dim].
    """
    write, rotary_dim = latent_rope_write.reference, cos_sin.shape[-1]
    q_rope = write(q, latent, positions, cos_sin, norm_weight, eps, cache, slot_mapping, interleaved)
    q_nope, decode = q[..., :-rotary_dim], latent_decode.reference
    return absorbed(q_nope, q_rope, up, cache, block_table, seq_lens, max_seq_len, scale, decode=decode)


@latent_decode_attention.register("composed")
def latent_decode_attention_composed(
    q,
    latent,
    positions,
    cos_sin,
    norm_weight,
    eps,
    up,
    cache,
    slot_mapping,
    block_table,
    seq_lens,
    max_seq_len,
    scale,
    interleaved,
):
    """One operator after the other, each by its fastest provider."""
    q_rope = latent_rope_write(q, latent, positions, cos_sin, norm_weight, eps, cache, slot_mapping, interleaved)
    q_nope = q[..., : -cos_sin.shape[-1]]
    return absorbed(q_nope, q_rope, up, cache, block_table, seq_lens, max_seq_len, scale)


def _setup(
    rng: torch.Generator, dtype: torch.dtype, device: str, seq_lens: tuple[int, ...], width: int, spare: int = 0
):
    """A cache of random latents and a shuffled block table for requests of `seq_lens` tokens.

    `spare`: numbers that are something else's, behind each latent.
    """
    block_size = 16
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 1
    cache = torch.randn(num_blocks, block_size, width + spare, generator=rng).to(device, dtype)[..., :width]
    order = (torch.randperm(num_blocks - 1, generator=rng) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(-(-n // block_size) for n in seq_lens), dtype=torch.int32)
    for r, n in enumerate(seq_lens):
        for b in range(-(-n // block_size)):
            table[r, b] = order.pop()
    return cache, table.to(device), torch.tensor(seq_lens, dtype=torch.int32, device=device)


_SHAPES = ((4, 64, 16, 0), (20, 128, 32, 24))  # heads, rank, rope_dim, spare


def _write_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for heads, rank, rope_dim, spare in _SHAPES:
        for interleaved in (False, True):
            cache, _, _ = _setup(rng, dtype, device, (40, 7), rank + rope_dim, spare)
            q = torch.randn(3, heads, 24 + rope_dim, generator=rng).to(device, dtype)
            latent = torch.randn(3, rank + rope_dim, generator=rng).to(device, dtype)
            positions = torch.tensor([5, 0, 9], device=device)
            angles = torch.rand(10, rope_dim // 2, generator=rng) * 6
            table = torch.cat((angles.cos(), angles.sin()), -1).to(device)
            norm = (1 + 0.1 * torch.randn(rank, generator=rng)).to(device, dtype)
            slots = torch.tensor([17, 33, 40], device=device)
            yield q, latent, positions, table, norm, 1e-6, cache, slots, interleaved


def _decode_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for heads, rank, rope_dim, spare in _SHAPES:
        seq_lens = (1, 70, 33, 260)
        cache, table, lens = _setup(rng, dtype, device, seq_lens, rank + rope_dim, spare)
        # Queries wide enough that the softmax is far from uniform: a wrong mask or page then shows.
        q = (2 * torch.randn(len(seq_lens), heads, rank + rope_dim, generator=rng)).to(device, dtype)
        args = q[..., :rank], q[..., rank:], cache, table, lens, max(seq_lens), (rank + rope_dim) ** -0.5
        yield args
        yield *args[:3], table[:3], lens[:3], *args[5:], torch.tensor([0, 1, 3, 4], dtype=torch.int32, device=device)


def _attention_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for (heads, rank, rope_dim, spare), query_lens in itertools.product(_SHAPES, ((1, 1, 1), (1, 12, 33))):
        seq_lens = (1, 70, 33)
        cache, table, lens = _setup(rng, dtype, device, seq_lens, rank + rope_dim, spare)
        starts_cpu = [0, *itertools.accumulate(query_lens)]
        starts = torch.tensor(starts_cpu, dtype=torch.int32, device=device)
        up = (torch.randn(heads, 24 + 40, rank, generator=rng) / rank**0.5).to(device, dtype)
        q = (2 * torch.randn(starts_cpu[-1], heads, 24 + rope_dim, generator=rng)).to(device, dtype)
        scale = (24 + rope_dim) ** -0.5
        yield (
            q[..., :24], q[..., 24:], up, cache, table, starts, lens, max(query_lens), max(seq_lens), scale, starts_cpu,
            list(seq_lens),
        )  # fmt: skip


def _step_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for heads, rank, rope_dim, spare in _SHAPES:
        seq_lens = (1, 70, 260)
        cache, table, lens = _setup(rng, dtype, device, seq_lens, rank + rope_dim, spare)
        q = (2 * torch.randn(3, heads, 24 + rope_dim, generator=rng)).to(device, dtype)
        latent = torch.randn(3, rank + rope_dim, generator=rng).to(device, dtype)
        positions = lens.long() - 1
        angles = torch.rand(260, rope_dim // 2, generator=rng) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
        norm = (1 + 0.1 * torch.randn(rank, generator=rng)).to(device, dtype)
        up = (torch.randn(heads, 24 + 40, rank, generator=rng) / rank**0.5).to(device, dtype)
        slots = table.long().gather(1, positions[:, None] // 16)[:, 0] * 16 + positions % 16
        scale = (24 + rope_dim) ** -0.5
        yield q, latent, positions, cos_sin, norm, 1e-6, up, cache, slots, table, lens, max(seq_lens), scale, True


latent_rope_write.inputs = _write_inputs
latent_decode.inputs = _decode_inputs
latent_attention.inputs = _attention_inputs
latent_decode_attention.inputs = _step_inputs
# Absorbed, another intermediate is rounded to 16 bits.
latent_attention.tolerance[torch.bfloat16] = latent_decode_attention.tolerance[torch.bfloat16] = (5e-2, 5e-2)
