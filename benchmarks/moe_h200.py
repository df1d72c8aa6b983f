"""The kernels of mixtures of experts and of latent attention on the shapes of real models: right, how fast, how launched.

    python benchmarks/moe_h200.py check              routing, experts and latent attention against float32
    python benchmarks/moe_h200.py time               microseconds and GB/s of each part by number of tokens
    python benchmarks/moe_h200.py tune --table FILE  measure the experts' candidates, write octavo/ops/tuned/<device>.json
    python benchmarks/moe_h200.py dense              the same for what stands around the experts: linears, decode attention

`--models`, `--tokens`, `--json FILE` and `--budget SECONDS` as in kernels_h200.py. Tokens choose experts uniformly, which
reads the most weights; each call of a measurement has a choice of its own.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels_h200 import (
    EPS,
    LinearShape,
    Model,
    Report,
    device,
    error,
    in_float32,
    launch_linears,
    provider,
    rand,
    time_graph,
    tune_decode,
    tune_linears,
)
from octavo import ops
from octavo.ops.attention.mla import absorbed, latent_attention, latent_decode
from octavo.ops.moe import Routing, experts, norm_route
from octavo.ops.triton_utils import forget_choices, is_recording, table_name

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 16384)
# Enough choices that a small batch's experts do not stay in L2.
CALLS = 8


@dataclass(frozen=True)
class MoEModel:
    """The shapes of one block."""

    num_experts: int
    hidden: int
    width: int
    routing: Routing
    latent: tuple[int, int, int, int, int] | None = None  # heads, rank, rope, key and value dimensions

    @property
    def key(self) -> str:
        """Key of the tuned table."""
        return f"{self.num_experts},{self.routing.top_k},{self.hidden},{self.width}"

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.width * 2


MODELS = {
    "qwen3-30b-a3b": MoEModel(128, 2048, 768, Routing(8, renormalize=True)),
    "deepseek-v2-lite": MoEModel(64, 2048, 1408, Routing(6), (16, 512, 64, 128, 128)),
    "mixtral-8x7b": MoEModel(8, 4096, 14336, Routing(2, renormalize=True)),
}
# What stands around the experts: the other products of a step, and the heads where attention is not latent.
LINEARS = {
    "qwen3-30b-a3b": [
        LinearShape("qkv", 5120, 2048, norm=True),
        LinearShape("o", 2048, 4096, residual=True),
        LinearShape("lm_head", 151936, 2048, norm=True),
    ],
    "deepseek-v2-lite": [
        LinearShape("q_kv_a", 16 * 192 + 576, 2048, norm=True),
        LinearShape("o", 2048, 2048, residual=True),
        LinearShape("shared gate_up", 2816, 2048, activation="silu"),
        LinearShape("shared down", 2048, 2816, residual=True),
        LinearShape("lm_head", 102400, 2048, norm=True),
    ],
    "mixtral-8x7b": [
        LinearShape("qkv", 6144, 4096, norm=True),
        LinearShape("o", 4096, 4096, residual=True),
        LinearShape("lm_head", 32000, 4096, norm=True),
    ],
}
HEADS = {
    "qwen3-30b-a3b": Model(2048, 0, 32, 4, 128, 48, 151936, qk_norm=True),
    "mixtral-8x7b": Model(4096, 0, 32, 8, 128, 32, 32000, qk_norm=False),
}


def make_weights(m: MoEModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The stacked projections."""
    gate_up = rand(m.num_experts, 2 * m.width, m.hidden, scale=m.hidden**-0.5)
    return gate_up, rand(m.num_experts, m.hidden, m.width, scale=m.width**-0.5)


