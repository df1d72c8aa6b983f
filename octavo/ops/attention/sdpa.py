"""Paged attention by torch's scaled_dot_product_attention: the CPU's provider until something faster is built.

Decode rows are padded to the longest and computed in one call; prefill chunks run one request at a time.
"""

import torch
import torch.nn.functional as F

from octavo.ops.attention import _request_bounds, paged_attention


def _accepts(q, kv_cache, *args, softcap=0.0, sinks=None, distance_bias=None, **kwargs) -> bool:
    positional = dict(zip(("softcap", "sinks", "distance_bias"), args[7:10], strict=False))
    softcap, sinks = positional.get("softcap", softcap), positional.get("sinks", sinks)
    return not q.is_cuda and not softcap and sinks is None and positional.get("distance_bias", distance_bias) is None


@paged_attention.register("sdpa", accepts=_accepts)
def _paged_attention_sdpa(
    q,
    kv_cache,
    block_table,
    query_start_loc,
    seq_lens,
    max_query_len,
    max_seq_len,
    scale,
    window=0,
    softcap=0.0,
    sinks=None,
    distance_bias=None,
    query_start_loc_cpu=None,
    seq_lens_cpu=None,
    k_scale=1.0,
    v_scale=1.0,
):
    starts, lens = _request_bounds(query_start_loc, seq_lens, query_start_loc_cpu, seq_lens_cpu)
    block_size, num_kv_heads = kv_cache.shape[2:4]
    gqa = q.shape[1] != num_kv_heads
    scale *= k_scale
    num_decodes = 0
    while num_decodes < len(lens) and starts[num_decodes + 1] - starts[num_decodes] == 1:
        num_decodes += 1
    out = torch.empty_like(q)
    if num_decodes:
        longest = max(lens[:num_decodes])
        blocks = block_table[:num_decodes, : -(-longest // block_size)]
        k = kv_cache[blocks, 0].flatten(1, 2)[:, :longest].transpose(1, 2).to(q.dtype)
        v = kv_cache[blocks, 1].flatten(1, 2)[:, :longest].transpose(1, 2).to(q.dtype)
        mask = None
        if window or min(lens[:num_decodes]) < longest:
            key_pos = torch.arange(longest)
            last = seq_lens[:num_decodes, None] - 1
            visible = key_pos <= last
            if window:
                visible &= key_pos > last - window
            mask = visible[:, None, None, :]
        out[:num_decodes] = F.scaled_dot_product_attention(
            q[:num_decodes, :, None], k, v, attn_mask=mask, scale=scale, enable_gqa=gqa
        )[:, :, 0]
    for r in range(num_decodes, len(lens)):
        start, end, seq_len = starts[r], starts[r + 1], lens[r]
        if start == end:
            continue
        blocks = block_table[r, : -(-seq_len // block_size)]
        k = kv_cache[blocks, 0].flatten(0, 1)[:seq_len].transpose(0, 1).to(q.dtype)
        v = kv_cache[blocks, 1].flatten(0, 1)[:seq_len].transpose(0, 1).to(q.dtype)
        chunk = end - start
        mask = None
        if window or chunk < seq_len:
            query_pos = torch.arange(seq_len - chunk, seq_len)[:, None]
            key_pos = torch.arange(seq_len)[None, :]
            mask = key_pos <= query_pos
            if window:
                mask &= key_pos > query_pos - window
        out[start:end] = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=gqa,
        )[0].transpose(0, 1)
    return out if v_scale == 1.0 else out.mul_(v_scale)
