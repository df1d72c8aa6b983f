"""FP8 linears on the shapes of a decode step and of prefill: right, and how fast.

    python benchmarks/fp8_h200.py check              every provider against float32
    python benchmarks/fp8_h200.py time               each product by provider, microseconds and GB/s (TFLOP/s in prefill)
    python benchmarks/fp8_h200.py step               whole decode steps in one graph, milliseconds
    python benchmarks/fp8_h200.py tune --table FILE  measure the candidates, write octavo/ops/tuned/<device>.json

Several words run one after the other. Kernels are compiled first, in `--jobs` processes that need no GPU. Times are medians of
graph replays over more copies of the weights than L2 holds. One token is tuned in a chain of whole layers under programmatic
dependent launch, since alone a kernel looks best when it leaves nothing to its neighbours.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels_h200 import (
    COLD_BYTES,
    EPS,
    MODELS,
    LinearShape,
    Model,
    Report,
    StepModel,
    device,
    error,
    in_float32,
    kv_setup,
    linear_arguments,
    linears,
    provider,
    rand,
    time_graph,
)
from octavo import ops
from octavo.ops.attention import decode_attention
from octavo.ops.embedding import embedding
from octavo.ops.linear import linear
from octavo.ops.linear.fp8 import BLOCK, FP8, FP8_MAX, dequantize_weight, linear_fp8, quantize_fp8
from octavo.ops.triton_utils import is_recording, override_device_name, override_pdl, record_launches, table_name

BATCHES = (1, 2, 8, 16, 32, 64, 128, 256)
TUNED_ROWS = (16, 32, 64, 128, 256)
PREFILL_TOKENS = 8192
CHAIN_LAYERS = 6


def products(m: Model) -> list[LinearShape]:
    """The products that are computed in FP8: all but the head."""
    return [shape for shape in linears(m) if shape.name != "lm_head"]


def fp8_weight(shape: LinearShape, by_block: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Random E4M3 numbers with scales by row or by block."""
    rows, k = shape.weight_rows, shape.k
    if is_recording():
        scale_shape = (rows // BLOCK, k // BLOCK) if by_block else (rows,)
        return rand(rows, k, dtype=FP8), rand(*scale_shape, dtype=torch.float32)
    if by_block:
        scale = torch.rand(rows // BLOCK, k // BLOCK, device=device()).add_(0.5) * (4 * k**-0.5 / FP8_MAX)
        return (rand(rows, k, scale=k**-0.5) / (4 * k**-0.5 / FP8_MAX)).to(FP8), scale
    quants, scale = quantize_fp8(rand(rows, k, scale=k**-0.5))
    return quants, scale[:, 0].contiguous()


def wanted(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, rest: tuple, is_exact: bool) -> torch.Tensor:
    """The result in float32; exact: of activations as they are, which is what one token is multiplied with."""
    wide = tuple(map(in_float32, rest))
    if is_exact:
        return linear.reference(x.float(), dequantize_weight(weight, scale), *wide)
    return linear_fp8.reference(x.float(), weight, scale, *wide)


# --- check


def check(models: list[str], batches: tuple[int, ...], report: Report) -> None:
    """Rounding, and each provider on each product, by row and by block."""
    triton, vendor, rounding = provider("linear_fp8"), provider("linear_fp8", "scaled_mm"), provider("quantize_fp8")
    assert triton is not None and vendor is not None and rounding is not None
    for name in models:
        for shape, by_block in itertools.product(products(MODELS[name]), (False, True)):
            weight, scale = fp8_weight(shape, by_block)
            for batch in batches:
                x, rest = rand(batch, shape.k), linear_arguments(shape, batch)
                label = f"{name} {shape.name}{' block' if by_block else ''} M={batch}"
                quants, x_scale = rounding(x, rest[1], EPS, None, BLOCK if by_block else None)
                want, want_scale = quantize_fp8.reference(x, rest[1], EPS, None, BLOCK if by_block else None)
                report.check(f"{label} scales", error(x_scale, want_scale), 1e-5)
                report.check(f"{label} rounding", error(quants, want), 5e-3)
                if linear_fp8.providers[0].accepts(x, weight, scale, *rest):
                    got = triton(x, weight, scale, *rest)
                    report.check(f"{label} triton", error(got, wanted(x, weight, scale, rest, batch == 1)), 1e-2)
                    again = triton(x, weight, scale, *rest)
                    report.check(f"{label} repeated", float((got != again).any()), 0.5)
                if not by_block:
                    got = vendor(x, weight, scale, *rest)
                    report.check(f"{label} scaled_mm", error(got, wanted(x, weight, scale, rest, False)), 1e-2)
            del weight, scale
            torch.cuda.empty_cache()
    done = sum(key.startswith("error") for key in report.numbers)
    print(f"check: {done} results, {len(report.wrong)} wrong, {time.time() - report.start:.1f} s", flush=True)


# --- time


def copies_of(shape: LinearShape, by_block: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights that L2 cannot hold."""
    return [fp8_weight(shape, by_block) for _ in range(max(3, -(-COLD_BYTES // (shape.weight_rows * shape.k))))]


def time_products(models: list[str], batches: tuple[int, ...], report: Report) -> None:
    """Vendor against chosen, with rounding, norm, activation and residual in both."""
    vendor = provider("linear_fp8", "scaled_mm")
    assert vendor is not None
    for name, shape in [(model, shape) for model in models for shape in products(MODELS[model])]:
        num_bytes = shape.weight_rows * shape.k
        weights, line = copies_of(shape), []
        for batch in batches:
            if report.left() < 10:
                return
            x, rest = rand(batch, shape.k), linear_arguments(shape, batch)
            theirs = time_graph([functools.partial(vendor, x, *w, *rest) for w in weights])
            chosen = time_graph([functools.partial(linear_fp8, x, *w, *rest) for w in weights])
            report.numbers[f"us {name} fp8 {shape.name} M={batch} scaled_mm"] = theirs * 1e6
            report.numbers[f"us {name} fp8 {shape.name} M={batch} chosen"] = chosen * 1e6
            line.append(f"{batch}: {theirs * 1e6:.1f}/{chosen * 1e6:.1f} ({num_bytes / chosen / 1e9:.0f})")
        print(f"{name} {shape.name:8s} us scaled_mm/chosen (GB/s)  " + "  ".join(line), flush=True)
        weights, line = weights[:1], []
        x, rest = rand(PREFILL_TOKENS, shape.k), linear_arguments(shape, PREFILL_TOKENS)
        for by_block in (False, True):
            weight = fp8_weight(shape, True) if by_block else weights[0]
            seconds = time_graph([functools.partial(linear_fp8, x, *weight, *rest)] * 3)
            kind = "block" if by_block else "row"
            report.numbers[f"us {name} fp8 {shape.name} prefill by {kind}"] = seconds * 1e6
            flops = 2 * PREFILL_TOKENS * shape.weight_rows * shape.k
            line.append(f"by {kind} {seconds * 1e6:.0f} us ({flops / seconds / 1e12:.0f} TFLOP/s)")
        print(f"{name} {shape.name:8s} {PREFILL_TOKENS} tokens  " + "  ".join(line), flush=True)
        del weights, x
        torch.cuda.empty_cache()


# --- step


class Fp8StepModel(StepModel):
    """The same step with FP8 weights in the layers."""

    def __init__(self, m: Model):
        super().__init__(dataclasses.replace(m, layers=0))
        self.m = m
        self.layers = [[fp8_weight(shape) for shape in products(m)] for _ in range(m.layers)]

    def step(self, ids, positions, caches, slots, table, seq_lens, bound) -> torch.Tensor:
        m = self.m
        x = embedding(ids, self.embedding)
        for (qkv_w, o_w, gate_up_w, down_w), cache in zip(self.layers, caches, strict=True):
            qkv = linear_fp8(x, *qkv_w, None, self.gamma, EPS)
            attended = decode_attention(
                qkv, positions, self.cos_sin, cache, slots, table, seq_lens, bound, m.heads, m.kv_heads,
                m.head_dim**-0.5, *self.norms, EPS,
            )  # fmt: skip
            x = linear_fp8(attended.view(x.shape[0], -1), *o_w, None, None, 0.0, None, x)
            h = linear_fp8(x, *gate_up_w, None, self.gamma, EPS, "silu")
            x = linear_fp8(h, *down_w, None, None, 0.0, None, x)
        return linear(x, self.lm_head, None, self.gamma, EPS)


def time_steps(models: list[str], batches: tuple[int, ...], report: Report, context: int = 256) -> None:
    """Milliseconds of a decode step without sampling, with PDL and without."""
    for name in models:
        m = MODELS[name]
        model, line = Fp8StepModel(m), []
        for batch in batches:
            if report.left() < 10:
                break
            caches, table, seq_lens, slots = kv_setup(m, [context] * batch, m.layers)
            ids = torch.randint(0, m.vocab, (batch,), device="cuda", dtype=torch.int32)
            step = functools.partial(model.step, ids, (seq_lens - 1).long(), caches, slots, table, seq_lens, 8192)
            with_pdl = time_graph([step]) * 1e3
            with override_pdl(False):
                without = time_graph([step]) * 1e3
            report.numbers[f"ms {name} fp8 step {batch}x{context}"] = with_pdl
            report.numbers[f"ms {name} fp8 step {batch}x{context} no PDL"] = without
            line.append(f"{batch}: {with_pdl:.3f}/{without:.3f}")
            del caches, step
            torch.cuda.empty_cache()
        print(f"{name} fp8 step ctx {context}, ms with/without PDL  " + "  ".join(line), flush=True)
        del model
        torch.cuda.empty_cache()


# --- tune


def gemv_candidates(shape: LinearShape) -> Iterator[dict]:
    """Entries for one token: 32 to 448 weights a thread, and a program for every multiprocessor at least."""
    gated = shape.activation is not None
    for bn, bk, warps in itertools.product((1, 2, 4, 8), (2048, 4096), (4, 8)):
        values = bn * shape.k * (2 if gated else 1)
        if shape.k % bk == 0 and 32 <= values // (warps * 32) <= 448 and shape.n // bn >= 132:
            yield {"kernel": "gemv", "block_n": bn, "block_k": bk, "num_warps": warps}


def dot_candidates(shape: LinearShape, rows: int) -> Iterator[dict]:
    """Entries for up to `rows` tokens that fill the device about once."""
    gates = 2 if shape.activation is not None else 1
    block_m = min(rows, 128)
    for (bn, bk), split in itertools.product([(64, 128), (64, 256), (128, 128)], (1, 2, 4, 8)):
        programs = -(-shape.n // bn) * split * -(-rows // block_m)
        if shape.k % (bk * split) or (split > 1 and (programs > 600 or shape.k // (bk * split) < 2)):
            continue
        fits_more = split < 8 and shape.k % (bk * split * 2) == 0
        if (programs < 110 and fits_more) or (bn == 128 and rows < 64):
            continue
        warps = 8 if block_m * bn * gates > 64 * 128 else 4
        stage = (bn * gates + block_m) * bk
        # Half of the shared memory leaves room for a second program; all of it is the deepest pipeline.
        for stages in sorted({min(5, 100_000 // stage), min(6, 200_000 // stage)}):
            if stages >= 2:
                entry = {"kernel": "dot", "block_m": block_m, "block_n": bn, "block_k": bk, "split": split}
                yield entry | {"num_stages": stages, "num_warps": warps}


def key_of(entry: dict) -> str:
    """An entry in short."""
    return " ".join(str(value) for value in entry.values())


def chain(m: Model, layers: list[list], entries: list[dict]) -> Callable[[], torch.Tensor]:
    """The products of a few layers for one token, one after the other, by the given entries."""
    from octavo.ops.linear.triton_fp8 import fp8_choice_from_entry, run_fp8_choice

    choices = [fp8_choice_from_entry(entry) for entry in entries]
    x, attended, gamma = rand(1, m.hidden), rand(1, m.heads * m.head_dim), rand(m.hidden)

    def run() -> torch.Tensor:
        hidden = x
        for qkv_w, o_w, gate_up_w, down_w in layers:
            run_fp8_choice(choices[0], hidden, *qkv_w, None, gamma, EPS)
            hidden = run_fp8_choice(choices[1], attended, *o_w, None, None, 0.0, None, hidden)
            h = run_fp8_choice(choices[2], hidden, *gate_up_w, None, gamma, EPS, "silu")
            hidden = run_fp8_choice(choices[3], h, *down_w, None, None, 0.0, None, hidden)
        return hidden

    return run


def tune_one_token(m: Model, name: str, section: dict, report: Report) -> None:
    """Change one product's entry at a time, twice around, and keep what shortens the chain."""
    from octavo.ops.linear.triton_fp8_gemv import default_fp8_gemv_config

    shapes = products(m)
    num_layers = max(CHAIN_LAYERS, -(-COLD_BYTES // sum(shape.weight_rows * shape.k for shape in shapes)))
    layers = [[fp8_weight(shape) for shape in shapes] for _ in range(num_layers)]
    entries = []
    for shape in shapes:
        made = default_fp8_gemv_config(shape.n, shape.k, shape.activation is not None)
        entries.append(
            {"kernel": "gemv", "block_n": made.block_n, "block_k": made.block_k, "num_warps": made.num_warps}
        )
    best = first = time_graph([chain(m, layers, entries)], 9)
    for i, shape in itertools.chain(enumerate(shapes), enumerate(shapes)):
        for entry in gemv_candidates(shape):
            if report.left() < 15:
                break
            trial = [*entries[:i], entry, *entries[i + 1 :]]
            seconds = time_graph([chain(m, layers, trial)], 9)
            if seconds < best * 0.998:
                best, entries = seconds, trial
    for shape, entry in zip(shapes, entries, strict=True):
        section.setdefault(shape.key, {})["1"] = entry
    shown = "  ".join(f"{shape.name} {key_of(entry)}" for shape, entry in zip(shapes, entries, strict=True))
    print(
        f"{name} fp8 M=1: {first * 1e6 / num_layers:.2f} -> {best * 1e6 / num_layers:.2f} us a layer  {shown}",
        flush=True,
    )


def tune_more(m: Model, name: str, section: dict, report: Report) -> None:
    """The fastest entry for each product and number of tokens, rounding included; the vendor where nothing beats it."""
    from octavo.ops.linear.triton_fp8 import fp8_choice_from_entry, run_fp8_choice

    vendor = provider("linear_fp8", "scaled_mm")
    assert vendor is not None
    for shape in products(m):
        weights = copies_of(shape)
        for rows in TUNED_ROWS:
            if report.left() < 12:
                return
            x, rest = rand(rows, shape.k), linear_arguments(shape, rows)
            want = wanted(x, *weights[0], rest, False)
            theirs = time_graph([functools.partial(vendor, x, *w, *rest) for w in weights], 5)
            results = []
            for entry in dot_candidates(shape, rows):
                run = functools.partial(run_fp8_choice, fp8_choice_from_entry(entry))
                try:
                    value = error(run(x, *weights[0], *rest), want)
                    seconds = time_graph([functools.partial(run, x, *w, *rest) for w in weights], 5)
                except Exception as failure:  # a candidate that does not fit is no candidate
                    print(f"  {shape.name} M={rows} {entry}: {type(failure).__name__} {str(failure)[:120]}", flush=True)
                    continue
                report.check(f"{name} fp8 {shape.name} M={rows} {key_of(entry)}", value, 1e-2)
                if value < 1e-2:
                    results.append((seconds, entry))
            results.sort(key=lambda result: result[0])
            best, entry = results[0] if results else (float("inf"), {})
            if best > theirs * 0.99:
                best, entry = theirs, {"kernel": "scaled_mm"}
            section.setdefault(shape.key, {})[str(rows)] = entry | {"us": round(best * 1e6, 1)}
            others = "  ".join(f"{seconds * 1e6:.1f} ({key_of(e)})" for seconds, e in results[1:3])
            print(
                f"{name} fp8 {shape.name} M={rows}: scaled_mm {theirs * 1e6:.1f}, best {best * 1e6:.1f} us "
                f"({shape.weight_rows * shape.k / best / 1e9:.0f} GB/s) {key_of(entry)}, next {others}",
                flush=True,
            )
        del weights
        torch.cuda.empty_cache()


def tune(models: list[str], path: Path | None, report: Report) -> None:
    """Measure and write the device's table; what a shortened run did not reach keeps its old entries."""
    path = path or Path(ops.__file__).parent / "tuned" / f"{table_name(torch.cuda.get_device_name())}.json"
    table = json.loads(path.read_text()) if path.is_file() else {}
    section = table.setdefault("linear_fp8", {})
    for name in models:
        with override_pdl(True):
            tune_one_token(MODELS[name], name, section, report)
        tune_more(MODELS[name], name, section, report)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {path}, {time.time() - report.start:.1f} s", flush=True)


# --- compiling ahead


def launch_everything(models: list[str], sweep: bool) -> None:
    """Call every kernel that the other commands launch, for `record_launches` to note."""
    from octavo.ops.linear.triton_fp8 import Fp8Choice, choose_fp8, fp8_choice_from_entry, run_fp8_choice

    ops.load_providers(force=True)
    rounding = provider("quantize_fp8")
    assert rounding is not None

    def run(choice: Fp8Choice, shape: LinearShape, rows: int, by_block: bool) -> None:
        x, rest = rand(rows, shape.k), linear_arguments(shape, rows)
        rounding(x, rest[1], EPS, None, BLOCK if by_block else None)
        if choice.config is None:
            return
        if rows == 1:
            run_fp8_choice(choice, x, *fp8_weight(shape, by_block), *rest)
            return
        from octavo.ops.linear.triton_fp8_dot import fp8_dot

        x_scale = rand(rows, shape.k // BLOCK if by_block else 1, dtype=torch.float32)
        fp8_dot(
            rand(rows, shape.k, dtype=FP8),
            x_scale,
            *fp8_weight(shape, by_block),
            x.dtype,
            choice.config,
            None,
            *rest[3:],
        )

    for name in models:
        for shape in products(MODELS[name]):
            for batch, by_block in itertools.product((*BATCHES, PREFILL_TOKENS), (False, True)):
                run(choose_fp8(shape.n, shape.k, batch, shape.activation is not None, by_block), shape, batch, by_block)
            if sweep:
                for entry in gemv_candidates(shape):
                    run(fp8_choice_from_entry(entry), shape, 1, False)
                for rows in TUNED_ROWS:
                    for entry in dot_candidates(shape, rows):
                        run(fp8_choice_from_entry(entry), shape, rows, False)


def compile_ahead(models: list[str], sweep: bool, jobs: int) -> None:
    """Fill Triton's cache; runs in a process that never touches the GPU."""
    from octavo.ops.triton_compile import compile_all, encode, install_stand_in_driver

    install_stand_in_driver(90)
    launches, start = [], time.time()
    for pdl in (True, False):
        with override_pdl(pdl), override_device_name("NVIDIA H200"), record_launches() as recorded:
            launch_everything(models, sweep and pdl)
        launches += recorded
    kernels, failures = compile_all(encode(launches), jobs)
    print(f"compiled {kernels} kernels, {failures} failed, {time.time() - start:.1f} s", flush=True)
    sys.exit(bool(failures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", nargs="*", choices=["check", "time", "step", "tune", "compile"], default=["check", "step"]
    )
    parser.add_argument("--models", nargs="*", default=["llama-8b"], choices=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--table", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--sweep", action="store_true", help="compile the candidates of tune, too")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds; what does not fit is left out")
    args = parser.parse_args()
    if "compile" in args.what:
        compile_ahead(args.models, args.sweep, args.jobs)
    if not torch.cuda.is_available():
        print("fp8_h200: needs an NVIDIA GPU; torch sees none")
        return
    command = [sys.executable, __file__, "compile", "--jobs", str(args.jobs), "--models", *args.models]
    subprocess.run(command + (["--sweep"] if "tune" in args.what else []), check=False)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    ops.load_providers()
    report, batches = Report(args.budget), tuple(args.batches)
    for what in args.what:
        if what == "check":
            check(args.models, batches, report)
        elif what == "time":
            time_products(args.models, batches, report)
        elif what == "step":
            time_steps(args.models, batches, report)
        else:
            tune(args.models, args.table, report)
    if args.json is not None:
        args.json.write_text(json.dumps(report.numbers, indent=1) + "\n")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
