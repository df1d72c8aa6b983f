"""Providers "by_row": each token computed by itself, in calls whose shapes do not depend on how many there are.

Libraries choose kernels by shape, so a row's bits may change with its neighbours; here no call sees more than one row. For
`--batch-invariant` on a CPU, and for what is rare enough on a GPU. Chosen by name only: it is slow.
"""

import torch

from octavo.ops.attention import paged_attention
from octavo.ops.linear import linear
from octavo.ops.logits import top_logprobs
from octavo.ops.norm import rms_norm
from octavo.ops.rope import qkv_rope_write


def _row(tensor: torch.Tensor, i: int) -> torch.Tensor:
    """Row i as a matrix in memory of its own: libraries also look at alignment."""
    return tensor[i : i + 1].clone()


@linear.register("by_row", by_name_only=True)
def _linear_by_row(x, weight, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0):
    rows = [
        linear.reference(
            _row(x, i),
            weight,
            bias,
            norm_weight,
            eps,
            activation,
            None if residual is None else _row(residual, i),
            scale,
        )
        for i in range(x.shape[0])
    ]
    return torch.cat(rows) if rows else linear.reference(x, weight, bias, norm_weight, eps, activation, residual, scale)


@rms_norm.register("by_row", by_name_only=True)
def _rms_norm_by_row(x, weight, eps):
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    for i in range(flat.shape[0]):
        out[i] = rms_norm.reference(_row(flat, i), weight, eps)[0]
    return out.view(x.shape)


@qkv_rope_write.register("by_row", by_name_only=True)
def _qkv_rope_write_by_row(qkv, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, *rest, **options):
    q = qkv.new_empty(qkv.shape[0], num_heads, kv_cache.shape[-1])
    for i in range(qkv.shape[0]):
        place = positions[i : i + 1], cos_sin, kv_cache, slot_mapping[i : i + 1]
        q[i] = qkv_rope_write.reference(_row(qkv, i), *place, num_heads, num_kv_heads, *rest, **options)[0]
    return q


@paged_attention.register("by_row", by_name_only=True)
def _paged_attention_by_row(
    q, kv_cache, block_table, query_start_loc, seq_lens, max_query_len, max_seq_len, scale, window=0, softcap=0.0,
    sinks=None, distance_bias=None, query_start_loc_cpu=None, seq_lens_cpu=None, k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    """Each token as a request of its own that ends with it: how a prompt was cut does not show."""
    starts = query_start_loc.tolist() if query_start_loc_cpu is None else query_start_loc_cpu
    lens = seq_lens.tolist() if seq_lens_cpu is None else seq_lens_cpu
    out = torch.zeros_like(q)
    for r, seq_len in enumerate(lens):
        for i in range(starts[r], starts[r + 1]):
            length = seq_len - (starts[r + 1] - 1 - i)
            out[i] = paged_attention.reference(
                _row(q, i), kv_cache, block_table[r : r + 1], query_start_loc, seq_lens, 1, length, scale, window,
                softcap, sinks, distance_bias, [0, 1], [length], k_scale, v_scale,
            )[0]  # fmt: skip
    return out


@top_logprobs.register("by_row", by_name_only=True)
def _top_logprobs_by_row(logits, k, chosen, normalize=True):
    if logits.shape[0] == 0:
        return top_logprobs.reference(logits, k, chosen, normalize)
    rows = [top_logprobs.reference(_row(logits, i), k, chosen[i : i + 1], normalize) for i in range(logits.shape[0])]
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
