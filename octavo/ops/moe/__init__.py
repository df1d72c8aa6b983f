"""Mixture-of-experts operators: choosing experts for each token, and computing the chosen ones.

    norm_route   RMSNorm of the block's input, router product, choice of experts: what comes before the experts' weights
    experts      for each token the weighted sum of its chosen gated MLPs, added to the residual

A *pair* is one (token, chosen expert); pair t * top_k + j is token t's j-th choice.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from octavo.ops.activation import GATES, gated_activation
from octavo.ops.norm import rms_norm
from octavo.ops.registry import op

CLAMPED_SWIGLU = "clamped_swiglu"
UNGATED = ("relu2",)  # activations of experts without a gate: `gate_up` then holds [experts, width, hidden]


def gate_and_up(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`ops.gated_activation`, and GPT-OSS's gate: both halves clamped to 7, gate * sigmoid(1.702 * gate) * (up + 1)."""
    if activation in UNGATED:
        return GATES[activation](x)
    if activation != CLAMPED_SWIGLU:
        return gated_activation(x, activation)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@dataclass(frozen=True)
class Routing:
    """How a router's logits become a choice of experts and their weights.

    Scores are the softmax or the sigmoid of the logits. The `top_k` experts with the highest score plus choice bias are
    taken; where experts lie in `num_groups` groups, only those of the `top_groups` best groups, a group being worth its best
    expert ("max") or its best two ("top2") (DeepSeek-V2, DeepSeek-V3). Weights are the scores, without the bias, divided by
    their sum if `renormalize`, times `scale`.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_rank: Literal["max", "top2"] = "max"


def choose_experts(
    logits: torch.Tensor, routing: Routing, choice_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] → weights [tokens, top_k] float32, experts [tokens, top_k] int32, best first."""
    logits = logits.float()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if choice_bias is None else scores + choice_bias.float()
    if routing.num_groups > 1:
        grouped = choice.unflatten(-1, (routing.num_groups, -1))
        worth = grouped.topk(2, -1)[0].sum(-1) if routing.group_rank == "top2" else grouped.amax(-1)
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, worth.topk(routing.top_groups, -1)[1], True)
        choice = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
    experts = choice.topk(routing.top_k, -1)[1]
    weights = scores.gather(-1, experts)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, experts.int()


