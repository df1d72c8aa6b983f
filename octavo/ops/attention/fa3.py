"""Provider "fa3" of `paged_attention`: FlashAttention 3 on Hopper, where a build of it is installed.

Any package that registers `torch.ops.flash_attn_3.fwd` will do (the FlashAttention 3 wheel, `tokenspeed-fa3`). It serves
batches with prefill chunks; pure decode steps are faster in our own kernels.
"""

import functools
import importlib
import importlib.util

import torch

from octavo.logger import get_logger
from octavo.ops.attention import paged_attention

logger = get_logger(__name__)


@functools.cache
def has_fa3() -> bool:
    """Whether FlashAttention 3 can run here; the first call loads its library."""
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        return False
    if importlib.util.find_spec("flash_attn_3") is None:
        return False
    try:
        importlib.import_module("flash_attn_3._C")
        arguments = {a.name for a in torch.ops.flash_attn_3.fwd.default._schema.arguments}
    except (ImportError, AttributeError, OSError) as error:
        logger.warning("FlashAttention 3 is installed but does not load: %s", error)
        return False
    return {"page_table", "seqused_k", "cu_seqlens_q", "window_size_left"} <= arguments


@functools.cache
def _disabled_features() -> frozenset[str]:
    """Features its build left out, by the names of its build flags; empty where it does not say."""
    if importlib.util.find_spec("flash_attn_config") is None:
        return frozenset()
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    return frozenset(name.rpartition("_DISABLE_")[2] for name, value in flags.items() if value and "_DISABLE_" in name)


def _accepts(
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
) -> bool:
    if max_query_len == 1 or softcap > 0 or sinks is not None or distance_bias is not None or q.shape[0] == 0:
        return False
    # With an 8-bit cache it would want 8-bit queries as well, rounded by a scale of their own.
    if q.dtype not in (torch.bfloat16, torch.float16) or kv_cache.dtype != q.dtype:
        return False
    head_dim = q.shape[2]
    built_dim = next(
        (d for d in (64, 96, 128, 192, 256) if head_dim <= d and f"HDIM{d}" not in _disabled_features()), 0
    )
    if built_dim == 0 or head_dim % 8 != 0 or "PAGEDKV" in _disabled_features() or "VARLEN" in _disabled_features():
        return False
    if window > 0 and "LOCAL" in _disabled_features():
        return False
    return (
        q.is_cuda
        and kv_cache.stride(4) == 1
        and all(t.dtype == torch.int32 for t in (block_table, query_start_loc, seq_lens))
    )


@paged_attention.register("fa3", supported=has_fa3, accepts=_accepts)
def paged_attention_fa3(
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
    """One call for the whole ragged batch; keys and values are strided views of our cache."""
    out = None
    if query_start_loc_cpu is None or query_start_loc_cpu[-1] != q.shape[0]:
        # Rows after the last request's, in a padded batch, belong to nobody; they must still be finite.
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    return torch.ops.flash_attn_3.fwd(
        q,
        kv_cache[:, 0],
        kv_cache[:, 1],
        out=out,
        cu_seqlens_q=query_start_loc,
        seqused_k=seq_lens,
        max_seqlen_q=max_query_len,
        page_table=block_table,
        softmax_scale=scale,
        is_causal=True,
        window_size_left=window - 1 if window > 0 else -1,
        # Causal: nothing to the right. FlashAttention takes a window together with is_causal as this pair.
        window_size_right=0 if window > 0 else -1,
    )[0]
