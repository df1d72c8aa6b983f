"""`octavo bench startup`: from the start of a process to its first token, phase by phase.

Cold: every cache of compiled kernels is a new, empty folder, and the model's files are dropped from the system's page
cache (as far as nobody else has them mapped). Warm: the same again with the folder of the run before.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.report import row, title, write_json
from octavo.config.args import EngineArgs
from octavo.config.options import check_options, option
from octavo.engine.find_model import find_model
from octavo.errors import ServerError
from octavo.logger import get_logger

logger = get_logger(__name__)

_GROUP = "Benchmark"
PERCENTILES = (10, 25, 50, 75, 90, 99)
# Variables that name folders of compiled kernels.
_CACHE_VARIABLES = ("OCTAVO_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclass(kw_only=True)
class StartupArgs:
    """Options of `octavo bench startup` besides the engine's."""

    num_iters_cold: int = option(3, "Starts with empty caches.", group=_GROUP, low=1)
    num_iters_warmup: int = option(1, "Starts that fill the caches, not counted.", group=_GROUP, low=0)
    num_iters_warm: int = option(3, "Starts with filled caches.", group=_GROUP, low=1)
    output_json: str | None = option(None, "File to write the result to.", group=_GROUP)

    def __post_init__(self) -> None:
        check_options(self)


def run_startup(engine_options: Mapping[str, Any], args: StartupArgs) -> int:
    """Measure, print, write."""
    engine_args = EngineArgs(**engine_options)
    model = find_model(engine_args)  # a download is no part of a start
    cold = []
    for _ in range(args.num_iters_cold):
        drop_from_page_cache(model)
        with tempfile.TemporaryDirectory(prefix="octavo-startup-") as folder:
            cold.append(measure_start(engine_options, folder))
    with tempfile.TemporaryDirectory(prefix="octavo-startup-") as folder:
        warm = [measure_start(engine_options, folder) for _ in range(args.num_iters_warmup + args.num_iters_warm)]
    result = summarize_starts("cold", cold) | summarize_starts("warm", warm[args.num_iters_warmup :])
    print(render(result))
    if args.output_json is not None:
        write_json(args.output_json, result)
    return 0


def measure_start(engine_options: Mapping[str, Any], cache_folder: str) -> dict[str, float]:
    """Seconds of each phase of one start, in order, and their sum as `total`."""
    caches = {name: os.path.join(cache_folder, name.lower()) for name in _CACHE_VARIABLES}
    spawned = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-m", "octavo.bench.startup_child"],
        input=json.dumps(dict(engine_options)),
        capture_output=True,
        text=True,
        env=os.environ | caches,
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        raise ServerError(f"the engine did not start: {lines[-1]}")
    return phases_of(spawned, json.loads(child.stdout))


def phases_of(spawned: float, report: Mapping[str, Any]) -> dict[str, float]:
    """The phases between the time stamps of a start; what the engine did not account for is `other`."""
    stamps, engine = report["stamps"], report["engine"]
    return {
        "interpreter": stamps["entered"] - spawned,
        "imports": stamps["imported"] - stamps["entered"],
        **engine,
        "other": stamps["started"] - stamps["imported"] - sum(engine.values()),
        "first token": stamps["answered"] - stamps["started"],
        "total": stamps["answered"] - spawned,
    }


def summarize_starts(kind: str, starts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The result's keys of the cold or the warm starts."""
    totals = [phases["total"] for phases in starts]
    return {
        f"avg_{kind}_startup_time": statistics.fmean(totals),
        f"{kind}_startup_times": totals,
        f"{kind}_startup_percentiles": {str(p): float(np.percentile(totals, p)) for p in PERCENTILES},
        f"{kind}_phases": {
            name: statistics.median(phases.get(name, 0.0) for phases in starts)
            for name in dict.fromkeys(name for phases in starts for name in phases)
        },
    }


def drop_from_page_cache(model: Path) -> None:
    """Have the system forget a model's files, so that a start reads them from disk. They are not changed."""
    if not hasattr(os, "posix_fadvise"):
        logger.warning("this system cannot drop files from its page cache; cold starts read the model from memory.")
        return
    for path in [model] if model.is_file() else [path for path in model.rglob("*") if path.is_file()]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def render(result: Mapping[str, Any]) -> str:
    """Median seconds of each phase, cold and warm."""
    lines = []
    for kind in ("cold", "warm"):
        times = result[f"{kind}_startup_times"]
        lines.append(title(f"{kind.capitalize()} start, median of {len(times)} (s)", "="))
        lines += [row(name.replace("_", " ").capitalize(), value) for name, value in result[f"{kind}_phases"].items()]
    return "\n".join([*lines, title("")])