@op
def norm_route(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    routing: Routing,
    router_bias: torch.Tensor | None = None,
    choice_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm, router product and choice of experts; everything after the norm in float32.

    x [tokens, hidden], router [experts, hidden] any float dtype, router_bias and choice_bias [experts]. Returns the
    normalised x [tokens, hidden] in x's dtype, weights [tokens, top_k] float32 and experts [tokens, top_k] int32.
    """
    hidden = rms_norm.reference(x, norm_weight, eps)
    bias = None if router_bias is None else router_bias.float()
    logits = F.linear(hidden.float(), router.float(), bias)
    return hidden, *choose_experts(logits, routing, choice_bias)


@norm_route.register("composed")
def _norm_route_composed(x, norm_weight, eps, router, routing, router_bias=None, choice_bias=None):
    """The same with the fastest norm."""
    hidden = rms_norm(x, norm_weight, eps)
    bias = None if router_bias is None else router_bias.float()
    return hidden, *choose_experts(F.linear(hidden.float(), router.float(), bias), routing, choice_bias)


@op
def experts(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + scale * sum over a token's chosen experts of weight * down(act(gate(h)) * up(h)).

    hidden [tokens, hidden]; weights, chosen [tokens, top_k] as from `norm_route`; gate_up [experts, 2 * width, hidden], the
    gates' rows before the gated ones; down [experts, hidden, width]; biases [experts, 2 * width] and [experts, hidden];
    `activation` as in `gate_and_up`.
    `residual` [tokens, hidden] is consumed: the result may take its memory. Returns [tokens, hidden] in hidden's dtype.
    """
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        token, choice = torch.where(chosen == expert)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        act = gate_and_up(F.linear(hidden[token], gate_up[expert], bias), activation)
        y = F.linear(act, down[expert], None if down_bias is None else down_bias[expert])
        out.index_add_(0, token, y.float() * weights[token, choice, None])
    y = out.to(hidden.dtype)
    return scale * y if residual is None else torch.add(residual, y, alpha=scale)


def _accepts_grouped(hidden, weights, chosen, gate_up, down, *args, **kwargs) -> bool:
    # torch's grouped product reads rows in pieces of 16 bytes on a GPU, and knows bfloat16 alone there.
    fits = gate_up.shape[2] % 8 == 0 and down.shape[2] % 8 == 0
    return hidden.shape[0] > 0 and (hidden.device.type == "cpu" or (hidden.dtype == torch.bfloat16 and fits))


@experts.register("grouped", supported=lambda: hasattr(torch, "_grouped_mm"), accepts=_accepts_grouped)
def _experts_grouped(
    hidden, weights, chosen, gate_up, down, activation, residual=None, scale=1.0, gate_up_bias=None, down_bias=None
):
    """Pairs sorted by expert, two grouped products; only chosen experts' weights are read."""
    top_k = chosen.shape[1]
    by_pair = chosen.flatten()
    order = by_pair.argsort(stable=True)
    experts_of_rows = by_pair[order].long()
    ends = torch.searchsorted(experts_of_rows, torch.arange(gate_up.shape[0], device=hidden.device), right=True).int()
    y = torch._grouped_mm(hidden[order // top_k], gate_up.transpose(1, 2), offs=ends)
    if gate_up_bias is not None:
        y = y + gate_up_bias[experts_of_rows]
    y = torch._grouped_mm(gate_and_up(y, activation), down.transpose(1, 2), offs=ends)
    if down_bias is not None:
        y = y + down_bias[experts_of_rows]
    by_choice = torch.empty_like(y, dtype=torch.float32)
    by_choice[order] = y.float() * weights.flatten()[order, None]
    out = by_choice.unflatten(0, (-1, top_k)).sum(1).to(hidden.dtype)
    if residual is None:
        return out if scale == 1.0 else scale * out
    return torch.add(residual, out, alpha=scale)


def _route_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for tokens, hidden, num_experts, routing, biased in (
        (1, 96, 8, Routing(2), False),
        (5, 256, 60, Routing(4, renormalize=True), False),
        (3, 192, 64, Routing(6, "softmax", False, 2.5, 8, 3, "max"), False),
        (40, 128, 32, Routing(4, "sigmoid", True, 1.5, 4, 2, "top2"), True),
    ):
        x = torch.randn(tokens, hidden, generator=rng).to(device, dtype)
        gamma = (1 + 0.1 * torch.randn(hidden, generator=rng)).to(device, dtype)
        # Logits far apart, so that rounding does not decide who is chosen.
        router = (4 * torch.randn(num_experts, hidden, generator=rng) / hidden**0.5).to(device, dtype)
        biases = [torch.randn(num_experts, generator=rng).to(device) for _ in range(2)] if biased else [None, None]
        yield x, gamma, 1e-5, router, routing, *biases


def _experts_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    def make(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (std * torch.randn(*shape, generator=rng)).to(device, dtype)

    for tokens, hidden, width, num_experts, top_k, activation, biased in (
        (1, 96, 64, 8, 2, "silu", False),
        (3, 64, 96, 4, 3, "gelu_tanh", True),
        (50, 96, 64, 6, 2, "silu", False),
        (5, 64, 64, 6, 2, CLAMPED_SWIGLU, True),
        (7, 64, 64, 6, 2, UNGATED[0], False),
    ):
        chosen = torch.rand(tokens, num_experts, generator=rng).topk(top_k, -1)[1].int().to(device)
        weights = torch.rand(tokens, top_k, generator=rng).to(device)
        height = width if activation in UNGATED else 2 * width
        gate_up = make(num_experts, height, hidden, std=hidden**-0.5)
        down = make(num_experts, hidden, width, std=width**-0.5)
        biases = (make(num_experts, height), make(num_experts, hidden)) if biased else (None, None)
        x = make(tokens, hidden)
        yield x, weights, chosen, gate_up, down, activation, None, 1.0, *biases
        yield x, weights, chosen, gate_up, down, activation, make(tokens, hidden), 0.5, *biases


def _bytes_and_flops(hidden, weights, chosen, gate_up, down, *rest):
    """Chosen experts' weights once, tokens in and out; the two products of each pair."""
    num_bytes = chosen.unique().numel() * (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()
    return num_bytes + 3 * hidden.numel() * hidden.element_size(), 2 * chosen.numel() * (
        gate_up[0].numel() + down[0].numel()
    )


norm_route.inputs = _route_inputs
experts.inputs = _experts_inputs
# Sums of three experts of size 3, rounded after each product and bias: half a unit in the last place, thrice.
experts.tolerance[torch.bfloat16] = (3e-2, 1e-1)
experts.bytes_and_flops = _bytes_and_flops
