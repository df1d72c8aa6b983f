"""Compile the Triton kernels of the decode and prefill shapes for a Hopper GPU, on any machine, into a Triton cache.

    python benchmarks/precompile_triton.py --cache build/triton --jobs 4 [--models llama-8b qwen3-0.6b] [--sweep]

Triton's cache key holds the compiler, the source and the target, not the machine: with the same Triton wheel the GPU machine
finds every kernel compiled (set TRITON_CACHE_DIR to the folder there). `--sweep` also compiles the candidates of
`kernels_h200.py tune`.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def install_stand_in_driver() -> None:
    """Let Triton compile for an H200 where there is none."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Utils:
        def get_device_properties(self, device):
            return {
                "max_shared_mem": 232448,
                "max_num_regs": 65536,
                "multiprocessor_count": 132,
                "warpSize": 32,
                "sm_clock_rate": 1980000,
                "mem_clock_rate": 3201000,
                "mem_bus_width": 6144,
            }

    class StandIn:
        utils = Utils()

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_device_capability(self, device=0):
            return (9, 0)

        def get_active_torch_device(self):
            return torch.device("cpu")

        def set_current_device(self, device):
            pass

        def map_python_to_cpp_type(self, ty):
            return ty

        def launcher_cls(self, *args):
            return None

    driver.set_active(StandIn())


def compile_all(launches: list, jobs: int) -> tuple[int, int]:
    """Compile each distinct recorded launch in `jobs` forked processes; returns (kernels, failures)."""
    distinct = {}
    for kernel, args, options in launches:
        # Tensors stand for their dtype; every pointer is taken to be 16-byte aligned, as torch allocates them.
        types = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args)
        distinct.setdefault(str((kernel.fn.__name__, types, sorted(options.items()))), (kernel, types, options))
    work = list(distinct.values())
    children = []
    for i in range(jobs):
        pid = os.fork()
        if pid == 0:
            failures = 0
            for kernel, types, options in work[i::jobs]:
                try:
                    kernel.warmup(*types, grid=(1,), **options)
                except Exception as error:
                    failures += 1
                    print("does not compile:", kernel.fn.__name__, types, options, repr(error)[:400], flush=True)
            os._exit(min(failures, 255))
        children.append(pid)
    failures = sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)
    return len(work), failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", help="folder of the Triton cache to fill")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--models", nargs="*", default=None)
    parser.add_argument("--sweep", action="store_true", help="also the candidates of the tuning sweep")
    args = parser.parse_args()
    if args.cache is None:
        print("precompile_triton: nothing to do without --cache FOLDER")
        return
    os.environ["TRITON_CACHE_DIR"] = str(Path(args.cache).resolve())
    install_stand_in_driver()
    from benchmarks import kernels_h200 as bench
    from octavo.ops.triton_utils import override_device_name, override_pdl, record_launches

    launches = []
    for pdl in (True, False):
        with override_pdl(pdl), override_device_name("NVIDIA H200"), record_launches() as recorded:
            bench.launch_everything(args.models, sweep=args.sweep and pdl)
        launches += recorded
    start = time.time()
    kernels, failures = compile_all(launches, args.jobs)
    print(f"{kernels} kernels, {failures} failed, {time.time() - start:.1f} s, in {args.cache}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
