"""The GPU providers on the shapes of a decode step and of prefill: right, and how fast.

    python benchmarks/kernels_h200.py check              every provider against float32
    python benchmarks/kernels_h200.py time               each operator by provider, microseconds and GB/s
    python benchmarks/kernels_h200.py step               whole decode steps of one model in one graph, milliseconds
    python benchmarks/kernels_h200.py tune --table FILE  measure the candidates, write octavo/ops/tuned/<device>.json
    python benchmarks/kernels_h200.py tune-fp8-cache     the same for decode attention from an 8-bit KV cache alone

`--models` and `--batches` narrow it down; `--json FILE` keeps the numbers; `--budget SECONDS` stops in time. Times are medians
of graph replays; weights and caches rotate over more copies than L2 holds.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from octavo import ops
from octavo.ops.activation import gated_activation
from octavo.ops.attention import decode_attention, paged_attention
from octavo.ops.embedding import embedding
from octavo.ops.linear import _linear_composed, linear
from octavo.ops.norm import rms_norm
from octavo.ops.registry import REGISTRY
from octavo.ops.rope import qkv_rope_write, write_kv
from octavo.ops.triton_compile import KernelCompiler
from octavo.ops.triton_utils import is_recording, next_power_of_2, override_pdl, record_launches, table_name

DTYPE = torch.bfloat16
COLD_BYTES = 400_000_000
BLOCK_SIZE = 64
EPS = 1e-5


@dataclass(frozen=True)
class Model:
    """The shapes that matter of a decoder-only model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    qk_norm: bool

    @property
    def qkv_width(self) -> int:
        """Width of the fused projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


MODELS = {
    "llama-8b": Model(4096, 14336, 32, 8, 128, 32, 128256, False),
    "qwen3-0.6b": Model(1024, 3072, 16, 8, 128, 28, 151936, True),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class LinearShape:
    """One product of a step with what surrounds it; n counts results."""

    name: str
    n: int
    k: int
    norm: bool = False
    activation: str | None = None
    residual: bool = False

    @property
    def key(self) -> str:
        """Key of the tuned table."""
        return f"{self.n},{self.k}" + (",gated" if self.activation else "")

    @property
    def weight_rows(self) -> int:
        """Rows of the weight matrix."""
        return self.n * (2 if self.activation else 1)


def linears(m: Model) -> list[LinearShape]:
    """The five products of a step, as the model calls them."""
    return [
        LinearShape("qkv", m.qkv_width, m.hidden, norm=True),
        LinearShape("o", m.hidden, m.heads * m.head_dim, residual=True),
        LinearShape("gate_up", m.intermediate, m.hidden, norm=True, activation="silu"),
        LinearShape("down", m.hidden, m.intermediate, residual=True),
        LinearShape("lm_head", m.vocab, m.hidden, norm=True),
    ]


def device() -> str:
    """Where tensors live: nowhere while launches are only recorded."""
    return "meta" if is_recording() else "cuda"


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Normal values times `scale`."""
    x = torch.empty(*shape, dtype=dtype, device=device())
    return x if is_recording() else x.normal_(0, scale)


def linear_arguments(shape: LinearShape, batch: int) -> tuple:
    """Arguments of `linear` after x and weight."""
    gamma = rand(shape.k, scale=0.1).add_(1) if shape.norm and not is_recording() else rand(shape.k)
    residual = rand(batch, shape.n) if shape.residual else None
    return None, gamma if shape.norm else None, EPS, shape.activation, residual, 1.0


