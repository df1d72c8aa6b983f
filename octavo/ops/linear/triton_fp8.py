"""Provider "triton" of `linear_fp8`: which kernel serves a call, from the tuned table or by rule.

The table's section "linear_fp8" maps "N,K" ("N,K,gated" with an activation; N counts results) to choices by the greatest
number of tokens they serve: {"1": {"kernel": "gemv", ...}, "16": {"kernel": "dot", ...}, "256": {"kernel": "scaled_mm"}}.
Scales by block have a section of their own, "linear_fp8_block", and no vendor product to fall back to.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from octavo.ops.linear.fp8 import BLOCK, FP8, activation_group, linear_fp8, quantize_fp8
from octavo.ops.linear.triton_fp8_dot import Fp8DotConfig, default_fp8_dot_config, fp8_dot
from octavo.ops.linear.triton_fp8_gemv import MAX_K, default_fp8_gemv_config, fp8_gemv
from octavo.ops.linear.triton_gemv import GemvConfig
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import forget_choices_with, tuned_table

# Above as many tokens the vendor's product wins, where it takes the shape.
_MAX_ROWS = 128


@dataclass(frozen=True, slots=True)
class Fp8Choice:
    """How a call is served; config None leaves it to the vendor's product."""

    config: GemvConfig | Fp8DotConfig | None


def fp8_choice_from_entry(entry: dict[str, Any]) -> Fp8Choice:
    """Read one choice of the tuned table."""
    if entry["kernel"] == "scaled_mm":
        return Fp8Choice(None)
    fields = {key: value for key, value in entry.items() if key not in ("kernel", "us")}
    return Fp8Choice(GemvConfig(**fields) if entry["kernel"] == "gemv" else Fp8DotConfig(**fields))


def fp8_table_section(by_block: bool) -> str:
    """The tuned table's section."""
    return "linear_fp8_block" if by_block else "linear_fp8"


@functools.lru_cache(maxsize=4096)
def choose_fp8(n: int, k: int, rows: int, gated: bool, by_block: bool) -> Fp8Choice:
    """The kernel for `rows` tokens and n results from k inputs."""
    by_rows = tuned_table(fp8_table_section(by_block)).get(f"{n},{k},gated" if gated else f"{n},{k}", {})
    for limit in sorted(by_rows, key=int):
        if rows <= int(limit):
            return fp8_choice_from_entry(by_rows[limit])
    if rows == 1 and k <= MAX_K:
        return Fp8Choice(default_fp8_gemv_config(n, k, gated))
    vendor_takes = not by_block and n % 16 == 0 and k % 16 == 0
    if rows > _MAX_ROWS and vendor_takes:
        return Fp8Choice(None)
    return Fp8Choice(default_fp8_dot_config(n, k, rows, gated, by_block))


forget_choices_with(choose_fp8.cache_clear)


def _choose_for(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, activation: str | None) -> Fp8Choice:
    gated = activation is not None
    return choose_fp8(
        weight.shape[0] // (2 if gated else 1), weight.shape[1], x.shape[0], gated, weight_scale.dim() == 2
    )


def _accepts(
    x, weight, weight_scale, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0,
    input_scale=None,
) -> bool:  # fmt: skip
    if x.dim() != 2 or x.shape[0] == 0 or not runs_on_triton(x) or weight.dtype != FP8:
        return False
    tensors = [t for t in (x, weight, weight_scale, bias, norm_weight, residual) if t is not None]
    if weight_scale.dtype != torch.float32 or not all(t.is_contiguous() for t in tensors):
        return False
    out, k = weight.shape
    if weight_scale.dim() == 2:
        # Whole blocks only, and the rows behind a gate begin with a block of their own.
        if out % (BLOCK * (1 if activation is None else 2)) or k % BLOCK:
            return False
    elif weight_scale.dim() != 1 or k % 32:
        return False
    return _choose_for(x, weight, weight_scale, activation).config is not None


@linear_fp8.register("triton", supported=has_triton, accepts=_accepts)
def linear_fp8_triton(
    x, weight, weight_scale, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0,
    input_scale=None,
):  # fmt: skip
    """One kernel for one token; two, of which the first rounds, for more."""
    choice = _choose_for(x, weight, weight_scale, activation)
    return run_fp8_choice(
        choice, x, weight, weight_scale, bias, norm_weight, eps, activation, residual, scale, input_scale
    )


def run_fp8_choice(
    choice, x, weight, weight_scale, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0,
    input_scale=None,
):  # fmt: skip
    """`linear_fp8` by a given choice with a configuration: what the tuning script calls."""
    if isinstance(choice.config, GemvConfig):
        return fp8_gemv(x, weight, weight_scale, choice.config, bias, norm_weight, eps, activation, residual, scale)
    quants, x_scale = quantize_fp8(x, norm_weight, eps, None, activation_group(weight_scale), input_scale)
    return fp8_dot(quants, x_scale, weight, weight_scale, x.dtype, choice.config, bias, activation, residual, scale)
