"""The Triton kernels of the mixture-of-experts operators: every kind of routing, both ways of computing, ragged shapes."""
# The kernels can only be imported where they can run.
# ruff: noqa: E402

import pytest
import torch

from octavo.ops.moe import CLAMPED_SWIGLU, UNGATED, Routing, choose_experts, experts, norm_route
from octavo.ops.triton_support import has_triton, is_interpreting
from octavo.ops.triton_utils import counters, override_device_name

if not has_triton():
    pytest.skip("needs a GPU, or the child process of test_triton_interpreter.py", allow_module_level=True)

from octavo import ops

ops.load_providers()

from octavo.ops.moe import triton_plan, triton_route
from octavo.ops.moe.triton_experts import choose, config_from_entry, run_config
from octavo.ops.moe.triton_grouped import GroupedConfig, TileConfig, default_grouped_config
from octavo.ops.moe.triton_pairs import PairsConfig, RowsConfig, default_pairs_config
from octavo.ops.moe.triton_route import norm_route_triton

# The interpreter computes with NumPy, which warns where a GPU saturates.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if is_interpreting() else "cuda"
ROUTINGS = {
    "softmax": (8, Routing(2)),
    "softmax, renormalised": (60, Routing(4, renormalize=True, scale=2.0)),
    "softmax, renormalised, bias": (6, Routing(3, renormalize=True)),
    "softmax, groups": (40, Routing(6, "softmax", False, 2.5, 8, 3, "max")),
    "sigmoid, groups, bias": (32, Routing(8, "sigmoid", True, 1.5, 4, 2, "top2")),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("tokens", "max_single"), [(1, 32), (3, 32), (18, 0)])
