"""The CPU, within the limits of the container it runs in: cgroup memory and quota, affinity, OMP_NUM_THREADS."""

import os
import platform as host
from functools import cached_property
from pathlib import Path

from octavo.platforms.base import BatchDefaults, Platform, Usage

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "no limit"


class CpuPlatform(Platform):
    """Runs everywhere; the reference operators serve what no kernel does."""

    name = "cpu"
    default_block_size = 32
    # Host and device are the same cores: a second step in flight would only compete with the first.
    default_async_scheduling = False
    default_memory_utilization = None
    supports_graphs = False

    @classmethod
    def is_available(cls) -> bool:
        return True

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def supported_dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16", "float16")

    @property
    def preferred_dtype(self) -> str:
        """bfloat16 where the cores multiply it natively in tiles, else float32."""
        return "bfloat16" if "amx_bf16" in cpu_flags() else "float32"

    def total_memory(self) -> int:
        import psutil

        total = psutil.virtual_memory().total
        limit = cgroup_memory_limit()
        return total if limit is None else min(total, limit)

    def available_memory(self) -> int:
        import psutil

        available = psutil.virtual_memory().available
        limit, used = cgroup_memory_limit(), cgroup_memory_used()
        return available if limit is None or used is None else max(0, min(available, limit - used))

    def batch_defaults(self, usage: Usage) -> BatchDefaults:
        # A few hundred tokens already keep the cores busy; longer steps only make everybody else's next token late, and
        # the worst step is run once at the start to measure its memory.
        return BatchDefaults(1024, 256) if usage == "llm" else BatchDefaults(512, 128)

    @cached_property
    def num_threads(self) -> int:
        return count_threads()

    def describe(self) -> str:
        return f"cpu ({host.machine()}, {self.num_threads} threads, {self.total_memory() / 2**30:.1f} GiB)"


def count_threads() -> int:
    """Cores this process may really use: OMP_NUM_THREADS where set, else affinity cut by the container's CPU quota.

    More threads than that only wait for each other, so a larger OMP_NUM_THREADS is cut as well.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    if quota is not None:
        cores = min(cores, max(1, round(quota)))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(cores, int(asked)) if asked.isdigit() and int(asked) > 0 else cores


def cpu_flags() -> frozenset[str]:
    """Instruction set flags as Linux names them; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cgroup_memory_limit(root: Path = _CGROUP_ROOT) -> int | None:
    """Bytes this container may use, cgroup version 2 or 1; None without a limit."""
    return _tightest(root, ("memory.max",), ("memory/memory.limit_in_bytes",))


def cgroup_memory_used(root: Path = _CGROUP_ROOT) -> int | None:
    """Bytes charged to this container, without file cache that can be dropped."""
    folder = _own_cgroup(root)
    for current, stat, key in (
        (folder / "memory.current", folder / "memory.stat", "inactive_file"),
        (root / "memory/memory.usage_in_bytes", root / "memory/memory.stat", "total_inactive_file"),
    ):
        used = _read_number(current)
        if used is not None:
            return max(0, used - _read_stat(stat, key))
    return None


def cgroup_cpu_quota(root: Path = _CGROUP_ROOT) -> float | None:
    """Cores' worth of time this container may use; None without a limit."""
    for folder in _upwards(_own_cgroup(root), root):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            return int(quota) / int(period)
    quota_us = _read_number(root / "cpu/cpu.cfs_quota_us")
    period_us = _read_number(root / "cpu/cpu.cfs_period_us")
    if quota_us is not None and period_us and quota_us > 0:
        return quota_us / period_us
    return None


def _tightest(root: Path, v2_names: tuple[str, ...], v1_names: tuple[str, ...]) -> int | None:
    """The smallest limit from this process's group up to the root, or version 1's file."""
    paths = [folder / name for folder in _upwards(_own_cgroup(root), root) for name in v2_names]
    paths += [root / name for name in v1_names]
    limits = [number for number in map(_read_number, paths) if number is not None and 0 < number < _UNLIMITED]
    return min(limits, default=None)


def _own_cgroup(root: Path) -> Path:
    """The version 2 folder of this process; in a container usually the root itself."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return root
    for line in lines:
        if line.startswith("0::"):
            folder = root / line.removeprefix("0::").lstrip("/")
            return folder if folder.is_dir() else root
    return root


def _upwards(folder: Path, root: Path) -> list[Path]:
    """`folder` and its parents up to `root`."""
    return [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
