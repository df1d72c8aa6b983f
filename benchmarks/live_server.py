"""A server to put load on, started here or running anywhere, and what can be seen of it from outside.

Used by the load scripts beside it. Tasks of the front's event loop are told by /server_info, so they are known only of
servers with --enable-admin-routes; memory and open files only of servers on this machine.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from octavo.bench.http_client import HttpClient

STOP_SECONDS = 60.0
POLL_SECONDS = 0.1
_ORDINARY_LINE = re.compile(r"(\(\w+ \d+\) )?[ID] ")
# What must be zero while nobody is served.
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class Process:
    """One process of the server at one moment."""

    name: str  # front or core
    rss: int  # bytes
    num_files: int
    num_threads: int


class LiveServer:
    """A server at `url`; `front` is its process when it runs on this machine."""

    def __init__(self, url: str, front: psutil.Process | None):
        self.url = url.rstrip("/")
        self.front = front
        self.http = HttpClient(self.url)

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.http.request("GET", path) as response:
            return response.status, await response.read()

    async def post(self, path: str, body: Any = None) -> tuple[int, bytes]:
        async with self.http.request("POST", path, msgspec.json.encode(body or {})) as response:
            return response.status, await response.read()

    async def metrics(self) -> Counter[str]:
        """Every sample of /metrics, added up over its labels; finished answers by reason besides."""
        status, text = await self.get("/metrics")
        assert status == 200, text
        samples: Counter[str] = Counter()
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                samples[sample.name] += sample.value
                if reason := sample.labels.get("finished_reason"):
                    samples[f"{sample.name} {reason}"] += sample.value
        return samples

    async def num_tasks(self) -> int | None:
        """Tasks on the event loop of the front; None when the server does not tell."""
        status, body = await self.get("/server_info")
        return msgspec.json.decode(body)["runtime"]["num_tasks"] if status == 200 else None

    def processes(self) -> list[Process]:
        """The front and what it started."""
        if self.front is None:
            return []
        found = [("front", self.front), *(("core", child) for child in self.front.children())]
        return [Process(name, p.memory_info().rss, p.num_fds(), p.num_threads()) for name, p in found]

    async def wait_idle(self, seconds: float) -> dict[str, float]:
        """Wait until every gauge is zero, `seconds` at most; the gauges that are not."""
        deadline = time.monotonic() + seconds
        while True:
            samples = await self.metrics()
            busy = {name: samples[name] for name in GAUGES if samples[name]}
            if not busy or time.monotonic() > deadline:
                return busy
            await asyncio.sleep(POLL_SECONDS)

    async def model(self) -> str:
        _, body = await self.get("/v1/models")
        return msgspec.json.decode(body)["data"][0]["id"]


@asynccontextmanager
async def running_server(url: str | None, model: str | None, options: Sequence[str] = ()) -> AsyncIterator[LiveServer]:
    """The server at `url`, or one started for `model` (None: a tiny random one) that is stopped with SIGTERM."""
    if url is not None:
        server = LiveServer(url, _listener(url))
        yield server
        await server.http.close()
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whoever ends this ends the server too
    with TemporaryDirectory() as folder:
        process, url = await asyncio.to_thread(_start, model or tiny_model(Path(folder)), options)
        server = LiveServer(url, psutil.Process(process.pid))
        try:
            yield server
        finally:
            await server.http.close()
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, STOP_SECONDS)
            finally:
                process.kill()
                signal.signal(signal.SIGTERM, before)


def tiny_model(folder: Path) -> str:
    """Write a random float32 Llama with a byte tokenizer, the one that tests use."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.fixtures.checkpoints import write_random_llama

    return str(write_random_llama(folder / "tiny"))


def unpack_gguf(gguf: Path, folder: Path, dtype: str) -> str:
    """Write the weights of a GGUF file as a folder that every engine reads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    # It was unpacked while it was read, but transformers takes it for quantised and would not save it.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    return str(folder)


def _start(model: str, options: Sequence[str]) -> "tuple[subprocess.Popen[str], str]":
    """Start `octavo serve` and wait until it says where it listens."""
    words = [sys.executable, "-m", "octavo", "serve", model, "--port", "0", "--enable-admin-routes"]
    words += ["--disable-uvicorn-access-log", *options]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"serving on (http://\S+)", line):
            # What it says further goes on to our own stderr, or it would block once the pipe is full.
            threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True).start()
            return process, found[1]
    process.wait()
    raise RuntimeError("the server did not start:\n" + "".join(lines))


def _pass_on(lines: Any) -> None:
    """Show what is not ordinary."""
    with lines:
        for line in lines:
            if not _ORDINARY_LINE.match(line):
                sys.stderr.write(line)


def _listener(url: str) -> psutil.Process | None:
    """The process of this machine that listens at `url`."""
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    return None
