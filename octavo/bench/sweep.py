"""`octavo bench sweep serve`: a server and a benchmark over combinations of their options.

Every combination of server options gets a server of its own; on it runs every combination of benchmark options, several
times. Folder of a sweep:

    <output_dir>/<experiment_name>/
        <server>--<bench>/run=0.json …   results as `octavo bench serve` writes them, and the combination's options
        <server>.log                     what the server said
        summary.csv  summary.png         one line a run; a picture of the usual columns

A run whose file is there and whole is not run again with `resume`.
"""

import csv
import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.bench.report import write_json
from octavo.config.options import check_options, option
from octavo.errors import ClientError, ConfigError, OctavoError, ServerError
from octavo.logger import get_logger

logger = get_logger(__name__)

_GROUP = "Sweep"
POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
MAX_NAME_CHARACTERS = 120
PLOTTED = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_ttft_ms")
# Columns tried for the x axis: the first whose values differ between the runs.
AXES = ("max_concurrency", "request_rate", "num_prompts")


@dataclass(kw_only=True)
class SweepArgs:
    """Options of `octavo bench sweep`."""

    serve_cmd: str = option("octavo serve", "Command that starts a server.", group=_GROUP)
    bench_cmd: str = option("octavo bench serve", "Command that measures one.", group=_GROUP)
    serve_params: str | None = option(
        None, "JSON file with a list of option sets of the server, or {name: set}.", group=_GROUP, metavar="FILE"
    )
    bench_params: str | None = option(
        None, "JSON file with a list of option sets of the benchmark, or {name: set}.", group=_GROUP, metavar="FILE"
    )
    num_runs: int = option(3, "Runs of each combination.", group=_GROUP, low=1)
    output_dir: str = option("results", "Folder of sweeps.", group=_GROUP, short="-o")
    experiment_name: str | None = option(None, "Folder of this one in it. Default: the time.", group=_GROUP, short="-e")
    resume: bool = option(False, "Go on with the sweep of that name: keep the runs that are there.", group=_GROUP)
    dry_run: bool = option(False, "Print the commands only.", group=_GROUP)
    continue_on_error: bool = option(False, "Go on after a server or a run that failed.", group=_GROUP)
    server_ready_timeout: int = option(300, "Seconds a server may take to start.", group=_GROUP, low=1)
    health_url: str = option(
        "http://127.0.0.1:8000/health", "Address that answers 200 when a server is ready.", group=_GROUP
    )
    plot: bool = option(False, "Draw the summary, as PNG.", group=_GROUP)

    def __post_init__(self) -> None:
        check_options(self)
        if self.resume and self.experiment_name is None:
            raise ConfigError("resume needs experiment_name: the sweep to go on with.", param="resume")


@dataclass(frozen=True)
class Combination:
    """One set of options, with the name of its folder."""

    name: str
    options: Mapping[str, Any]

    def words(self) -> list[str]:
        """The options as on a command line."""
        words = []
        for key, value in self.options.items():
            head, dot, rest = key.partition(".")
            flag = "--" + head.replace("_", "-") + dot + rest
            if value is True:
                words.append(flag)
            elif value is False:
                words.append("--no-" + flag.removeprefix("--"))
            elif isinstance(value, list):
                words += [flag, *map(str, value)]
            elif value is not None:
                words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        return words


def run_sweep(args: SweepArgs) -> int:
    """Run every combination that has no result yet; 1 when some run failed."""
    servers, benches = read_params(args.serve_params), read_params(args.bench_params)
    if args.plot:
        from octavo.bench.plots import check_plotting

        check_plotting()
    folder = Path(args.output_dir) / (args.experiment_name or datetime.now().strftime("%Y%m%d-%H%M%S"))
    if folder.exists() and not args.resume and not args.dry_run:
        raise ClientError(f"{folder} exists; go on with it (--resume) or give another --experiment-name.")
    runs = [(server, list(_open_runs(args, folder, server, benches))) for server in servers]
    if args.dry_run:
        for server, todo in runs:
            print(shlex.join([*shlex.split(args.serve_cmd), *server.words()]))
            for bench, path in todo:
                print("  " + shlex.join(_bench_command(args, bench, path)))
        return 0
    num_failed = 0
    for server, todo in runs:
        if todo:
            num_failed += _run_server(args, folder, server, todo)
    rows = collect(folder, servers, benches)
    write_summary(folder / "summary.csv", rows)
    print(f"{len(rows)} results in {folder / 'summary.csv'}" + (f", {num_failed} runs failed" if num_failed else ""))
    if args.plot and rows:
        plot(rows, folder / "summary.png")
    return 1 if num_failed else 0