def make_choice(m: MoEModel, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the chosen experts."""
    if is_recording():
        shape = (tokens, m.routing.top_k)
        return torch.empty(shape, device="meta"), torch.empty(shape, device="meta", dtype=torch.int32)
    chosen = torch.rand(tokens, m.num_experts, device=device()).topk(m.routing.top_k, -1)[1].int()
    return torch.rand(chosen.shape, device=device()), chosen


def route_arguments(m: MoEModel, tokens: int) -> tuple:
    """Arguments of `norm_route`."""
    return rand(tokens, m.hidden), rand(m.hidden), EPS, rand(m.num_experts, m.hidden, scale=0.1), m.routing


def latent_arguments(m: MoEModel, requests: int, context: int) -> tuple:
    """Arguments of `latent_attention` for a decode step, blocks of 64 tokens in random order."""
    assert m.latent is not None
    heads, rank, rope, nope, value = m.latent
    width = -(-context // 64)
    cache = rand(requests * width + 1, 64, rank + rope)
    if is_recording():
        table, lens, starts = (
            torch.empty(s, dtype=torch.int32, device="meta") for s in ((requests, width), requests, requests + 1)
        )
    else:
        table = (torch.randperm(requests * width, device="cuda") + 1).int().view(requests, width)
        lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    up = rand(heads, nope + value, rank, scale=rank**-0.5)
    scale = (nope + rope) ** -0.5
    return rand(requests, heads, nope), rand(requests, heads, rope), up, cache, table, starts, lens, 1, 8192, scale


def check_latent(name: str, report: Report) -> None:
    """Absorbed decode against keys and values computed in float32."""
    for requests, context in ((1, 100), (3, 3000), (64, 700)):
        arguments = latent_arguments(MODELS[name], requests, context)
        wanted = latent_attention.reference(*map(in_float32, arguments))
        for repeat in range(2):
            q_nope, q_rope, up, cache, table, _, lens, _, bound, scale = arguments
            out = absorbed(q_nope, q_rope, up, cache, table, lens, bound, scale)
            report.check(f"{name} latent {requests}x{context} #{repeat}", error(out, wanted), 2e-2)


def time_latent(name: str, report: Report) -> None:
    """Decode attention over the latents alone; GB/s count the latents once."""
    m = MODELS[name]
    assert m.latent is not None
    heads, rank, rope, _, _ = m.latent
    for requests, context in itertools.product((1, 8, 32, 128), (256, 4096)):
        calls = []
        for _ in range(4):
            _, q_rope, _, cache, table, _, lens, _, bound, scale = latent_arguments(m, requests, context)
            q_latent = rand(requests, heads, rank)
            calls.append(functools.partial(latent_decode, q_latent, q_rope, cache, table, lens, bound, scale))
        seconds = time_graph(calls)
        report.numbers[f"us {name} latent_decode {requests}x{context}"] = seconds * 1e6
        rate = requests * context * (rank + rope) * 2 / seconds / 1e9
        print(f"{name} latent_decode {requests}x{context}: {seconds * 1e6:.1f} us, {rate:.0f} GB/s", flush=True)


def check(models: list[str], tokens_list: tuple[int, ...], report: Report) -> None:
    """Routing and experts against float32 on the same choice."""
    for name in models:
        m = MODELS[name]
        gate_up, down = make_weights(m)
        for tokens in tokens_list:
            if tokens > 2048:
                continue
            arguments = route_arguments(m, tokens)
            hidden, weights, chosen = norm_route(*arguments)
            wanted = norm_route.reference(*map(in_float32, arguments))
            report.check(f"{name} norm {tokens}", error(hidden, wanted[0]), 1e-2)
            # Near ties may fall either way, and then the weights are as close as the logits were.
            report.check(f"{name} route {tokens}", error(weights.sort(-1)[0], wanted[1].sort(-1)[0]), 2e-2)
            residual = rand(tokens, m.hidden)
            for repeat in range(2):
                out = experts(hidden, weights, chosen, gate_up, down, "silu", residual.clone(), 0.5)
                report.check(f"{name} experts {tokens} #{repeat}", error(out, _reference(
                    hidden, weights, chosen, gate_up, down, residual, 0.5)), 1e-2)  # fmt: skip
        if m.latent is not None:
            check_latent(name, report)
        print(f"{name}: checked", flush=True)


def _reference(hidden, weights, chosen, gate_up, down, residual, scale) -> torch.Tensor:
    """`experts` in float32, one expert's weights widened at a time."""
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        token, choice = torch.where(chosen == expert)
        gate, up = (hidden[token].float() @ gate_up[expert].float().T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].float().T
        out.index_add_(0, token, y * weights[token, choice, None])
    return residual.float() + scale * out


def time_route(arguments: tuple) -> tuple[float, float]:
    """Seconds of routing as it is, and by the kernel that it leaves aside at this number of tokens."""
    from octavo.ops.moe import triton_route

    limit, tokens = triton_route.MAX_SINGLE_TOKENS, arguments[0].shape[0]
    seconds = time_graph([functools.partial(norm_route, *arguments)] * CALLS)
    if tokens > 128:
        return seconds, float("nan")
    triton_route.MAX_SINGLE_TOKENS = 0 if tokens <= limit else tokens
    try:
        return seconds, time_graph([functools.partial(norm_route, *arguments)] * CALLS)
    finally:
        triton_route.MAX_SINGLE_TOKENS = limit


def time_all(models: list[str], tokens_list: tuple[int, ...], report: Report) -> None:
    """Routing and experts as a model calls them; GB/s count every chosen expert's weights once."""
    for name in models:
        m = MODELS[name]
        gate_up, down = make_weights(m)
        for tokens in tokens_list:
            if report.left() < 10:
                return
            route = route_arguments(m, tokens)
            routing, other_routing = time_route(route)
            choices = [make_choice(m, tokens) for _ in range(CALLS)]
            h, residual = rand(tokens, m.hidden), rand(tokens, m.hidden)
            calls = [functools.partial(experts, h, *choice, gate_up, down, "silu", residual) for choice in choices]
            seconds = time_graph(calls)
            num_bytes = sum(chosen.unique().numel() for _, chosen in choices) / CALLS * m.expert_bytes
            flops = 2 * tokens * m.routing.top_k * 3 * m.hidden * m.width
            report.numbers |= {
                f"us {name} route {tokens}": routing * 1e6,
                f"us {name} route, the other kernel {tokens}": other_routing * 1e6,
                f"us {name} experts {tokens}": seconds * 1e6,
            }
            print(
                f"{name} {tokens} tokens: route {routing * 1e6:.1f} us (other kernel {other_routing * 1e6:.1f}), "
                f"experts {seconds * 1e6:.1f} us, "
                f"{num_bytes / seconds / 1e9:.0f} GB/s, {flops / seconds / 1e12:.0f} TFLOP/s",
                flush=True,
            )
        del gate_up, down
        torch.cuda.empty_cache()
        if m.latent is not None:
            time_latent(name, report)


# --- tune


def pair_candidates(m: MoEModel, which: str) -> Iterator[dict]:
    """Launch shapes of one of the two pair kernels."""
    k, copies = (m.hidden, 2) if which == "gate_up" else (m.width, m.routing.top_k)
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (1, 2, 4, 8)):
        padded = -(-k // block_k) * block_k
        thread_values = block_n * padded * copies // (warps * 32)
        # At least 8 bytes a load; at most 192 weights a thread.
        if (
            padded <= k * 1.35
            and block_k * 4 >= min(k, 2048)
            and 16 <= thread_values <= 192
            and block_n * block_k >= warps * 128
        ):
            yield {"block_n": block_n, "block_k": block_k, "num_warps": warps}


def tile_candidates(m: MoEModel, which: str, block_m: int) -> Iterator[dict]:
    """Launch shapes of one of the two grouped products."""
    k, matrices = (m.hidden, 2) if which == "gate_up" else (m.width, 1)
    short = block_m <= 32
    tiles = [(32, 128), (64, 128), (64, 256), (128, 64), (128, 128)] if short else [(64, 64), (128, 64), (256, 64)]
    for (block_n, block_k), stages, warps, swap in itertools.product(tiles, (2, 3, 4), (4, 8), (False, True)):
        shared = stages * (matrices * block_n + block_m) * block_k * 2
        accumulators = matrices * block_n * block_m // (warps * 32)
        if swap and (not short or block_n < 64):
            continue
        if (
            block_k > k
            or shared > 220_000
            or accumulators > 144
            or (short and warps == 8 and block_n * block_k < 16384)
        ):
            continue
        yield {"block_n": block_n, "block_k": block_k, "num_stages": stages, "num_warps": warps, "swap": swap}


def block_sizes(m: MoEModel, tokens: int) -> list[int]:
    """Heights of a block worth measuring."""
    mean = tokens * m.routing.top_k / m.num_experts
    return [16] if mean <= 8 else [16, 32] if mean <= 20 else [32, 64] if mean <= 60 else [64, 128]


def starting_points(m: MoEModel, tokens: int) -> list[dict]:
    """Entries of the table from which each product is then tuned by itself."""
    from octavo.ops.moe.triton_grouped import default_grouped_config
    from octavo.ops.moe.triton_pairs import default_pairs_config, fits

    points = []
    if tokens <= 32 and fits(m.width, m.routing.top_k):
        points.append(
            {"kernel": "pairs"} | dataclasses.asdict(default_pairs_config(m.hidden, m.width, m.routing.top_k))
        )
    if tokens > 1:
        for block_m in block_sizes(m, tokens):
            config = dataclasses.asdict(default_grouped_config(block_m, 2))
            points.append({"kernel": "grouped"} | config | {"block_m": block_m})
    return points


def candidates(m: MoEModel, point: dict, which: str) -> list[dict]:
    """`point` with each launch shape of one product."""
    shapes = pair_candidates(m, which) if point["kernel"] == "pairs" else tile_candidates(m, which, point["block_m"])
    return [point | {which: shape} for shape in shapes]


def _measure(label, h, choices, gate_up, down, residual, wanted, report: Report, entry: dict) -> float:
    """Seconds of one entry, which must be right as well."""
    from octavo.ops.moe.triton_experts import config_from_entry, run_config

    run = functools.partial(run_config, config_from_entry(entry))
    calls = [functools.partial(run, h, *choice, gate_up, down, "silu", residual) for choice in choices]
    try:
        report.check(f"{label} {entry}", error(calls[0](), wanted), 1e-2)
        return time_graph(calls, 3)
    except Exception as failure:  # a candidate that does not fit is no candidate
        print(f"  {entry}: {type(failure).__name__} {str(failure)[:100]}", flush=True)
        return float("inf")


def tune(models: list[str], tokens_list: tuple[int, ...], path: Path | None, report: Report) -> None:
    """For each number of tokens the fastest kernels, each product tuned with the other held; what a shortened run did not
    reach keeps its old entries."""
    path, table = _read_table(path)
    for name in models:
        m = MODELS[name]
        gate_up, down = make_weights(m)
        section = table.setdefault("experts", {}).setdefault(m.key, {})
        for tokens in tokens_list:
            if report.left() < 20:
                break
            choices = [make_choice(m, tokens) for _ in range(CALLS if tokens <= 64 else 2)]
            h, residual = rand(tokens, m.hidden), rand(tokens, m.hidden)
            wanted = _reference(h, *choices[0], gate_up, down, residual, 1.0)
            measure = functools.partial(
                _measure, f"{name} {tokens}", h, choices, gate_up, down, residual, wanted, report
            )
            results = []
            for point in starting_points(m, tokens):
                seconds = measure(point)
                for which in ("gate_up", "down"):
                    tried = [(measure(entry), entry) for entry in candidates(m, point, which) if report.left() > 5]
                    seconds, point = min([*tried, (seconds, point)], key=lambda pair: pair[0])
                results.append((seconds, point))
                print(f"  {name} {tokens}: {seconds * 1e6:.1f} us {point}", flush=True)
            seconds, point = min(results, key=lambda pair: pair[0])
            section[str(tokens if tokens < TOKENS[-1] else 1 << 20)] = point | {"us": round(seconds * 1e6, 1)}
            num_bytes = sum(chosen.unique().numel() for _, chosen in choices) / len(choices) * m.expert_bytes
            print(f"{name} {tokens} tokens: {seconds * 1e6:.1f} us, {num_bytes / seconds / 1e9:.0f} GB/s", flush=True)
            path.write_text(json.dumps(table, indent=1) + "\n")
        del gate_up, down
        torch.cuda.empty_cache()
    forget_choices()
    print(f"wrote {path}", flush=True)


def _read_table(path: Path | None) -> tuple[Path, dict]:
    """The table to extend, by default this device's."""
    path = path or Path(ops.__file__).parent / "tuned" / f"{table_name(torch.cuda.get_device_name())}.json"
    return path, json.loads(path.read_text()) if path.is_file() else {}


def tune_dense(models: list[str], path: Path | None, report: Report) -> None:
    """Linears and decode attention around the experts, by the candidates of kernels_h200.py."""
    path, table = _read_table(path)
    for name in models:
        tune_linears(LINEARS[name], name, table, report)
        if name in HEADS:
            tune_decode(HEADS[name], name, table, report)
        path.write_text(json.dumps(table, indent=1) + "\n")
    forget_choices()
    print(f"wrote {path}", flush=True)


def launch_everything(models: list[str] | None, sweep: bool) -> None:
    """Call every kernel that the commands launch, for `record_launches` to note."""
    from octavo.ops.moe.triton_experts import config_from_entry, run_config

    ops.load_providers(force=True)
    for name in models or MODELS:
        m = MODELS[name]
        gate_up, down = make_weights(m)
        for requests in TOKENS[:9] if m.latent is not None else ():
            _, q_rope, _, cache, table, _, lens, _, bound, scale = latent_arguments(m, requests, 256)
            q_latent = rand(requests, m.latent[0], m.latent[1])
            provider("latent_decode")(q_latent, q_rope, cache, table, lens, bound, scale)
        for batch in (1, 16, 32, 64):
            launch_linears(LINEARS[name], batch, sweep)
        for tokens in TOKENS:
            provider("norm_route")(*route_arguments(m, tokens))
            h, residual = rand(tokens, m.hidden), rand(tokens, m.hidden)
            rest = (*make_choice(m, tokens), gate_up, down, "silu", residual)
            provider("experts")(h, *rest)
            for point in starting_points(m, tokens) if sweep else []:
                for entry in [point, *candidates(m, point, "gate_up"), *candidates(m, point, "down")]:
                    run_config(config_from_entry(entry), h, *rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["check", "time"], help="check, time, tune, dense")
    parser.add_argument("--models", nargs="*", default=["qwen3-30b-a3b", "deepseek-v2-lite"], choices=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--table", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; what does not fit is left out")
    args = parser.parse_args()
    if unknown := set(args.what) - {"check", "time", "tune", "dense"}:
        parser.error(f"unknown: {sorted(unknown)}; there are check, time, tune and dense")
    if not torch.cuda.is_available():
        print("moe_h200: needs an NVIDIA GPU; torch sees none")
        return
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    ops.load_providers()
    report, tokens = Report(args.budget), tuple(args.tokens)
    for what in args.what:
        if what == "check":
            check(args.models, tokens, report)
        elif what == "time":
            time_all(args.models, tokens, report)
        elif what == "tune":
            tune(args.models, tokens, args.table, report)
        else:
            tune_dense(args.models, args.table, report)
    if args.json is not None:
        args.json.write_text(json.dumps(report.numbers, indent=1) + "\n")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
