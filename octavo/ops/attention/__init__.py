"""Attention over the paged KV cache, for ragged batches that mix prefill chunks and decodes."""

import torch

from octavo.ops.registry import op
from octavo.ops.rope import qkv_rope_write


def _request_bounds(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc_cpu: list[int] | None,
    seq_lens_cpu: list[int] | None,
) -> tuple[list[int], list[int]]:
    return (
        query_start_loc.tolist() if query_start_loc_cpu is None else query_start_loc_cpu,
        seq_lens.tolist() if seq_lens_cpu is None else seq_lens_cpu,
    )


@op
def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
    query_start_loc_cpu: list[int] | None = None,
    seq_lens_cpu: list[int] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention of each request's new tokens over all its cached ones, computed in float32.

    q [tokens, num_heads, head_dim]; kv_cache [num_blocks, 2, block_size, num_kv_heads, head_dim], whose blocks may lie apart,
    with this step's keys already written; block_table [requests, max_blocks] int32; query_start_loc [requests + 1]; seq_lens
    [requests]. There may be requests without tokens.
    `window` > 0 lets a query see the last `window` tokens, itself included; `softcap` bounds scores by
    softcap * tanh(score / softcap); `sinks` [num_heads] are logits that take part in the softmax and hold no value;
    `distance_bias` [num_heads] are slopes, which add slope * (key position - query position) to a score (ALiBi); of
    [num_heads, n], n > 1, the score of the key d tokens back gets the number min(d, n - 1) (T5). The host lists spare a
    device read where the caller has them. The scales are those of an 8-bit cache, see `write_kv`. Returns [tokens,
    num_heads, head_dim] in q's dtype.
    """
    starts, lens = _request_bounds(query_start_loc, seq_lens, query_start_loc_cpu, seq_lens_cpu)
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    for r, seq_len in enumerate(lens):
        start, end = starts[r], starts[r + 1]
        if end == start:
            continue
        blocks = block_table[r, : -(-seq_len // block_size)]
        k = k_scale * kv_cache[blocks, 0].flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
        v = v_scale * kv_cache[blocks, 1].flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        query_pos = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
        key_pos = torch.arange(seq_len, device=q.device)[None, :]
        if distance_bias is not None:
            scores = scores + _bias(distance_bias.float(), query_pos - key_pos)
        visible = key_pos <= query_pos
        if window > 0:
            visible &= key_pos > query_pos - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            probs = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        else:
            probs = scores.softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", probs, v).to(q.dtype)
    return out


def _bias(distance_bias: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    if distance_bias.dim() == 1:
        return -distance_bias[:, None, None] * distance
    return distance_bias[:, distance.clamp(0, distance_bias.shape[1] - 1)]


@op
def decode_attention(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """`qkv_rope_write` then `paged_attention` for a step in which every request has one token.

    qkv [requests, (num_heads + 2 * num_kv_heads) * head_dim]; the other arguments as in those two. A row with seq_len 0
    (graph padding) writes nothing; its output is unspecified but finite. Returns [requests, num_heads, head_dim].
    """
    q = qkv_rope_write.reference(
        qkv, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, q_norm, k_norm, eps, interleaved,
        k_scale, v_scale,
    )  # fmt: skip
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_attention.reference(
        q, kv_cache, block_table, starts, seq_lens, 1, max_seq_len, scale, window, softcap, sinks, distance_bias,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


@decode_attention.register("composed")
def _decode_attention_composed(
    qkv,
    positions,
    cos_sin,
    kv_cache,
    slot_mapping,
    block_table,
    seq_lens,
    max_seq_len,
    num_heads,
    num_kv_heads,
    scale,
    q_norm=None,
    k_norm=None,
    eps=1e-6,
    interleaved=False,
    window=0,
    softcap=0.0,
    sinks=None,
    distance_bias=None,
    k_scale=1.0,
    v_scale=1.0,
):
    """The two operators one after the other, each by its fastest provider."""
    q = qkv_rope_write(
        qkv, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, q_norm, k_norm, eps, interleaved,
        k_scale, v_scale,
    )  # fmt: skip
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_attention(
        q, kv_cache, block_table, starts, seq_lens, 1, max_seq_len, scale, window, softcap, sinks, distance_bias,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for heads, kv_heads, dim, block_size, query_lens, seq_lens, kwargs in (
        (8, 2, 64, 16, (1, 1, 1), (5, 33, 128), {}),
        (4, 4, 128, 64, (1, 17, 5, 1), (70, 17, 100, 1), {}),
        (6, 2, 64, 16, (9, 1), (40, 64), {"window": 12}),
        (9, 3, 64, 16, (1, 6), (50, 6), {"softcap": 20.0}),
        (8, 1, 64, 16, (1, 3), (50, 20), {"sinks": True}),
        (8, 8, 64, 16, (2, 1), (20, 31), {"distance_bias": (8,)}),
        (6, 3, 64, 16, (17, 1, 1), (20, 31, 5), {"distance_bias": (6, 13)}),
        (8, 2, 64, 16, (1, 17, 5), (70, 17, 100), {"fp8": True}),
        (4, 2, 512, 16, (1, 0, 17, 0, 1, 0), (5, 0, 40, 0, 33, 0), {"apart": True}),
    ):
        num_blocks = sum(-(-n // block_size) for n in seq_lens) + 1
        cache_dtype = torch.float8_e4m3fn if "fp8" in kwargs else dtype
        pages = 2 if "apart" in kwargs else 1  # in a block, of which this layer's is the last
        shape = (num_blocks, pages, 2, block_size, kv_heads, dim)
        kv_cache = torch.randn(shape, generator=rng).to(device, cache_dtype)[:, -1]
        order = (torch.randperm(num_blocks - 1, generator=rng) + 1).tolist()
        table = torch.zeros(len(seq_lens), max(-(-n // block_size) for n in seq_lens), dtype=torch.int32)
        for r, n in enumerate(seq_lens):
            for b in range(-(-n // block_size)):
                table[r, b] = order.pop()
        starts = [0]
        for n in query_lens:
            starts.append(starts[-1] + n)
        # Queries wide enough that the softmax is far from uniform: a wrong mask or page then shows.
        q = (3 * torch.randn(starts[-1], heads, dim, generator=rng)).to(device, dtype)
        args = (
            q,
            kv_cache,
            table.to(device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            max(query_lens),
            max(seq_lens),
            dim**-0.5,
        )
        yield (
            *args,
            kwargs.get("window", 0),
            kwargs.get("softcap", 0.0),
            torch.randn(heads, generator=rng).to(device) if "sinks" in kwargs else None,
            torch.rand(kwargs["distance_bias"], generator=rng).to(device)  # type: ignore[arg-type]
            if "distance_bias" in kwargs
            else None,
            None,
            None,
            *((0.5, 2.0) if "fp8" in kwargs else ()),
        )


paged_attention.inputs = _inputs


def _bench_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    """Decoding at 1,024 tokens of context, one request and sixteen, then a prefill of 1,024 tokens."""
    heads, kv_heads, dim, block_size, seq_len = 32, 8, 128, 16, 1024
    for num_requests, query_len in ((1, 1), (16, 1), (1, seq_len)):
        width = seq_len // block_size
        shape = (num_requests * width + 1, 2, block_size, kv_heads, dim)
        kv_cache = torch.randn(shape, generator=rng).to(device, dtype)
        table = torch.arange(1, num_requests * width + 1, dtype=torch.int32).view(num_requests, width)
        starts = torch.arange(num_requests + 1, dtype=torch.int32) * query_len
        yield (
            torch.randn(num_requests * query_len, heads, dim, generator=rng).to(device, dtype),
            kv_cache,
            table.to(device),
            starts.to(device),
            torch.full((num_requests,), seq_len, dtype=torch.int32, device=device),
            query_len,
            seq_len,
            dim**-0.5,
        )


def _bytes_and_flops(q, kv_cache, block_table, query_start_loc, seq_lens, *rest):
    """Queries, results and each request's own keys and values once; the two products over the visible ones.

    Windows are not looked at: with one, both are upper bounds.
    """
    head_size = kv_cache.shape[-1] * kv_cache.element_size()
    kv_bytes = 2 * int(seq_lens.sum()) * kv_cache.shape[3] * head_size
    query_lens = (query_start_loc[1:] - query_start_loc[:-1]).long()
    # Query i of n sees seq_len - n + 1 + i keys.
    visible = int((query_lens * seq_lens - query_lens * (query_lens - 1) // 2).sum())
    return 2 * q.numel() * q.element_size() + kv_bytes, 4 * visible * q.shape[1] * q.shape[2]


paged_attention.bench_inputs = _bench_inputs
paged_attention.bytes_and_flops = _bytes_and_flops
