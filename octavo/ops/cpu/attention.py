"""The C++ kernels of attention: head norms, rotary embedding and the cache write in one; decode and prefill in the other."""

import ctypes

import torch

from octavo.ops.attention import decode_attention, paged_attention
from octavo.ops.cpu.runtime import call, count, empty, is_available, runtime
from octavo.ops.cpu.structs import AttentionArgs, Cache, RopeArgs
from octavo.ops.rope import qkv_rope_write

KV_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MAX_HEAD_DIM = 512  # attention.cpp
MAX_GROUP = 16  # query heads on one key head


def _reads(tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a kernel can read the tensor as an array of `dtype`."""
    return tensor is None or (tensor.dtype == dtype and not tensor.is_cuda and tensor.is_contiguous())


def _takes_cache(kv_cache: torch.Tensor, num_heads: int) -> bool:
    num_kv_heads, head_dim = kv_cache.shape[3:]
    return (
        kv_cache.dtype in KV_KINDS
        and not kv_cache.is_cuda
        and kv_cache[0].is_contiguous()
        and head_dim <= MAX_HEAD_DIM
        and head_dim % runtime().lanes == 0
        and num_heads <= MAX_GROUP * num_kv_heads
    )


def _cache(kv_cache: torch.Tensor) -> Cache:
    _, _, block_size, num_kv_heads, head_dim = kv_cache.shape
    return Cache(kv_cache.data_ptr(), kv_cache.stride(0), KV_KINDS[kv_cache.dtype], block_size, num_kv_heads, head_dim)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _accepts_rope(
    qkv, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads,
    q_norm=None, k_norm=None, eps=1e-6, interleaved=False, k_scale=1.0, v_scale=1.0,
) -> bool:  # fmt: skip
    return (
        _takes_cache(kv_cache, num_heads)
        and _reads(qkv)
        and _reads(positions, torch.int64)
        and _reads(slot_mapping, torch.int64)
        and all(map(_reads, (cos_sin, q_norm, k_norm)))
    )


@qkv_rope_write.register("cpu", supported=is_available, accepts=_accepts_rope)
def _qkv_rope_write_cpu(
    qkv, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads,
    q_norm=None, k_norm=None, eps=1e-6, interleaved=False, k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    num_tokens = count(qkv.shape[0])
    q = empty((qkv.shape[0], num_heads, kv_cache.shape[-1]))
    args = RopeArgs(
        qkv=qkv.data_ptr(),
        qkv_stride=qkv.stride(0),
        tokens=ctypes.addressof(num_tokens),
        positions=positions.data_ptr(),
        cos_sin=_pointer(cos_sin),
        rotary_dim=0 if cos_sin is None else cos_sin.shape[-1],
        cache=_cache(kv_cache),
        slots=slot_mapping.data_ptr(),
        num_heads=num_heads,
        interleaved=interleaved,
        q_norm=_pointer(q_norm),
        k_norm=_pointer(k_norm),
        eps=eps,
        q=q.data_ptr(),
    )
    call("qkv_rope_write", args, num_tokens, positions, cos_sin, kv_cache, slot_mapping, q_norm, k_norm)
    return q


def _accepts_attention(
    q, kv_cache, block_table, query_start_loc, seq_lens, max_query_len, max_seq_len, scale,
    window=0, softcap=0.0, sinks=None, distance_bias=None, query_start_loc_cpu=None, seq_lens_cpu=None,
    k_scale=1.0, v_scale=1.0,
) -> bool:  # fmt: skip
    return (
        _takes_cache(kv_cache, q.shape[1])
        and _reads(q)
        and block_table.dtype == torch.int32
        and block_table.stride(-1) == 1
        and _reads(query_start_loc, torch.int32)
        and _reads(seq_lens, torch.int32)
        and _reads(sinks)
        and _reads(distance_bias)
    )


@paged_attention.register("cpu", supported=is_available, accepts=_accepts_attention)
def _paged_attention_cpu(
    q, kv_cache, block_table, query_start_loc, seq_lens, max_query_len, max_seq_len, scale,
    window=0, softcap=0.0, sinks=None, distance_bias=None, query_start_loc_cpu=None, seq_lens_cpu=None,
    k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    return _attend(q, kv_cache, block_table, query_start_loc, seq_lens, scale, window, softcap, sinks, distance_bias)


def _attend(q, kv_cache, block_table, query_start_loc, seq_lens, scale, window, softcap, sinks, distance_bias):
    """`query_start_loc` None: every request has one token."""
    run, num_requests = runtime(), count(seq_lens.shape[0])
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.shape[3]
    out = empty(tuple(q.shape))
    workspace = run.workspace(
        run.library.octavo_attention_workspace(run.num_threads, num_kv_heads, num_heads // num_kv_heads, head_dim)
    )
    args = AttentionArgs(
        q=q.data_ptr(),
        cache=_cache(kv_cache),
        block_table=block_table.data_ptr(),
        table_stride=block_table.stride(0),
        query_start=_pointer(query_start_loc),
        seq_lens=seq_lens.data_ptr(),
        requests=ctypes.addressof(num_requests),
        num_heads=num_heads,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=_pointer(sinks),
        bias=_pointer(distance_bias),
        num_distances=1 if distance_bias is None or distance_bias.dim() == 1 else distance_bias.shape[1],
        out=out.data_ptr(),
        workspace=workspace.data_ptr(),
    )
    call(
        "attention",
        args,
        num_requests,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        sinks,
        distance_bias,
        workspace,
    )
    return out


def _accepts_decode(
    qkv, positions, cos_sin, kv_cache, slot_mapping, block_table, seq_lens, max_seq_len, num_heads, num_kv_heads, scale,
    q_norm=None, k_norm=None, eps=1e-6, interleaved=False, window=0, softcap=0.0, sinks=None, distance_bias=None,
    k_scale=1.0, v_scale=1.0,
) -> bool:  # fmt: skip
    return (
        _accepts_rope(qkv, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, q_norm, k_norm)
        and block_table.dtype == torch.int32
        and block_table.stride(-1) == 1
        and _reads(seq_lens, torch.int32)
        and _reads(sinks)
        and _reads(distance_bias)
    )


@decode_attention.register("cpu", supported=is_available, accepts=_accepts_decode)
def _decode_attention_cpu(
    qkv, positions, cos_sin, kv_cache, slot_mapping, block_table, seq_lens, max_seq_len, num_heads, num_kv_heads, scale,
    q_norm=None, k_norm=None, eps=1e-6, interleaved=False, window=0, softcap=0.0, sinks=None, distance_bias=None,
    k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    q = _qkv_rope_write_cpu(
        qkv, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, q_norm, k_norm, eps, interleaved
    )
    return _attend(q, kv_cache, block_table, None, seq_lens, scale, window, softcap, sinks, distance_bias)
