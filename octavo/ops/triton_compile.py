"""Compile Triton kernels in parallel processes, ahead of the launches that would each wait for their own.

A start that finds no compiled kernels would spend most of its time here: a model needs about a hundred, and Triton compiles a
kernel when it is first launched, one after another. So the step is run once with its launches only noted
(`triton_utils.record_launches`), the distinct ones are compiled by as many processes as there are cores into Triton's cache
on disk, and the real launches find them there.

The processes are forked from a fresh interpreter that has never touched the device: this module run as a program. It reads
the launches as JSON, so neither code nor pickled data crosses over. Triton tells kernels apart by types, constants, values 1,
and multiples of 16 among values and addresses; a launch is noted in these terms.
"""

import contextlib
import hashlib
import importlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from octavo.logger import get_logger
from octavo.ops.triton_utils import Launch, NotedTensor, settle_hashes

logger = get_logger(__name__)


def encode(launches: Iterable[Launch]) -> list[str]:
    """The distinct launches as JSON: [module, kernel, arguments, options], a tensor as ["torch.dtype", is aligned]."""
    return sorted({json.dumps(_describe(launch), sort_keys=True) for launch in launches})


def _describe(launch: Launch) -> list[Any]:
    constants = set(launch.kernel.constexprs)
    args = [arg if place in constants else _generalise(arg) for place, arg in enumerate(launch.args)]
    return [launch.kernel.fn.__module__, launch.kernel.fn.__qualname__, args, launch.options]


def _generalise(arg: Any) -> Any:
    """A value that stands for all that share its kernel."""
    if isinstance(arg, NotedTensor):
        return [str(arg.dtype), arg.is_aligned]
    if type(arg) is int and 1 < arg < 1 << 31:
        return 16 if arg % 16 == 0 else 17
    return arg


class KernelCompiler:
    """Compiles for one device architecture. Create it early: its process imports torch while the weights load."""

    def __init__(self, arch: int, jobs: int | None = None):
        """`arch`: compute capability as Triton counts it (90 for 9.0); `jobs`: processes, by default one a core."""
        import triton

        self._arch = arch
        self._jobs = jobs or len(os.sched_getaffinity(0))
        self._folder = Path(triton.knobs.cache.dir)
        self._triton_version = triton.__version__
        self._process: subprocess.Popen[bytes] | None = None
        if not any(self._folder.glob(".octavo-*")):
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", __name__, str(self._arch), str(self._jobs)]
            # The interpreter may run kernels in this process; the compiler must not meet it.
            env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
        return self._process

    def compile(self, launches: Iterable[Launch]) -> None:
        """Have every distinct launch compiled; returns at once when the same set was compiled before.

        A kernel that does not compile is left to its launch, which will raise Triton's own error.
        """
        started = time.perf_counter()
        encoded = encode(launches)
        stamp = self._folder / f".octavo-{self._digest(encoded)}"
        if stamp.exists():
            self.close()
            return
        process = self._start()
        process.communicate("\n".join(encoded).encode())
        self._process = None
        if process.returncode != 0:
            logger.warning("compiling kernels ahead failed; each is compiled when it is first launched")
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        logger.info("%d kernels compiled or found in %.1f s", len(encoded), time.perf_counter() - started)

    def _digest(self, encoded: list[str]) -> str:
        """Names a set of kernels, their source and the compiler."""
        parts = [self._triton_version, str(self._arch), *encoded]
        parts += [path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py"))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def close(self) -> None:
        """Stop a process that is not needed after all."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def compile_all(encoded: list[str], jobs: int) -> tuple[int, int]:
    """Compile encoded launches in `jobs` forked processes; returns (kernels, kernels that do not compile).

    The processes draw the next index from one pipe, so that none is left with the slow ones.
    """
    take, give = os.pipe()
    children = []
    for _ in range(min(jobs, len(encoded))):
        pid = os.fork()
        if pid == 0:
            os.close(give)
            failures = 0
            while index := os.read(take, 4):
                failures += not _compile(encoded[struct.unpack("i", index)[0]])
            os._exit(min(failures, 255))
        children.append(pid)
    os.close(take)
    for i in range(len(encoded)):
        os.write(give, struct.pack("i", i))
    os.close(give)
    return len(encoded), sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


def _compile(line: str) -> bool:
    module, name, args, options = json.loads(line)
    kernel = getattr(importlib.import_module(module), name)
    settle_hashes(module)
    noted = [NotedTensor(getattr(torch, a[0].removeprefix("torch.")), a[1]) if isinstance(a, list) else a for a in args]
    try:
        _build_launcher(kernel.warmup(*noted, grid=(1,), **options))
    except Exception as error:
        print(f"{name} does not compile for {args} {options}: {error!r:.400}", file=sys.stderr, flush=True)
        return False
    return True


def _build_launcher(compiled: Any) -> None:
    """Build what calls the kernel: some Tritons compile a piece of C for each signature, and cache that too.

    Where there is no CUDA driver to link against, the machine with the GPU builds it at the first launch.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    with contextlib.suppress(Exception):
        CudaLauncher(compiled.src, compiled.metadata)


def install_stand_in_driver(arch: int) -> None:
    """Let Triton compile for an NVIDIA GPU of that architecture in a process without one."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class StandIn:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return divmod(arch, 10)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def set_current_device(self, device: int) -> None:
            pass

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def launcher_cls(self, *args: Any) -> None:
            return None

    driver.set_active(StandIn())


def main() -> None:
    """Read launches from stdin, compile them."""
    arch, jobs = map(int, sys.argv[1:])
    install_stand_in_driver(arch)
    lines = sys.stdin.read().splitlines()
    for module in {json.loads(line)[0] for line in lines}:
        importlib.import_module(module)
    _, failures = compile_all(lines, jobs)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