def read_params(file: str | None) -> list[Combination]:
    """The option sets of a file; one empty set without a file. A set may name itself with `_benchmark_name`."""
    if file is None:
        return [Combination("default", {})]
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClientError(f"{file} cannot be read as JSON: {error}") from None
    if isinstance(content, dict):
        content = [{"_benchmark_name": name} | options for name, options in content.items()]
    if not isinstance(content, list) or not content or not all(isinstance(options, dict) for options in content):
        raise ClientError(f"{file} must hold a list of option sets (JSON objects), or an object of them by name.")
    combinations = []
    for options in content:
        name = options.get("_benchmark_name") or ",".join(f"{k}={v}" for k, v in options.items()) or "default"
        name = "".join(c if c.isalnum() or c in "=,.-_" else "_" for c in str(name))[:MAX_NAME_CHARACTERS]
        combinations.append(Combination(name, {k: v for k, v in options.items() if k != "_benchmark_name"}))
    names = [combination.name for combination in combinations]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ClientError(f"{file} has several sets called {', '.join(twice)}; name them with _benchmark_name.")
    return combinations


def collect(folder: Path, servers: Sequence[Combination], benches: Sequence[Combination]) -> list[dict[str, Any]]:
    """One row a finished run: its combination, then the plain numbers and words of its result."""
    rows = []
    for server in servers:
        for bench in benches:
            for path in sorted(_run_folder(folder, server, bench).glob("run=*.json")):
                result = _read_result(path)
                if result is not None:
                    plain = {k: v for k, v in result.items() if v is None or isinstance(v, (int, float, str))}
                    rows.append({"serve": server.name, "bench": bench.name, "run": path.stem[4:], **plain})
    return rows


def write_summary(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows as CSV, one column for every key that some row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The usual columns over what the benchmark's options varied."""
    from octavo.bench.plots import plot_sweep

    axes = [axis for axis in AXES if len({row.get(axis) for row in rows}) > 1]
    x = axes[0] if axes else AXES[-1]
    complete = [
        {**dict.fromkeys(PLOTTED), **row} for row in rows if row.get(x) is not None and float(row[x]) != float("inf")
    ]
    plot_sweep(complete, x, PLOTTED, path)


def _open_runs(
    args: SweepArgs, folder: Path, server: Combination, benches: Sequence[Combination]
) -> Iterator[tuple[Combination, Path]]:
    for bench in benches:
        for i in range(args.num_runs):
            path = _run_folder(folder, server, bench) / f"run={i}.json"
            if _read_result(path) is None:
                yield bench, path


def _run_folder(folder: Path, server: Combination, bench: Combination) -> Path:
    return folder / f"{server.name}--{bench.name}"


def _read_result(path: Path) -> dict[str, Any] | None:
    """A run's result; None when there is none, or the run was stopped while it wrote it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _bench_command(args: SweepArgs, bench: Combination, path: Path) -> list[str]:
    where = ["--save-result", "--result-dir", str(path.parent), "--result-filename", path.name]
    return [*shlex.split(args.bench_cmd), *bench.words(), *where]


def _run_server(args: SweepArgs, folder: Path, server: Combination, todo: Sequence[tuple[Combination, Path]]) -> int:
    """All runs on one server; how many failed. Without `continue_on_error` the first failure is raised."""
    num_done = num_failed = 0
    try:
        with running_server(args, folder, server):
            for bench, path in todo:
                path.parent.mkdir(parents=True, exist_ok=True)
                command = _bench_command(args, bench, path)
                logger.info("%s", shlex.join(command))
                code = subprocess.run(command).returncode
                result = _read_result(path)
                num_done += 1
                if code or result is None:
                    num_failed += 1
                    path.unlink(missing_ok=True)
                    message = f"{shlex.join(command)} ended with {code} and left no usable result."
                    if not args.continue_on_error:
                        raise ServerError(message)
                    logger.error("%s", message)
                    continue
                write_json(path, {**result, "serve_params": server.options, "bench_params": bench.options})
    except OctavoError as error:
        if not args.continue_on_error:
            raise
        logger.error("%s", error)
        num_failed += len(todo) - num_done
    return num_failed


@contextmanager
def running_server(args: SweepArgs, folder: Path, server: Combination) -> Iterator[None]:
    """A server in a process group of its own, ready inside the block and gone after it."""
    folder.mkdir(parents=True, exist_ok=True)
    if _is_healthy(args.health_url):
        raise ClientError(f"a server answers at {args.health_url} already; stop it, or use another port.")
    command = [*shlex.split(args.serve_cmd), *server.words()]
    logger.info("%s", shlex.join(command))
    log_path = folder / f"{server.name}.log"
    with open(log_path, "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_healthy(process, args, log_path)
            yield
        finally:
            _stop(process)


def _wait_healthy(process: subprocess.Popen[bytes], args: SweepArgs, log_path: Path) -> None:
    deadline = time.monotonic() + args.server_ready_timeout
    while not _is_healthy(args.health_url):
        if process.poll() is not None:
            raise ServerError(f"the server ended with {process.returncode} before it was ready; see {log_path}.")
        if time.monotonic() > deadline:
            raise ServerError(f"the server was not ready within {args.server_ready_timeout} s; see {log_path}.")
        time.sleep(POLL_SECONDS)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the whole group, then SIGKILL to what is left of it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
