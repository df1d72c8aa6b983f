"""Provider "triton" of `linear`: which kernel serves a call, from the tuned table or by rule.

The table's section "linear" maps "N,K" ("N,K,gated" with an activation; N counts results) to choices by the greatest
number of rows they serve: {"1": {"kernel": "gemv", ...}, "16": {"kernel": "dot", "norm": "separate", ...},
"64": {"kernel": "composed"}}. "norm": "separate" runs the RMSNorm as its own kernel before the product.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from octavo.ops.linear import linear
from octavo.ops.linear.triton_dot import MAX_ROWS, DotConfig, default_dot_config, dot
from octavo.ops.linear.triton_gemv import MAX_K, GemvConfig, default_gemv_config, gemv
from octavo.ops.norm import rms_norm
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import forget_choices_with, tuned_table

# Without a measurement: above 16 tokens a vendor product wins unless the activation's fusion or a large vocabulary pays for it.
_MAX_ROWS_PLAIN = 16
_WIDE_N = 65536


@dataclass(frozen=True, slots=True)
class Choice:
    """How a call is served; config None leaves it to the composed provider."""

    config: GemvConfig | DotConfig | None
    separate_norm: bool = False


def choice_from_entry(entry: dict[str, Any]) -> Choice:
    """Read one choice of the tuned table."""
    fields = {k: v for k, v in entry.items() if k not in ("kernel", "norm", "us")}
    separate = entry.get("norm") == "separate"
    if entry["kernel"] == "composed":
        return Choice(None)
    return Choice((GemvConfig if entry["kernel"] == "gemv" else DotConfig)(**fields), separate)


@functools.lru_cache(maxsize=4096)
def choose(n: int, k: int, rows: int, gated: bool) -> Choice:
    """The kernel for `rows` tokens and n results from k inputs."""
    by_rows = tuned_table("linear").get(f"{n},{k},gated" if gated else f"{n},{k}", {})
    for limit in sorted(by_rows, key=int):
        if rows <= int(limit):
            return choice_from_entry(by_rows[limit])
    if rows == 1:
        return Choice(default_gemv_config(n, k, gated)) if k <= MAX_K else Choice(None)
    if rows <= _MAX_ROWS_PLAIN or (rows <= MAX_ROWS and (gated or n >= _WIDE_N)):
        return Choice(default_dot_config(n, k, rows, gated), separate_norm=rows > 16)
    return Choice(None)


forget_choices_with(choose.cache_clear)


def _accepts(x, weight, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0) -> bool:
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS or not runs_on_triton(x):
        return False
    tensors = [t for t in (x, weight, bias, norm_weight, residual) if t is not None]
    if x.dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != x.dtype for t in tensors):
        return False
    if not all(t.is_contiguous() for t in tensors):
        return False
    gated = activation is not None
    return choose(weight.shape[0] // (2 if gated else 1), weight.shape[1], x.shape[0], gated).config is not None


@linear.register("triton", supported=has_triton, accepts=_accepts)
def linear_triton(x, weight, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0):
    """One kernel for the product and all that surrounds it; two where the table separates the norm."""
    gated = activation is not None
    choice = choose(weight.shape[0] // (2 if gated else 1), weight.shape[1], x.shape[0], gated)
    return run_choice(choice, x, weight, bias, norm_weight, eps, activation, residual, scale)


def run_choice(choice, x, weight, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0):
    """`linear` by a given choice: what the tuning script calls."""
    if norm_weight is not None and choice.separate_norm:
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    if isinstance(choice.config, GemvConfig):
        return gemv(x, weight, choice.config, bias, norm_weight, eps, activation, residual, scale)
    return dot(x, weight, choice.config, bias, norm_weight, eps, activation, residual, scale)