def time_graph(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Median seconds a call, all of them captured in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for i in range(replays):
        graph.replay()
        events[i + 1].record()
    torch.cuda.synchronize()
    seconds = statistics.median(events[i].elapsed_time(events[i + 1]) for i in range(replays)) * 1e-3
    return seconds / len(calls)


def error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; infinite if anything is not finite."""
    result, reference = result.float(), reference.float()
    value = ((result - reference).norm() / reference.norm()).item()
    return value if value == value else float("inf")


def in_float32(value: object) -> object:
    """Floating-point tensors in float32, all else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Report:
    """Prints lines, keeps numbers, knows what time is left."""

    def __init__(self, budget: float):
        self.start, self.budget = time.time(), budget
        self.numbers: dict[str, float] = {}
        self.wrong: list[str] = []

    def left(self) -> float:
        """Seconds left."""
        return self.budget - (time.time() - self.start)

    def check(self, what: str, value: float, limit: float) -> None:
        """Note the error of one result."""
        self.numbers[f"error {what}"] = value
        if not value < limit:
            self.wrong.append(f"{what}: {value:.2e}")
            print(f"WRONG {what}: {value:.2e} (limit {limit:.0e})", flush=True)


# --- arguments of the attention operators


def kv_setup(
    m: Model, lens: list[int], copies: int = 1, block_size: int = BLOCK_SIZE, cache_dtype: torch.dtype = DTYPE
):
    """Caches [copies], block table, lengths and slots for requests of `lens` tokens, blocks in random order."""
    per_request = -(-max(lens) // block_size)
    num_blocks = per_request * len(lens) + 1
    caches = [rand(num_blocks, 2, block_size, m.kv_heads, m.head_dim).to(cache_dtype) for _ in range(copies)]
    dev = device()
    if is_recording():
        table = torch.empty(len(lens), per_request, dtype=torch.int32, device=dev)
        seq_lens = torch.empty(len(lens), dtype=torch.int32, device=dev)
        slots = torch.empty(len(lens), dtype=torch.int64, device=dev)
        return caches, table, seq_lens, slots
    table = (torch.randperm(num_blocks - 1) + 1).to(torch.int32).reshape(len(lens), per_request)
    slots = torch.tensor(
        [int(table[r, (n - 1) // block_size]) * block_size + (n - 1) % block_size for r, n in enumerate(lens)]
    )
    return caches, table.to(dev), torch.tensor(lens, dtype=torch.int32, device=dev), slots.to(dev)


def rope_table(m: Model, positions: int = 16384) -> torch.Tensor:
    """cos | sin of head_dim / 2 angles."""
    if is_recording():
        return torch.empty(positions, m.head_dim, device="meta")
    angles = 10000.0 ** (-torch.arange(0, m.head_dim, 2, device="cuda").float() / m.head_dim)
    angles = torch.arange(positions, device="cuda").float()[:, None] * angles
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def head_norms(m: Model) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """q_norm and k_norm of the model, if it has them."""
    return (rand(m.head_dim, scale=0.1) + 1, rand(m.head_dim, scale=0.1) + 1) if m.qk_norm else (None, None)


def provider(name: str, which: str = "triton") -> Callable | None:
    """A provider's function."""
    return next(
        (p.fn for p in REGISTRY[name].providers if p.name == which and (is_recording() or p.is_available())), None
    )


# --- check


def check_linears(m: Model, name: str, batches: tuple[int, ...], report: Report) -> None:
    """Every kernel choice of `linear` against float32."""
    from octavo.ops.linear.triton_linear import choose

    for shape in linears(m):
        weight = rand(shape.weight_rows, shape.k, scale=shape.k**-0.5)
        wide = weight.float()
        for batch in batches:
            if batch > 64 or choose(shape.n, shape.k, batch, shape.activation is not None).config is None:
                continue
            x, rest = rand(batch, shape.k), linear_arguments(shape, batch)
            reference = linear.reference(x.float(), wide, *map(in_float32, rest))
            for repeat in range(2):
                result = provider("linear")(x, weight, *rest)
                report.check(f"{name} linear {shape.name} M={batch} #{repeat}", error(result, reference), 1e-2)
        del weight, wide


def check_small(m: Model, name: str, batches: tuple[int, ...], report: Report) -> None:
    """Norm, activation, embedding, RoPE with cache write."""
    cos_sin = rope_table(m)
    q_norm, k_norm = head_norms(m)
    for batch in batches:
        x, gamma = rand(batch, m.hidden), rand(m.hidden)
        calls = [("rms_norm", (x, gamma, EPS)), ("gated_activation", (rand(batch, 2 * m.intermediate), "silu"))]
        ids = torch.randint(0, 5000, (batch,), device="cuda", dtype=torch.int32)
        calls.append(("embedding", (ids, rand(5000, m.hidden))))
        for op_name, args in calls:
            reference = REGISTRY[op_name].reference(*map(in_float32, args))
            report.check(f"{name} {op_name} {batch}", error(provider(op_name)(*args), reference), 1e-2)
        lens = [1 + 37 * i % 500 for i in range(batch)]
        caches, _, _, slots = kv_setup(m, lens)
        expected = caches[0].float()
        positions = torch.tensor(lens, device="cuda") - 1
        qkv = rand(batch, m.qkv_width)
        args = (m.heads, m.kv_heads, q_norm, k_norm, EPS)
        q = provider("qkv_rope_write")(qkv, positions, cos_sin, caches[0], slots, *args)
        wanted = qkv_rope_write.reference(qkv.float(), positions, cos_sin, expected, slots, *map(in_float32, args))
        report.check(f"{name} qkv_rope_write q {batch}", error(q, wanted), 1e-2)
        report.check(f"{name} qkv_rope_write kv {batch}", error(caches[0], expected), 1e-2)


def check_decode(m: Model, name: str, batches: tuple[int, ...], report: Report) -> None:
    """Fused and plain decode attention on ragged lengths, with graph padding behind them."""
    cos_sin = rope_table(m)
    q_norm, k_norm = head_norms(m)
    for batch, longest in itertools.product(batches, (300, 9000)):
        if batch * longest > 300_000:
            continue
        lens = [max(1, (longest - 977 * i) % longest) for i in range(batch)]
        caches, table, seq_lens, slots = kv_setup(m, lens)
        positions = torch.tensor(lens, device="cuda") - 1
        qkv = rand(batch, m.qkv_width)
        expected = caches[0].float()
        norms = [None if t is None else t.float() for t in (q_norm, k_norm)]
        reference = decode_attention.reference(
            qkv.float(), positions, cos_sin, expected, slots, table, seq_lens, longest, m.heads, m.kv_heads,
            m.head_dim**-0.5, *norms, EPS,
        )  # fmt: skip
        for window_bound in (longest, 16384):
            fused = provider("decode_attention")(
                qkv, positions, cos_sin, caches[0], slots, table, seq_lens, window_bound, m.heads, m.kv_heads,
                m.head_dim**-0.5, q_norm, k_norm, EPS,
            )  # fmt: skip
            report.check(
                f"{name} decode_attention {batch}x{longest} bound {window_bound}", error(fused, reference), 1e-2
            )
        report.check(f"{name} decode_attention cache {batch}x{longest}", error(caches[0], expected), 1e-2)
        q = provider("qkv_rope_write")(
            qkv, positions, cos_sin, caches[0], slots, m.heads, m.kv_heads, q_norm, k_norm, EPS
        )
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        plain = provider("paged_attention")(q, caches[0], table, starts, seq_lens, 1, longest, m.head_dim**-0.5)
        report.check(f"{name} paged_attention decode {batch}x{longest}", error(plain, reference), 1e-2)
    # A padded row: NaN in, nothing written, finite out.
    caches, table, seq_lens, slots = kv_setup(m, [100, 50])
    seq_lens[1], slots[1] = 0, -1
    before = caches[0].clone()
    qkv = rand(2, m.qkv_width)
    qkv[1] = float("nan")
    positions = torch.tensor([99, 0], device="cuda")
    out = provider("decode_attention")(
        qkv, positions, cos_sin, caches[0], slots, table, seq_lens, 4096, m.heads, m.kv_heads, 0.1, q_norm, k_norm, EPS
    )
    changed = (caches[0] != before).flatten(3).any(-1).sum().item()
    report.check(f"{name} padded row", 0.0 if out.isfinite().all() and changed == 2 else float("inf"), 1.0)


def check_prefill(m: Model, name: str, report: Report) -> None:
    """Mixed batches: chunks behind cached tokens, whole prompts and decodes."""
    for query_lens, lens in (([1, 300, 1, 77], [500, 300, 40, 700]), ([1024], [1024]), ([513, 2], [2000, 2])):
        for block_size in (16, 64, 128):
            caches, table, seq_lens, _ = kv_setup(m, lens, block_size=block_size)
            starts = [0, *itertools.accumulate(query_lens)]
            start_loc = torch.tensor(starts, dtype=torch.int32, device="cuda")
            q = rand(starts[-1], m.heads, m.head_dim)
            args = (table, start_loc, seq_lens, max(query_lens), max(lens), m.head_dim**-0.5)
            reference = paged_attention.reference(q.float(), caches[0].float(), *args)
            for which in ("triton", "fa3"):
                if (run := provider("paged_attention", which)) is not None:
                    result = run(q, caches[0], *args)
                    report.check(f"{name} {which} prefill {query_lens} p{block_size}", error(result, reference), 1e-2)
            windowed = paged_attention.reference(q.float(), caches[0].float(), *args, 128)
            for which in ("triton", "fa3"):
                if (run := provider("paged_attention", which)) is not None:
                    result = run(q, caches[0], *args, 128)
                    report.check(f"{name} {which} window {query_lens} p{block_size}", error(result, windowed), 1e-2)


def check(models: list[str], batches: tuple[int, ...], report: Report) -> None:
    """Everything against float32."""
    for name in models:
        m = MODELS[name]
        check_small(m, name, batches, report)
        check_linears(m, name, batches, report)
        check_decode(m, name, batches, report)
        check_prefill(m, name, report)
        torch.cuda.empty_cache()
    done = sum(key.startswith("error") for key in report.numbers)
    print(f"check: {done} results, {len(report.wrong)} wrong, {time.time() - report.start:.1f} s", flush=True)


# --- time


def time_linears(m: Model, name: str, batches: tuple[int, ...], report: Report) -> None:
    """Composed against Triton, with norm, activation and residual in both."""
    for shape in linears(m):
        num_bytes = shape.weight_rows * shape.k * 2
        copies = max(3, -(-COLD_BYTES // num_bytes))
        weights = [rand(shape.weight_rows, shape.k, scale=shape.k**-0.5) for _ in range(copies)]
        line = []
        for batch in batches:
            if report.left() < 10:
                return
            x, rest = rand(batch, shape.k), linear_arguments(shape, batch)
            composed = time_graph([functools.partial(_linear_composed, x, w, *rest) for w in weights])
            chosen = time_graph([functools.partial(linear, x, w, *rest) for w in weights])
            report.numbers[f"us {name} {shape.name} M={batch} composed"] = composed * 1e6
            report.numbers[f"us {name} {shape.name} M={batch} chosen"] = chosen * 1e6
            line.append(f"{batch}: {composed * 1e6:.1f}/{chosen * 1e6:.1f} ({num_bytes / chosen / 1e9:.0f})")
        print(f"{name} {shape.name:8s} us composed/chosen (GB/s)  " + "  ".join(line), flush=True)
        del weights
        torch.cuda.empty_cache()


def decode_calls(
    m: Model, lens: list[int], bound: int, run: Callable, max_copies: int = 64, cache_dtype: torch.dtype = DTYPE
) -> list[Callable[[], object]]:
    """Calls of decode attention over as many caches as L2 cannot hold."""
    per_cache = sum(lens) * m.kv_heads * m.head_dim * 2 * cache_dtype.itemsize
    copies = max(2, min(max_copies, COLD_BYTES // per_cache + 1))
    caches, table, seq_lens, slots = kv_setup(m, lens, copies, cache_dtype=cache_dtype)
    cos_sin = rope_table(m)
    q_norm, k_norm = head_norms(m)
    qkv = rand(len(lens), m.qkv_width)
    positions = (seq_lens - 1).long()
    return [
        functools.partial(
            run, qkv, positions, cos_sin, cache, slots, table, seq_lens, bound, m.heads, m.kv_heads, m.head_dim**-0.5,
            q_norm, k_norm, EPS,
        )
        for cache in caches
    ]  # fmt: skip


def time_decode(m: Model, name: str, batches: tuple[int, ...], report: Report) -> None:
    """Fused decode attention and the two operators apart."""
    composed = provider("decode_attention", "composed")
    for context in (256, 1024, 4096):
        line = []
        for batch in batches:
            if report.left() < 10 or batch * context > 300_000:
                continue
            lens = [context] * batch
            fused = time_graph(decode_calls(m, lens, 8192, provider("decode_attention")))
            apart = time_graph(decode_calls(m, lens, 8192, composed))
            report.numbers[f"us {name} decode {batch}x{context}"] = fused * 1e6
            report.numbers[f"us {name} decode apart {batch}x{context}"] = apart * 1e6
            num_bytes = batch * context * m.kv_heads * m.head_dim * 4
            line.append(f"{batch}: {fused * 1e6:.1f}/{apart * 1e6:.1f} ({num_bytes / fused / 1e12:.2f} TB/s)")
            torch.cuda.empty_cache()
        print(f"{name} decode ctx {context} us fused/apart  " + "  ".join(line), flush=True)


def time_prefill(m: Model, name: str, report: Report) -> None:
    """One prompt, and eight of 1024."""
    for query_lens in ([1024], [8192], [1024] * 8):
        caches, table, seq_lens, _ = kv_setup(m, query_lens)
        starts = [0, *itertools.accumulate(query_lens)]
        start_loc = torch.tensor(starts, dtype=torch.int32, device="cuda")
        q = rand(starts[-1], m.heads, m.head_dim)
        flops = sum(2 * n * n * m.head_dim * m.heads for n in query_lens)
        line = []
        for which in ("triton", "fa3"):
            if (run := provider("paged_attention", which)) is None or report.left() < 10:
                continue
            args = (q, caches[0], table, start_loc, seq_lens, max(query_lens), max(query_lens), m.head_dim**-0.5)
            seconds = time_graph([functools.partial(run, *args)] * 3)
            report.numbers[f"us {name} prefill {len(query_lens)}x{query_lens[0]} {which}"] = seconds * 1e6
            line.append(f"{which} {seconds * 1e6:.0f} us ({flops / seconds / 1e12:.0f} TFLOP/s)")
        print(f"{name} prefill {len(query_lens)} x {query_lens[0]}: " + "  ".join(line), flush=True)


def time_small(m: Model, name: str, report: Report) -> None:
    """The streaming operators at prefill size."""
    tokens = 8192
    x = rand(tokens, m.hidden)
    gate_up = rand(tokens, 2 * m.intermediate)
    qkv = rand(tokens, m.qkv_width)
    caches, _, _, _ = kv_setup(m, [tokens])
    slots = torch.arange(tokens, device="cuda")
    cos_sin, (q_norm, k_norm) = rope_table(m), head_norms(m)
    cases = [
        ("rms_norm", (x, rand(m.hidden), EPS), 4 * x.numel()),
        ("gated_activation", (gate_up, "silu"), 3 * gate_up.numel()),
        (
            "qkv_rope_write",
            (qkv, slots, cos_sin, caches[0], slots, m.heads, m.kv_heads, q_norm, k_norm),
            4 * qkv.numel(),
        ),
    ]
    for op_name, args, num_bytes in cases:
        seconds = time_graph([functools.partial(provider(op_name), *args)] * 5)
        report.numbers[f"us {name} {op_name} {tokens}"] = seconds * 1e6
        print(
            f"{name} {op_name} {tokens} tokens: {seconds * 1e6:.1f} us, {num_bytes / seconds / 1e9:.0f} GB/s",
            flush=True,
        )


def time_all(models: list[str], batches: tuple[int, ...], report: Report) -> None:
    """Every operator."""
    for name in models:
        m = MODELS[name]
        time_decode(m, name, batches, report)
        time_linears(m, name, batches, report)
        time_prefill(m, name, report)
        time_small(m, name, report)
        torch.cuda.empty_cache()


# --- step


class StepModel:
    """Random weights of a whole model, and its decode step written in operators."""

    def __init__(self, m: Model):
        self.m = m
        self.layers = [[rand(s.weight_rows, s.k, scale=s.k**-0.5) for s in linears(m)[:4]] for _ in range(m.layers)]
        self.lm_head = rand(m.vocab, m.hidden, scale=m.hidden**-0.5)
        self.embedding = rand(m.vocab, m.hidden)
        self.gamma = rand(m.hidden, scale=0.1) + 1
        self.cos_sin, self.norms = rope_table(m), head_norms(m)

    def step(self, ids, positions, caches, slots, table, seq_lens, bound) -> torch.Tensor:
        """Logits of one token a request."""
        m = self.m
        x = embedding(ids, self.embedding)
        for (qkv_w, o_w, gate_up_w, down_w), cache in zip(self.layers, caches, strict=True):
            qkv = linear(x, qkv_w, None, self.gamma, EPS)
            attended = decode_attention(
                qkv, positions, self.cos_sin, cache, slots, table, seq_lens, bound, m.heads, m.kv_heads,
                m.head_dim**-0.5, *self.norms, EPS,
            )  # fmt: skip
            x = linear(attended.view(x.shape[0], -1), o_w, None, None, 0.0, None, x)
            h = linear(x, gate_up_w, None, self.gamma, EPS, "silu")
            x = linear(h, down_w, None, None, 0.0, None, x)
        return linear(x, self.lm_head, None, self.gamma, EPS)


def time_steps(
    models: list[str], batches: tuple[int, ...], report: Report, context: int = 256, bound: int = 8192
) -> None:
    """Milliseconds of a decode step without sampling, with PDL and without."""
    for name in models:
        m = MODELS[name]
        model = StepModel(m)
        line = []
        for batch in batches:
            if report.left() < 10:
                break
            caches, table, seq_lens, slots = kv_setup(m, [context] * batch, m.layers)
            ids = torch.randint(0, m.vocab, (batch,), device="cuda", dtype=torch.int32)
            positions = (seq_lens - 1).long()
            arguments = (ids, positions, caches, slots, table, seq_lens, bound)
            with_pdl = time_graph([functools.partial(model.step, *arguments)]) * 1e3
            with override_pdl(False):
                without = time_graph([functools.partial(model.step, *arguments)]) * 1e3
            report.numbers[f"ms {name} step {batch}x{context}"] = with_pdl
            report.numbers[f"ms {name} step {batch}x{context} no PDL"] = without
            line.append(f"{batch}: {with_pdl:.3f}/{without:.3f}")
            del caches
            torch.cuda.empty_cache()
        print(f"{name} step ctx {context}, ms with/without PDL  " + "  ".join(line), flush=True)
        model = None
        torch.cuda.empty_cache()


# --- tune


def linear_candidates(shape: LinearShape, rows: int) -> Iterator[dict]:
    """Entries of the tuned table worth measuring for up to `rows` tokens."""
    gated = shape.activation is not None
    if rows == 1:
        # Tiles that divide the row, or all but do.
        tiles = [bk for bk in (4096, 2048, 1024) if shape.k % bk == 0] or [1024, 512, 256]
        for bn, bk, warps in itertools.product((1, 2, 4, 8, 16), tiles, (2, 4, 8)):
            padded = -(-shape.k // bk) * bk
            values = bn * padded * (2 if gated else 1)
            if padded <= 1.1 * shape.k and 16 <= values // (warps * 32) <= 160 and shape.n // bn >= 200:
                yield {"kernel": "gemv", "block_n": bn, "block_k": bk, "num_warps": warps}
        return
    padded = max(16, next_power_of_2(rows))
    tiles = [(16, 256, 4), (32, 128, 4), (32, 256, 4), (64, 128, 4), (64, 256, 3), (128, 64, 5), (128, 128, 3)]
    for (bn, bk, stages), split, swap, separate in itertools.product(tiles, (1, 2, 4, 8), (False, True), (False, True)):
        programs = -(-shape.n // bn) * split
        if swap != (bn == 128) and not (swap and bn == 64):
            continue
        if (separate and not shape.norm) or (split > 1 and (programs > 800 or shape.k // (bk * split) < 2)):
            continue
        if programs < 100 and split < 8 and shape.k // (bk * split * 2) >= 2:
            continue
        while stages > 2 and stages * (bn * (2 if gated else 1) + padded) * bk * 2 > 200_000:
            stages -= 1
        if stages * (bn * (2 if gated else 1) + padded) * bk * 2 > 220_000:
            continue
        entry = {"kernel": "dot", "block_n": bn, "block_k": bk, "split": split, "num_stages": stages, "swap": swap}
        yield entry | {"norm": "separate"} if separate else entry


def clones(arguments: Iterable[Any]) -> list[Any]:
    """The same with tensors of their own."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]


def tune_linears(shapes: list[LinearShape], name: str, table: dict, report: Report) -> None:
    """The fastest entry for each product and number of rows; "composed" where nothing beats it by 1 %."""
    from octavo.ops.linear.triton_linear import choice_from_entry, run_choice

    for shape in shapes:
        num_bytes = shape.weight_rows * shape.k * 2
        copies = max(3, -(-COLD_BYTES // num_bytes))
        weights = [rand(shape.weight_rows, shape.k, scale=shape.k**-0.5) for _ in range(copies)]
        wide = weights[0].float()
        for rows in (1, 16, 32, 64):
            if report.left() < 15:
                return
            x, rest = rand(rows, shape.k), linear_arguments(shape, rows)
            reference = linear.reference(x.float(), wide, *map(in_float32, rest))
            # Every call adds to its residual, so that what is checked gets one that no other call has seen.
            untouched = clones(rest)
            composed = time_graph([functools.partial(_linear_composed, x, w, *rest) for w in weights], 5)
            results = []
            for entry in linear_candidates(shape, rows):
                choice = choice_from_entry(entry)
                try:
                    report.check(
                        f"{name} {shape.name} {rows} {entry}",
                        error(run_choice(choice, x, weights[0], *clones(untouched)), reference),
                        1e-2,
                    )
                    seconds = time_graph([functools.partial(run_choice, choice, x, w, *rest) for w in weights], 5)
                except Exception as failure:  # a candidate that does not fit is no candidate
                    print(f"  {shape.name} M={rows} {entry}: {type(failure).__name__} {str(failure)[:120]}", flush=True)
                    continue
                results.append((seconds, entry))
            results.sort(key=lambda r: r[0])
            best, entry = results[0] if results else (float("inf"), {})
            if best > composed * 0.99:
                best, entry = composed, {"kernel": "composed"}
            table.setdefault("linear", {}).setdefault(shape.key, {})[str(rows)] = entry | {"us": round(best * 1e6, 1)}
            others = "  ".join(f"{s * 1e6:.1f}" for s, _ in results[1:4])
            print(
                f"{name} {shape.name} M={rows}: composed {composed * 1e6:.1f}, best {best * 1e6:.1f} us"
                f" ({num_bytes / best / 1e9:.0f} GB/s) {entry}, next {others}",
                flush=True,
            )
        del weights, wide
        torch.cuda.empty_cache()


def decode_candidates(batch: int, kv_heads: int) -> Iterator[dict]:
    """Cuts of decode attention worth measuring."""
    pairs = batch * kv_heads
    for tile, stages in ((32, 4), (64, 3), (64, 4), (128, 2), (128, 3)):
        for programs in (128, 256, 512):
            wanted = min(32, max(1, programs // pairs))
            for preload in (False, True) if pairs <= 64 else (False,):
                entry = {"tile": tile, "num_stages": stages, "wanted_splits": wanted, "min_tokens": tile}
                yield entry | {"max_tokens": 4096, "preload": preload}


def tune_decode(m: Model, name: str, table: dict, report: Report, cache_dtype: torch.dtype = DTYPE) -> None:
    """The cut with the least time summed over short, middle and ragged contexts, by batch."""
    from octavo.ops.attention import triton_decode

    size = cache_dtype.itemsize
    key = triton_decode.table_key(m.heads, m.kv_heads, m.head_dim, size)
    section = table.setdefault("decode", {}).setdefault(key, {})
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    run = triton_decode.decode_attention_triton
    with record_launches() as launches:
        for batch in batches:
            (call, *_) = decode_calls(m, [1024] * batch, 8192, run, 1, cache_dtype)
            for entry in decode_candidates(batch, m.kv_heads):
                call(config=triton_decode.DecodeConfig(**entry))
    major, minor = torch.cuda.get_device_capability()
    KernelCompiler(10 * major + minor).compile(launches)
    for batch in batches:
        if report.left() < 15:
            return
        contexts = [[256] * batch, [1024] * batch, [100 + 97 * i % 1900 for i in range(batch)]]
        entries = {json.dumps(e): e for e in decode_candidates(batch, m.kv_heads)}
        totals = dict.fromkeys(entries, 0.0)
        shown = {key: [] for key in entries}
        for lens in contexts:
            calls = decode_calls(m, lens, 8192, run, 16, cache_dtype)
            for key, entry in entries.items():
                config = triton_decode.DecodeConfig(**entry)
                seconds = time_graph([functools.partial(call, config=config) for call in calls], 5)
                # Relative to the bytes moved, so that the long contexts do not decide alone.
                totals[key] += seconds / (2e-6 + sum(lens) * m.kv_heads * m.head_dim * 2 * size / 4.5e12)
                shown[key].append(f"{seconds * 1e6:.1f}")
            del calls
            torch.cuda.empty_cache()
        best = min(totals, key=totals.get)
        section[str(batch if batch < 256 else 1 << 20)] = entries[best]
        default = dataclasses.asdict(triton_decode.choose(batch, m.heads, m.kv_heads, m.head_dim, size))
        print(f"{name} decode {batch}: {' / '.join(shown[best])} us {entries[best]} (was {default})", flush=True)


def tune(models: list[str], path: Path | None, report: Report, only_fp8_cache: bool = False) -> None:
    """Measure and write the device's table; what a shortened run did not reach keeps its old entries."""
    path = path or Path(ops.__file__).parent / "tuned" / f"{table_name(torch.cuda.get_device_name())}.json"
    table = json.loads(path.read_text()) if path.is_file() else {}
    for name in models:
        if only_fp8_cache:
            tune_decode(MODELS[name], name, table, report, torch.float8_e4m3fn)
        else:
            tune_decode(MODELS[name], name, table, report)
            tune_linears(linears(MODELS[name]), name, table, report)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {path}", flush=True)


# --- compiling ahead


def launch_linears(shapes: list[LinearShape], batch: int, sweep: bool) -> None:
    """Call the chosen kernel of each product, and with `sweep` the candidates."""
    from octavo.ops.linear.triton_linear import choice_from_entry, choose, run_choice

    for shape in shapes:
        x, rest = rand(batch, shape.k), linear_arguments(shape, batch)
        weight = rand(shape.weight_rows, shape.k)
        chosen = choose(shape.n, shape.k, batch, shape.activation is not None) if batch <= 64 else None
        if chosen is not None and chosen.config is not None:
            run_choice(dataclasses.replace(chosen, separate_norm=False), x, weight, *rest)
            run_choice(dataclasses.replace(chosen, separate_norm=False), x, weight, None, None, *rest[2:])
        if sweep and batch in (1, 16, 32, 64):
            for entry in linear_candidates(shape, batch):
                choice = choice_from_entry(entry)
                gamma = None if choice.separate_norm else rest[1]
                run_choice(dataclasses.replace(choice, separate_norm=False), x, weight, None, gamma, *rest[2:])


def launch_everything(models: list[str] | None, sweep: bool) -> None:
    """Call every kernel that the other commands launch, for `record_launches` to note."""
    from octavo.ops.attention.triton_decode import DecodeConfig, decode_attention_triton

    ops.load_providers(force=True)
    for name in models or MODELS:
        m = MODELS[name]
        cos_sin, (q_norm, k_norm) = rope_table(m), head_norms(m)
        for batch in BATCHES:
            ids = torch.empty(batch, dtype=torch.int32, device="meta")
            embedding_fn, norm_fn = provider("embedding"), provider("rms_norm")
            embedding_fn(ids, rand(m.vocab, m.hidden))
            norm_fn(rand(batch, m.hidden), rand(m.hidden), EPS)
            provider("gated_activation")(rand(batch, 2 * m.intermediate), "silu")
            for block_size, cache_dtype in itertools.product((16, 64), (DTYPE, torch.float8_e4m3fn)):
                caches, table, seq_lens, slots = kv_setup(m, [1024] * batch, 1, block_size, cache_dtype)
                qkv, q = rand(batch, m.qkv_width), rand(batch, m.heads, m.head_dim)
                scale = m.head_dim**-0.5
                tail = (m.heads, m.kv_heads, q_norm, k_norm, EPS)
                provider("qkv_rope_write")(qkv, slots, cos_sin, caches[0], slots, *tail)
                provider("decode_attention")(
                    qkv, slots, cos_sin, caches[0], slots, table, seq_lens, 8192, m.heads, m.kv_heads, scale, *tail[2:]
                )
                provider("paged_attention")(q, caches[0], table, seq_lens, seq_lens, 1, 8192, scale)
                provider("paged_attention")(q, caches[0], table, seq_lens, seq_lens, 8, 8192, scale)
                if sweep and block_size == BLOCK_SIZE:
                    for entry in decode_candidates(batch, m.kv_heads):
                        decode_attention_triton(
                            qkv, slots, cos_sin, caches[0], slots, table, seq_lens, 8192, m.heads, m.kv_heads, scale,
                            *tail[2:], config=DecodeConfig(**entry),
                        )  # fmt: skip
            launch_linears(linears(m), batch, sweep)
        write_fn = provider("write_kv")
        assert write_fn is not None and write_kv.providers and rms_norm.providers and gated_activation.providers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["check", "time"], help="check, time, step, tune, tune-fp8-cache")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--table", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds; what does not fit is left out")
    args = parser.parse_args()
    if unknown := set(args.what) - {"check", "time", "step", "tune", "tune-fp8-cache"}:
        parser.error(f"unknown: {sorted(unknown)}; there are check, time, step, tune and tune-fp8-cache")
    if not torch.cuda.is_available():
        print("kernels_h200: needs an NVIDIA GPU; torch sees none")
        return
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    ops.load_providers()
    report, batches = Report(args.budget), tuple(args.batches)
    for what in args.what:
        if what == "check":
            check(args.models, batches, report)
        elif what == "time":
            time_all(args.models, batches, report)
        elif what == "step":
            time_steps(args.models, batches, report)
        else:
            tune(args.models, args.table, report, only_fp8_cache=what == "tune-fp8-cache")
    if args.json is not None:
        args.json.write_text(json.dumps(report.numbers, indent=1) + "\n")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
