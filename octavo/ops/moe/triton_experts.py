"""Provider "triton" of `experts`: which kernels serve a call, from the tuned table or by rule.

The table's section "experts" maps "experts,top_k,hidden,width" to choices by the greatest number of tokens they serve:
{"8": {"kernel": "pairs", "gate_up": {...}, "down": {...}}, "64": {"kernel": "grouped", "block_m": 16, ...}}.
"""

import functools
from typing import Any

import torch

from octavo.ops.moe import CLAMPED_SWIGLU, UNGATED, experts
from octavo.ops.moe.triton_grouped import GroupedConfig, TileConfig, default_grouped_config, grouped_experts
from octavo.ops.moe.triton_pairs import PairsConfig, RowsConfig, default_pairs_config, fits, pair_experts
from octavo.ops.triton_support import has_triton, runs_on_triton
from octavo.ops.triton_utils import forget_choices_with, tuned_table

Config = GroupedConfig | PairsConfig

# Without a measurement: while most pairs have an expert to themselves, reading each pair's weights costs nothing.
_MAX_PAIRS_PER_EXPERT = 0.5
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", CLAMPED_SWIGLU, *UNGATED)


def config_from_entry(entry: dict[str, Any]) -> Config:
    """Read one choice of the tuned table."""
    if entry["kernel"] == "pairs":
        return PairsConfig(RowsConfig(**entry["gate_up"]), RowsConfig(**entry["down"]))
    return GroupedConfig(entry["block_m"], TileConfig(**entry["gate_up"]), TileConfig(**entry["down"]))


@functools.lru_cache(maxsize=4096)
def choose(num_experts: int, top_k: int, hidden: int, width: int, tokens: int, itemsize: int) -> Config:
    """The kernels for `tokens` tokens."""
    by_tokens = tuned_table("experts").get(f"{num_experts},{top_k},{hidden},{width}", {}) if itemsize == 2 else {}
    for limit in sorted(by_tokens, key=int):
        if tokens <= int(limit):
            return config_from_entry(by_tokens[limit])
    pairs_per_expert = tokens * top_k / num_experts
    if (tokens == 1 or pairs_per_expert <= _MAX_PAIRS_PER_EXPERT) and fits(width, top_k):
        return default_pairs_config(hidden, width, top_k)
    return default_grouped_config(pairs_per_expert, itemsize)


forget_choices_with(choose.cache_clear)


def _accepts(
    hidden, weights, chosen, gate_up, down, activation, residual=None, scale=1.0, gate_up_bias=None, down_bias=None
) -> bool:
    tensors = [t for t in (hidden, gate_up, down, residual, gate_up_bias, down_bias) if t is not None]
    return (
        runs_on_triton(hidden)
        and hidden.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and hidden.shape[0] > 0
        and activation in _ACTIVATIONS
        and all(t.dtype == hidden.dtype and t.is_contiguous() for t in tensors)
        and weights.dtype == torch.float32
        and weights.is_contiguous()
        and chosen.is_contiguous()
    )


@experts.register("triton", supported=has_triton, accepts=_accepts)
def experts_triton(
    hidden, weights, chosen, gate_up, down, activation, residual=None, scale=1.0, gate_up_bias=None, down_bias=None
):
    """Pairs one by one for a few tokens, grouped by expert for many."""
    config = choose(
        gate_up.shape[0], chosen.shape[1], hidden.shape[1], down.shape[2], hidden.shape[0], hidden.element_size()
    )
    return run_config(
        config, hidden, weights, chosen, gate_up, down, activation, residual, scale, gate_up_bias, down_bias
    )


def run_config(
    config,
    hidden,
    weights,
    chosen,
    gate_up,
    down,
    activation,
    residual=None,
    scale=1.0,
    gate_up_bias=None,
    down_bias=None,
):
    """`experts` by given kernels: what the tuning script calls."""
    run = pair_experts if isinstance(config, PairsConfig) else grouped_experts
    return run(
        hidden, weights, chosen, gate_up, down, activation, residual, scale, gate_up_bias, down_bias, config=config
    )
