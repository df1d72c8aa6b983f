"""Compile the Triton kernels of the decode and prefill shapes for a Hopper GPU, on any machine, into a Triton cache.

    python benchmarks/precompile_triton.py --cache build/triton --jobs 4 [--models llama-8b qwen3-0.6b] [--sweep]
    python benchmarks/precompile_triton.py --cache build/triton --script moe_h200

Triton's cache key holds the compiler, the source and the target, not the machine: with the same Triton wheel the GPU machine
finds every kernel compiled (set TRITON_CACHE_DIR to the folder there). `--sweep` also compiles the candidates of the
script's `tune`.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

HOPPER = 90  # compute capability 9.0

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", help="folder of the Triton cache to fill")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--script", choices=["kernels_h200", "moe_h200"], default="kernels_h200", help="whose kernels")
    parser.add_argument("--models", nargs="*", default=None)
    parser.add_argument("--sweep", action="store_true", help="also the candidates of the tuning sweep")
    args = parser.parse_args()
    if args.cache is None:
        print("precompile_triton: nothing to do without --cache FOLDER")
        return
    os.environ["TRITON_CACHE_DIR"] = str(Path(args.cache).resolve())
    bench = importlib.import_module(f"benchmarks.{args.script}")
    from octavo.ops.triton_compile import compile_all, encode, install_stand_in_driver
    from octavo.ops.triton_utils import override_device_name, override_pdl, record_launches

    install_stand_in_driver(HOPPER)
    launches = []
    for pdl in (True, False):
        with override_pdl(pdl), override_device_name("NVIDIA H200"), record_launches() as recorded:
            bench.launch_everything(args.models, sweep=args.sweep and pdl)
        launches += recorded
    start = time.time()
    kernels, failures = compile_all(encode(launches), args.jobs)
    print(f"{kernels} kernels, {failures} failed, {time.time() - start:.1f} s, in {args.cache}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
