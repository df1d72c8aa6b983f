"""Where a decode step's time goes on a CPU: each kind of kernel, the barriers between kernels, and Python.

    python benchmarks/cpu_step.py --model smollm2 --batch 1 --context 128

The kernels of the recorded step are run one at a time in their order, so that weights come from where they come from in a
step; what starting the team costs is taken off. A barrier is what a kernel without work takes in a long program. Python is
what a measured step takes beyond its program.
"""

import argparse
import ctypes
import statistics
import time
from collections import defaultdict
from typing import Any

from octavo import LLM, SamplingParams
from octavo.ops.cpu.runtime import runtime
from octavo.ops.cpu.structs import NormArgs

RUNS = 5
ENDS = ("gather_decode", "store_sampled")  # each run moves the step's state on


def time_run(steps: list[tuple[int, Any]]) -> float:
    """Seconds of one run of a program of these kernels."""
    words = [word for kernel, args in steps for word in (kernel, ctypes.addressof(args))]
    array = (ctypes.c_void_p * len(words))(*words)
    started = time.perf_counter()
    runtime().run(array, len(steps))
    return time.perf_counter() - started


def split(worker: Any, batch: int) -> tuple[dict[str, float], float, float]:
    """Seconds a step of the worker's decode program: by kernel, of its barriers, of the whole."""
    program = worker.runner.graphs._decode
    program._counts[0].cell.value = batch
    names = {address: name for name, address in runtime().kernels.items()}
    steps = [step for step in program._kept[0] if names[step[0]] not in ENDS]
    nothing = ctypes.c_int64(0)
    idle = (runtime().kernels["rms_norm"], NormArgs(rows=ctypes.addressof(nothing)))
    start = statistics.median(time_run([idle]) for _ in range(100))
    barriers = statistics.median(time_run([idle] * len(steps)) for _ in range(RUNS))
    passes = [[time_run([step]) for step in steps] for _ in range(RUNS)]
    by_kernel: dict[str, float] = defaultdict(float)
    for step, seconds in zip(steps, zip(*passes, strict=True), strict=True):
        by_kernel[names[step[0]]] += statistics.median(seconds) - start
    return by_kernel, barriers, statistics.median(time_run(steps) for _ in range(RUNS))


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    prompts = [[100 + 7 * i + row for i in range(args.context)] for row in range(args.batch)]
    options = {"max_model_len": args.context + args.steps + 1, "max_num_seqs": args.batch}
    with LLM(args.model, enable_prefix_caching=False, **options) as llm:

        def run(num_tokens: int) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - started

        run(2)
        pairs = [(run(1), run(args.steps + 1)) for _ in range(3)]
        step = statistics.median(long - short for short, long in pairs) / args.steps
        [(by_kernel, barriers, program)] = llm.collective_rpc(split, args=(args.batch,))
    rows = sorted(by_kernel.items(), key=lambda item: -item[1])
    rows += [("barriers", barriers), ("Python and the rest", step - program)]
    print(
        f"a step of {args.batch} with {args.context} tokens each: {step * 1e3:.2f} ms, {runtime().num_threads} threads"
    )
    for name, seconds in rows:
        print(f"  {name:20} {seconds * 1e3:8.2f} ms {seconds / step:7.1%}")


if __name__ == "__main__":
    main()
