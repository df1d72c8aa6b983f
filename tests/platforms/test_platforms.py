"""Which platform is chosen, and what the CPU finds out about its container."""

import logging
import os
from pathlib import Path

import pytest

from octavo import platforms, plugins
from octavo.errors import ConfigError
from octavo.platforms import cpu, get_platform
from octavo.platforms.base import BatchDefaults
from octavo.platforms.cpu import CpuPlatform
from octavo.platforms.cuda import CudaPlatform
from octavo.platforms.rocm import RocmPlatform


@pytest.fixture
def fresh():
    """Nothing remembered from earlier probes."""
    for function in (platforms.current_platform, plugins.load, plugins.run):
        function.cache_clear()
    yield
    for function in (platforms.current_platform, plugins.load, plugins.run):
        function.cache_clear()


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_cpu_is_always_there():
    platform = get_platform("cpu")
    assert platform.device == "cpu"
    assert 0 < platform.available_memory() <= platform.total_memory()
    assert 1 <= platform.num_threads <= (os.cpu_count() or 1)
    assert platform.preferred_dtype in platform.supported_dtypes
    assert platform.batch_defaults("llm") == BatchDefaults(1024, 256)
    assert platform.batch_defaults("server") == BatchDefaults(512, 128)
    platform.synchronize()


def test_platforms_by_name(monkeypatch):
    monkeypatch.setattr(CudaPlatform, "is_available", classmethod(lambda cls: False))
    with pytest.raises(ConfigError, match="device='cuda' is not available on this machine; it has cpu"):
        get_platform("cuda")
    for wrong in ("tpu", "cuda:x", "cpu:-1", ""):
        with pytest.raises(ConfigError, match="is not known; use auto, or one of cuda, rocm, cpu"):
            get_platform(wrong)


def test_the_first_platform_found_is_taken_unless_the_environment_names_one(fresh, monkeypatch):
    monkeypatch.setattr(CudaPlatform, "is_available", classmethod(lambda cls: True))
    assert get_platform().name == "cuda"
    assert get_platform("cuda:1").device == "cuda:1"
    platforms.current_platform.cache_clear()
    monkeypatch.setenv("OCTAVO_PLATFORM", "cpu")
    assert get_platform("auto").name == "cpu"


def test_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(RocmPlatform, "is_available", classmethod(lambda cls: True))
    with pytest.raises(ConfigError, match="AMD GPUs are not supported yet"):
        get_platform("rocm")


@pytest.mark.parametrize(
    ("gib", "capability", "usage", "expected"),
    [
        (180, (10, 0), "server", (16384, 1024)),
        (80, (9, 0), "server", (8192, 1024)),
        (80, (9, 0), "llm", (16384, 1024)),
        (80, (8, 0), "server", (2048, 256)),
        (24, (8, 9), "llm", (8192, 256)),
    ],
)
def test_gpu_batch_defaults_follow_memory_and_generation(monkeypatch, gib, capability, usage, expected):
    platform = CudaPlatform()
    monkeypatch.setattr(platform, "total_memory", lambda: gib << 30)
    monkeypatch.setattr(CudaPlatform, "capability", capability)
    assert platform.batch_defaults(usage) == BatchDefaults(*expected)


def test_gpu_dtypes_follow_capability(monkeypatch):
    monkeypatch.setattr(CudaPlatform, "capability", (9, 0))
    assert CudaPlatform().preferred_dtype == "bfloat16"
    monkeypatch.setattr(CudaPlatform, "capability", (7, 5))
    assert CudaPlatform().supported_dtypes == ("float16", "float32")


@pytest.mark.gpu
def test_a_real_gpu_answers():
    platform = get_platform("cuda")
    assert 0 < platform.available_memory() <= platform.total_memory()
    assert platform.describe().startswith("cuda:0 (")
    platform.synchronize()


def test_memory_limit_is_the_tightest_of_the_groups_above(tmp_path, monkeypatch):
    group = tmp_path / "a" / "b"
    write(tmp_path, memory_DOT_max="max", a__memory_DOT_max=str(1 << 30), a__b__memory_DOT_max=str(2 << 30))
    monkeypatch.setattr(cpu, "_own_cgroup", lambda root: group)
    assert cpu.cgroup_memory_limit(tmp_path) == 1 << 30
    write(tmp_path, a__b__memory_DOT_current=str(900), a__b__memory_DOT_stat="anon 5\ninactive_file 300\n")
    assert cpu.cgroup_memory_used(tmp_path) == 600


