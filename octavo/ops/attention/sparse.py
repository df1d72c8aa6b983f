"""Sparse latent attention (DeepSeek-V3.2): an indexer chooses the cached tokens that a query sees.

    score of key s for query t = sum over index heads of weight[t, head] * relu(q[t, head] · key[s])

A query sees the `topk` tokens of the highest scores, of itself and those before it. Their latents are gathered into a cache
of the query's own, over which decode goes as over any other; so do prompts, some queries at a time.
"""

import itertools

import torch

from octavo.ops.attention import _request_bounds
from octavo.ops.attention.mla import _setup, absorbed
from octavo.ops.registry import op

# Numbers of an intermediate result: a few queries' scores by heads, or the latents gathered for them.
_ROOM = 2**25


def _best(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions [n, min(topk, num_keys)] of each query's best keys: those it may see first, then any.

    q [n, num_heads, dim], weights [n, num_heads]; keys [num_keys, dim], or [n, num_keys, dim], float32; visible [n].
    """
    scores = torch.matmul(q.float(), keys.transpose(-1, -2)).relu_()
    scores = torch.matmul(weights.float()[:, None], scores)[:, 0]
    scores.masked_fill_(torch.arange(scores.shape[1], device=q.device) >= visible[:, None], float("-inf"))
    return scores.topk(min(topk, scores.shape[1])).indices


@op
def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    topk: int,
    query_start_loc: torch.Tensor | None = None,
    query_start_loc_cpu: list[int] | None = None,
    seq_lens_cpu: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens each query sees, scored in float32: their slots [tokens, topk] int64, and how many they are [tokens] int32.

    q [tokens, num_heads, dim], weights [tokens, num_heads], whose scale does not matter; cache [num_blocks, block_size, dim],
    whose tokens may lie apart; the rest as in `latent_attention`. Without query_start_loc every request has one token, and
    nothing is read from the device. Of fewer than topk tokens, all are seen; the slots behind them are of any token. A row
    with seq_len 0 sees one.
    """
    num_heads, (_, block_size, dim) = q.shape[1], cache.shape
    longest = min(max_seq_len, block_table.shape[1] * block_size)
    slots = torch.zeros(q.shape[0], min(topk, longest), dtype=torch.int64, device=q.device)
    if query_start_loc is None:
        counts = seq_lens.clamp(min=1)
        rows = max(1, _ROOM // (longest * (num_heads + dim)))
        for first in range(0, q.shape[0], rows):
            part = slice(first, first + rows)
            table = block_table[part, : -(-longest // block_size)].long()
            keys = cache[table].flatten(1, 2)[:, :longest].float()
            best = _best(q[part], weights[part], keys, counts[part], topk)
            slots[part] = table.gather(1, best // block_size) * block_size + best % block_size
        return slots, counts.clamp(max=topk)
    starts, lens = _request_bounds(query_start_loc, seq_lens, query_start_loc_cpu, seq_lens_cpu)
    counts = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
    for r, seq_len in enumerate(lens):
        start, end = starts[r], starts[r + 1]
        table = block_table[r, : -(-seq_len // block_size)].long()
        keys = cache[table].flatten(0, 1)[:seq_len].float()
        counts[start:end] = torch.arange(seq_len - (end - start) + 1, seq_len + 1, device=q.device)
        rows = max(1, _ROOM // (max(seq_len, 1) * num_heads))
        for first in range(start, end, rows):
            part = slice(first, min(first + rows, end))
            best = _best(q[part], weights[part], keys, counts[part], topk)
            slots[part, : best.shape[1]] = table[best // block_size] * block_size + best % block_size
    return slots, counts.clamp_(max=topk)


def sparse_latent_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    up: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of each query to the first counts[t] of its slots, absorbed; the arguments as in `latent_attention`.

    slots [tokens, n] and counts [tokens] as of `index_topk`. Returns [tokens, num_heads, value_dim].
    """
    block_size, width, num_slots = cache.shape[1], cache.shape[2], slots.shape[1]
    rows = max(1, _ROOM // (num_slots * width))
    out = []
    for part in (slice(first, first + rows) for first in range(0, slots.shape[0], rows)):
        own = cache[slots[part] // block_size, slots[part] % block_size]
        table = torch.arange(own.shape[0], dtype=torch.int32, device=own.device)[:, None]
        out.append(absorbed(q_nope[part], q_rope[part], up, own, table, counts[part], num_slots, scale))
    return out[0] if len(out) == 1 else torch.cat(out)


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for query_lens in ((1, 1, 1), (1, 12, 33)):
        seq_lens = (1, 70, 33)
        # Keys are the last of a row, behind what else is kept of a token.
        cache, table, lens = _setup(rng, dtype, device, seq_lens, 40)
        starts_cpu = [0, *itertools.accumulate(query_lens)]
        q = torch.randn(starts_cpu[-1], 8, 32, generator=rng).to(device, dtype)
        weights = torch.randn(starts_cpu[-1], 8, generator=rng).to(device, dtype)
        args = q, weights, cache[..., 8:], table, lens, max(seq_lens), 16
        if max(query_lens) == 1:
            yield args
        yield *args, torch.tensor(starts_cpu, dtype=torch.int32, device=device), starts_cpu, list(seq_lens)


index_topk.inputs = _inputs