def test_norm_route(name, tokens, max_single, monkeypatch):
    monkeypatch.setattr(triton_route, "MAX_SINGLE_TOKENS", max_single)
    num_experts, routing = ROUTINGS[name]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 96, generator=rng).to(DEVICE, torch.float16)
    gamma = (1 + 0.1 * torch.randn(96, generator=rng)).to(DEVICE, torch.float16)
    router = (torch.randn(num_experts, 96, generator=rng) / 3).to(DEVICE, torch.float16)
    biases = [torch.randn(num_experts, generator=rng).to(DEVICE) for _ in range(2)] if "bias" in name else [None, None]
    hidden, weights, chosen = norm_route_triton(x, gamma, 1e-5, router, routing, *biases)
    wanted = norm_route.reference(x.float(), gamma.float(), 1e-5, router.float(), routing, *biases)
    torch.testing.assert_close(hidden.float(), wanted[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(weights, wanted[1], rtol=1e-2, atol=1e-3)
    assert torch.equal(chosen, wanted[2])
    assert not counters(1, x.device)[: tokens + 1].any()


def test_a_router_gone_mad_chooses_experts_that_exist():
    router = torch.full((5, 32), float("nan"), device=DEVICE)
    _, _, chosen = norm_route_triton(
        torch.ones(2, 32, device=DEVICE), torch.ones(32, device=DEVICE), 1e-5, router, Routing(3)
    )
    assert int(chosen.min()) >= 0 and int(chosen.max()) < 5


@pytest.mark.parametrize("max_single_pairs", [4096, 16])
@pytest.mark.parametrize("tokens", [1, 30])
def test_plan(tokens, max_single_pairs, monkeypatch):
    monkeypatch.setattr(triton_plan, "_MAX_SINGLE_PAIRS", max_single_pairs)
    monkeypatch.setattr(triton_plan, "_CHUNK", 128)
    num_experts, top_k, block_m = 12, 8, 16
    chosen = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(0)).topk(top_k, -1)[1].int()
    chosen[: tokens // 2, 0] = chosen[0, 0]  # one expert is popular
    plan = triton_plan.make_plan(chosen.to(DEVICE), num_experts, block_m)
    order, blocks = plan.order.cpu(), plan.blocks.cpu()
    assert sorted(order.tolist()) == list(range(tokens * top_k))
    assert int(blocks[0]) <= plan.max_blocks
    row = 0
    for expert, first, count in blocks[1 : 1 + 3 * int(blocks[0])].view(-1, 3).tolist():
        assert first == row and 1 <= count <= block_m
        assert (chosen.flatten()[order[first : first + count].long()] == expert).all()
        row += count
    assert row == tokens * top_k
    assert not counters(1, plan.order.device)[:num_experts].any()


PAIRS = PairsConfig(RowsConfig(8, 32, 4), RowsConfig(16, 16, 4))
SHORT = GroupedConfig(16, TileConfig(32, 64, 2, 4, True), TileConfig(16, 32, 2, 4, True))
TALL = GroupedConfig(32, TileConfig(32, 32, 2, 4), TileConfig(64, 32, 2, 4))


@pytest.mark.parametrize("activation", ["silu", CLAMPED_SWIGLU, "relu2"])
@pytest.mark.parametrize(
    ("config", "tokens"),
    [(PAIRS, 1), (PAIRS, 3), (SHORT, 1), (SHORT, 18), (TALL, 18)],
    ids=["pair", "pairs", "one swapped", "swapped", "tall"],
)
def test_experts(config, activation, tokens):
    """Plain; biased, added to a residual; without a gate."""
    num_experts, top_k, width, inner = 3, 2, 40, 24
    height = inner if activation in UNGATED else 2 * inner
    rng = torch.Generator().manual_seed(0)

    def make(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (std * torch.randn(*shape, generator=rng)).to(DEVICE, torch.float16)

    chosen = torch.rand(tokens, num_experts, generator=rng).topk(top_k, -1)[1].int().to(DEVICE)
    weights = torch.rand(tokens, top_k, generator=rng).to(DEVICE)
    operands = [
        make(tokens, width),
        make(num_experts, height, width, std=0.1),
        make(num_experts, width, inner, std=0.15),
    ]
    rest: list = [activation]
    if activation != "silu":
        rest += [make(tokens, width), 0.3, make(num_experts, height), make(num_experts, width)]
    hidden, gate_up, down = operands
    actual = run_config(config, hidden, weights, chosen, gate_up, down, *rest)
    hidden, gate_up, down, *rest = (a.float() if isinstance(a, torch.Tensor) else a for a in [*operands, *rest])
    expected = experts.reference(hidden, weights, chosen, gate_up, down, *rest)
    torch.testing.assert_close(actual.float(), expected, rtol=4e-3, atol=4e-3)


def test_choice_of_kernels():
    with override_device_name("a GPU nobody has measured"):
        assert choose(128, 8, 2048, 768, 1, 2) == default_pairs_config(2048, 768, 8)
        assert choose(128, 8, 2048, 768, 4096, 2) == default_grouped_config(256, 2)
    assert isinstance(choose(8, 2, 4096, 14336, 1, 2), PairsConfig)
    tile = {"block_n": 64, "block_k": 128, "num_stages": 3, "num_warps": 4, "swap": True}
    entry = {"kernel": "grouped", "block_m": 16, "gate_up": tile, "down": tile, "us": 1.0}
    assert config_from_entry(entry) == GroupedConfig(16, TileConfig(**tile), TileConfig(**tile))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 2000])
def test_the_whole_block_by_graph(tokens):
    """Routing and experts of a real size, captured and replayed on new input."""
    num_experts, width, inner, routing = 128, 2048, 768, Routing(8, renormalize=True)

    def make(*shape: int, std: float = 1.0) -> torch.Tensor:
        return std * torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, gamma, router = make(tokens, width), make(width, std=0.1) + 1, make(num_experts, width, std=0.1)
    gate_up, down = make(num_experts, 2 * inner, width, std=0.02), make(num_experts, width, inner, std=0.03)

    def block() -> torch.Tensor:
        hidden, weights, chosen = norm_route(x, gamma, 1e-6, router, routing)
        return experts(hidden, weights, chosen, gate_up, down, "silu", x.clone())

    block()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block()
    x.copy_(make(tokens, width))
    graph.replay()
    hidden, weights, chosen = norm_route(x, gamma, 1e-6, router, routing)
    logits = hidden.float() @ router.float().T
    # Near ties may fall either way: the choice must be as good as the reference's.
    best = choose_experts(logits, routing)[0].sort(-1)[0]
    torch.testing.assert_close(weights.sort(-1)[0], best, rtol=0.05, atol=5e-3)
    expected = experts.reference(hidden.float(), weights, chosen, gate_up.float(), down.float(), "silu", x.float())
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