def test_version_1_of_cgroups(tmp_path):
    write(
        tmp_path,
        memory__memory_DOT_limit_in_bytes=str(3 << 30),
        memory__memory_DOT_usage_in_bytes="1000",
        memory__memory_DOT_stat="total_inactive_file 400\n",
        cpu__cpu_DOT_cfs_quota_us="150000",
        cpu__cpu_DOT_cfs_period_us="100000",
    )
    assert cpu.cgroup_memory_limit(tmp_path) == 3 << 30
    assert cpu.cgroup_memory_used(tmp_path) == 600
    assert cpu.cgroup_cpu_quota(tmp_path) == 1.5
    write(tmp_path, memory__memory_DOT_limit_in_bytes=str(9223372036854771712), cpu__cpu_DOT_cfs_quota_us="-1")
    assert cpu.cgroup_memory_limit(tmp_path) is None
    assert cpu.cgroup_cpu_quota(tmp_path) is None


def test_no_cgroup_is_no_limit(tmp_path):
    assert cpu.cgroup_memory_limit(tmp_path) is None
    assert cpu.cgroup_memory_used(tmp_path) is None
    assert cpu.cgroup_cpu_quota(tmp_path) is None
    assert cpu.cgroup_cpu_quota(write(tmp_path, cpu_DOT_max="max 100000")) is None
    assert cpu.cgroup_cpu_quota(write(tmp_path, cpu_DOT_max="50000 100000")) == 0.5


@pytest.mark.parametrize(
    ("omp", "quota", "expected"),
    [
        ("", None, 8),
        ("1", None, 1),
        ("17", None, 8),
        ("64", 2.0, 2),
        ("", 2.0, 2),
        ("", 0.5, 1),
        ("4,2", None, 4),
        ("x", None, 8),
    ],
)
def test_threads_follow_affinity_quota_and_omp_num_threads(monkeypatch, omp, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cpu, "cgroup_cpu_quota", lambda: quota)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert cpu.count_threads() == expected


def test_available_memory_stays_inside_the_container(monkeypatch):
    monkeypatch.setattr(cpu, "cgroup_memory_limit", lambda: 1000)
    monkeypatch.setattr(cpu, "cgroup_memory_used", lambda: 400)
    assert CpuPlatform().total_memory() == 1000
    assert CpuPlatform().available_memory() == 600


class FakeEntryPoint:
    group = plugins.PLATFORMS

    def __init__(self, name: str, value: object):
        self.name, self.value, self.made = name, f"package:{name}", value
        self.num_loads = 0

    def load(self) -> object:
        self.num_loads += 1
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def test_a_plugin_adds_a_platform_and_a_broken_one_is_named_and_left_out(fresh, monkeypatch, caplog):
    class Npu(CpuPlatform):
        name = "npu"

    points = [FakeEntryPoint("broken", RuntimeError("no driver")), FakeEntryPoint("npu", Npu)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == plugins.PLATFORMS else [])
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    assert list(platforms.known_platforms()) == ["npu", "cuda", "rocm", "cpu"]
    assert get_platform().name == "npu"
    assert "plugin broken (package:broken, group octavo.platforms) failed to load" in caplog.text
    assert [point.num_loads for point in points] == [1, 1]  # not at every question


def test_registration_functions_run_once_and_failures_stay_alone(fresh, monkeypatch, caplog):
    calls = []

    def broken() -> None:
        raise RuntimeError("bad plugin")

    points = [FakeEntryPoint("bad", broken), FakeEntryPoint("good", lambda: calls.append(1))]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    assert plugins.run(plugins.MODELS) == ["good"]
    assert plugins.run(plugins.MODELS) == ["good"]
    assert calls == [1]
    assert "plugin bad of group octavo.models failed to register" in caplog.text
    with pytest.raises(ValueError, match="no plugin group"):
        plugins.load("octavo.nothing")
