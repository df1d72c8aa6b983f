"""Builds the C++ kernels (csrc/cpu) with the machine's own compiler for its own instruction set, once, and caches them.

The file's name is a hash of sources, compiler, flags and processor, so that a cache shared by different machines holds one
library for each. The translation units compile side by side; the result appears under its name by an atomic rename, and a
lock keeps a second process from building the same thing meanwhile.

A machine without a compiler uses the libraries that a package may bring, one for each level of x86-64: `make wheel` runs
`python -m octavo.ops.cpu.build` to make them.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo import envs
from octavo.logger import get_logger
from octavo.platforms.cpu import cpu_flags

logger = get_logger(__name__)

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=default", "-pthread")
PREBUILT = Path(__file__).with_name("prebuilt")
# Level of x86-64 -> the flags of /proc/cpuinfo that tell it from the one before; the best one first.
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2", "movbe"},
    "x86-64-v3": {"avx2", "fma", "f16c", "bmi2", "movbe"},
}


class BuildError(Exception):
    """There is no library, and why."""


def library_path() -> Path:
    """The compiled library, built first if need be; BuildError when this machine cannot and nothing prebuilt fits."""
    try:
        compiler = find_compiler()
    except BuildError:
        fitting = [level for level, flags in LEVELS.items() if flags <= cpu_flags() and prebuilt_path(level).exists()]
        if not fitting or platform.machine() != "x86_64":
            raise
        logger.info("no C++ compiler: CPU kernels prebuilt for %s", fitting[0])
        return prebuilt_path(fitting[0])
    target = _cache_dir() / f"cpu-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    with _lock(target.with_suffix(".lock")):
        if not target.exists():  # another process may have built it while we waited
            started = time.perf_counter()
            _compile(compiler, target, "native")
            logger.info("built the CPU kernels with %s in %.1f s", compiler, time.perf_counter() - started)
    return target


def prebuilt_path(level: str) -> Path:
    """Where a package keeps the library of a level; one of other sources has another name."""
    return PREBUILT / f"{level}-{_hash_sources().hexdigest()[:20]}.so"


def build_levels() -> None:
    """Compile the library of every level, for a package to bring."""
    shutil.rmtree(PREBUILT, ignore_errors=True)
    PREBUILT.mkdir()
    for level in LEVELS:
        _compile(find_compiler(), prebuilt_path(level), level)


def find_compiler() -> str:
    """A C++ compiler: $CXX where set, else the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler: looked for {', '.join(names)}")


def _cache_dir() -> Path:
    """Where libraries are kept; a private temporary folder where the cache cannot be written."""
    path = Path(envs.OCTAVO_CACHE_DIR).expanduser() / "kernels"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    path = Path(tempfile.gettempdir()) / f"octavo-kernels-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise BuildError(f"{path} belongs to somebody else; set OCTAVO_CACHE_DIR to a folder of your own")
    return path


def _hash_sources() -> "hashlib._Hash":
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest


def _fingerprint(compiler: str) -> str:
    digest = _hash_sources()
    stat = os.stat(compiler)
    digest.update(repr((compiler, stat.st_size, stat.st_mtime_ns, FLAGS, sorted(cpu_flags()))).encode())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, target: Path, march: str) -> None:
    units = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:

        def compile_unit(source: Path) -> Path:
            made = Path(folder) / f"{source.stem}.o"
            _call([compiler, *FLAGS, f"-march={march}", "-c", str(source), "-o", str(made)])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [str(made) for made in pool.map(compile_unit, units)]
        linked = Path(folder) / "linked.so"
        _call([compiler, "-shared", "-pthread", *objects, "-o", str(linked)])
        os.replace(linked, target)


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not start: {error}") from None
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    build_levels()
