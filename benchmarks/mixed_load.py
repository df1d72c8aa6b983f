"""Load a server for a long time with everything clients do, and see that nothing is left of it.

    python benchmarks/mixed_load.py --duration 1800                       # a tiny random model with a small KV cache
    python benchmarks/mixed_load.py --duration 600 --url http://127.0.0.1:8000
    python benchmarks/mixed_load.py --duration 600 --model smollm2

`--concurrency` clients send chats and completions, streamed and whole: shared prefixes, n = 2, log probabilities, stop
strings, seeds, prompts of every length; one in five hangs up (in a stream, in a whole answer, while queued, with n = 3,
during the prefill of a long prompt), one in ten is wrong. Prints the state of the server as it goes.

Promises, each a reason to exit with 1: every answer that is not cut off is complete and its usage is the number of its
tokens; wrong requests get a 4xx; answers to one greedy and one seeded question never change; at the end the server has
counted the tokens that were used, its gauges are zero (all blocks free), no task and no file is left, memory is flat.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from live_server import LiveServer, Process, running_server

from octavo.bench.http_client import HttpClient, HttpError, server_sent_events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEADLINE_SECONDS = 300.0  # of one answer, behind as many others as there are clients
IDLE_SECONDS = 10.0
MAX_BROKEN = 100
# What a process may grow from the first third of the run to its end. Allocators keep what a rare peak needed.
MAX_GROWTH = 48 << 20
# For the server that is started here: a cache that holds a few requests, so that they preempt each other.
SERVER_OPTIONS = (
    *("--num-gpu-blocks-override", "28", "--block-size", "16", "--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "128", "--max-model-len", "256"),
    *("--dtype", "float32"),  # a GPU would compute in bfloat16, where the last bits depend on the batch
)
WRONG: tuple[tuple[str, Any], ...] = (
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}),
    (COMPLETIONS, {"prompt": "a", "n": 10**9}),
    (COMPLETIONS, {"prompt": [10**9]}),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 5}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "model": "nobody"}),
    ("/tokenize", {"prompt": 5}),
    ("/v1/nothing", {}),
)
PREFIXES = tuple(f"Conversation {i}. You are a helpful assistant who knows everything about it. " for i in range(4))


class Mix:
    """The clients and what they saw."""

    def __init__(self, server: LiveServer, model: str, max_model_len: int, seed: int):
        self.server = server
        self.model = model
        self.max_model_len = max_model_len
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.used: Counter[str] = Counter()  # tokens that clients were told of
        self.broken: list[str] = []
        self.known: dict[str, Any] = {}

    def fail(self, message: str) -> None:
        self.broken.append(message)
        print(f"BROKEN {message}", flush=True)

    def body(self) -> tuple[str, dict[str, Any]]:
        """A right request."""
        rng = self.rng
        words = " ".join(rng.choice(("one", "two", "tree", "é", "🌶", "x1")) for _ in range(rng.choice((1, 5, 12))))
        text = (rng.choice(PREFIXES) if rng.random() < 0.5 else "") + words
        body: dict[str, Any] = {"model": self.model, "max_tokens": rng.choice((1, 4, 16, 40, 100)), "ignore_eos": True}
        body |= rng.choice(({"temperature": 0}, {"temperature": 1, "seed": rng.randrange(1000)}, {"temperature": 0.8}))
        body |= rng.choice(
            ({}, {}, {"n": 2}, {"stop": ["e", "qq"]}, {"min_p": 0.1, "frequency_penalty": 0.5}, {"top_k": 5})
        )
        if rng.random() < 0.5:
            body["messages"] = [{"role": "user", "content": text}]
            return CHAT, body | rng.choice(({}, {"logprobs": True, "top_logprobs": 2}))
        body["prompt"] = text
        return COMPLETIONS, body | rng.choice(({}, {"logprobs": 2}, {"echo": True}))

    async def client(self, until: float) -> None:
        """One client after the other, until the time is over or enough is broken to know."""
        while time.monotonic() < until and len(self.broken) < MAX_BROKEN:
            kinds = (self.hang_up, self.be_wrong, self.ask_what_is_known, self.ask)
            (act,) = self.rng.choices(kinds, weights=(20, 10, 5, 65))
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await act()
            except TimeoutError:
                self.fail(f"{act.__name__}: no answer within {DEADLINE_SECONDS:g} s")
            except (HttpError, OSError, ValueError, KeyError) as error:
                self.fail(f"{act.__name__}: an answer broke: {error!r}")

    async def ask(self) -> None:
        path, body = self.body()
        is_stream = self.rng.random() < 0.6
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body["return_token_ids"] = True
        async with self.server.http.request("POST", path, json.dumps(body).encode()) as response:
            if response.status != 200:
                self.fail(f"status {response.status} for {body}: {(await response.read())[:300]!r}")
                return
            if is_stream:
                chunks = [json.loads(data) async for data in server_sent_events(response.pieces()) if data != b"[DONE]"]
            else:
                chunks = [json.loads(await response.read())]
        self.counts["stream" if is_stream else "whole"] += 1
        self.check(body, chunks)

    def check(self, body: dict[str, Any], chunks: list[dict[str, Any]]) -> None:
        """Every choice ended once, and its tokens are those of the usage."""
        if errors := [chunk["error"] for chunk in chunks if "error" in chunk]:
            self.fail(f"an answer failed: {errors[0]}")
            return
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ends = Counter(choice["index"] for choice in choices if choice["finish_reason"])
        if ends != Counter(range(body.get("n", 1))):
            self.fail(f"choices ended {dict(ends)} times for {body}")
        usage = chunks[-1]["usage"]
        num_tokens = sum(len(choice.get("token_ids") or ()) for choice in choices)
        if num_tokens != usage["completion_tokens"]:
            self.fail(f"{num_tokens} tokens came, usage says {usage['completion_tokens']}: {body}")
        self.used["prompt"] += usage["prompt_tokens"]
        self.used["generation"] += usage["completion_tokens"]

    async def be_wrong(self) -> None:
        path, body = self.rng.choice(WRONG)
        status, answer = await self.server.post(path, body)
        if not 400 <= status < 500:
            self.fail(f"status {status} for {path} {body}: {answer[:300]!r}")
        self.counts["wrong"] += 1

    async def ask_what_is_known(self) -> None:
        """The same question gets the same answer, whatever else runs."""
        name, how = self.rng.choice((("greedy", {"temperature": 0}), ("seeded", {"temperature": 1, "seed": 5, "n": 2})))
        body = {"model": self.model, "prompt": "What never changes", "max_tokens": 12, "ignore_eos": True, **how}
        status, answer = await self.server.post(COMPLETIONS, body)
        if status != 200:
            self.fail(f"status {status} for the {name} question: {answer[:300]!r}")
            return
        found = json.loads(answer)
        texts = [choice["text"] for choice in found["choices"]]
        if self.known.setdefault(name, texts) != texts:
            self.fail(f"the {name} question was answered {texts} after {self.known[name]}")
        self.used["prompt"] += found["usage"]["prompt_tokens"]
        self.used["generation"] += found["usage"]["completion_tokens"]
        self.counts[name] += 1

    async def hang_up(self) -> None:
        """The five ways: in a stream, in a whole answer, while queued, with n = 3, during prefill."""
        way = self.rng.choice(("stream", "whole", "queued", "n", "prefill"))
        room = self.max_model_len // 2
        body: dict[str, Any] = {"model": self.model, "prompt": "Nobody waits", "max_tokens": room, "ignore_eos": True}
        body |= {"stream": way in ("stream", "n"), "n": 3 if way == "n" else 1}
        if way == "prefill":
            body["prompt"] = [5 + self.rng.randrange(400) for _ in range(room)]
        gone = HttpClient(self.server.url)
        sending = asyncio.ensure_future(self._read_a_little(gone, body))
        # Queued and in prefill: before anything can have come. The others leave after the first bytes, or a moment.
        await asyncio.wait({sending}, timeout=0.02 if way in ("queued", "prefill") else self.rng.uniform(0.1, 2.0))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await gone.close()
        self.counts[f"hung up: {way}"] += 1

    @staticmethod
    async def _read_a_little(http: HttpClient, body: dict[str, Any]) -> None:
        async with http.request("POST", COMPLETIONS, json.dumps(body).encode()) as response:
            pieces = response.pieces()
            await anext(pieces, None)
            if not body["stream"]:
                await anext(pieces, None)


class Watch:
    """The server over time."""

    def __init__(self, server: LiveServer):
        self.server = server
        self.memory: list[list[Process]] = []
        self.started = time.monotonic()

    async def follow(self, mix: Mix, every: float) -> None:
        while True:
            await self.look(mix)
            await asyncio.sleep(every)

    async def look(self, mix: Mix) -> None:
        samples, processes = await self.server.metrics(), self.server.processes()
        self.memory.append(processes)
        print(
            f"{time.monotonic() - self.started:6.0f} s: running {samples['vllm:num_requests_running']:g}, "
            f"waiting {samples['vllm:num_requests_waiting']:g}, cache {samples['vllm:kv_cache_usage_perc']:.0%}, "
            f"preempted {samples['vllm:num_preemptions_total']:g}, tasks {await self.server.num_tasks()}, "
            + ", ".join(f"{p.name} {p.rss / 2**20:.0f} MiB" for p in processes)
            + f", requests {sum(mix.counts.values())}, broken {len(mix.broken)}",
            flush=True,
        )


async def run(args: argparse.Namespace) -> int:
    async with running_server(args.url, args.model, SERVER_OPTIONS) as server:
        _, models = await server.get("/v1/models")
        card = json.loads(models)["data"][0]
        mix, watch = Mix(server, card["id"], card["max_model_len"], args.seed), Watch(server)
        before, tasks, files = await server.metrics(), await server.num_tasks(), server.processes()
        watching = asyncio.create_task(watch.follow(mix, args.every))
        until = time.monotonic() + args.duration
        await asyncio.gather(*(mix.client(until) for _ in range(args.concurrency)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await check_end(server, mix, watch, before, tasks, files, must_preempt=args.url is None and args.duration >= 60)
    print(f"{len(mix.broken)} promises broken")
    return 1 if mix.broken else 0


async def check_end(
    server: LiveServer,
    mix: Mix,
    watch: Watch,
    before: Counter[str],
    tasks: int | None,
    files: list[Process],
    must_preempt: bool,
) -> None:
    """Nothing may be left."""
    if busy := await server.wait_idle(IDLE_SECONDS):
        mix.fail(f"left at the end: {busy}")
    await server.http.close()
    await watch.look(mix)
    now = await server.metrics()
    now.subtract(before)
    print("requests: " + ", ".join(f"{name} {count}" for name, count in sorted(mix.counts.items())))
    ends = ", ".join(f"{name.split()[-1]} {count:g}" for name, count in now.items() if "success_total " in name)
    print(f"answers by end: {ends}; restarts {now['octavo:engine_restarts_total']:g}")
    print(f"free blocks: {1 - now['vllm:kv_cache_usage_perc']:.0%}")
    for kind in ("prompt", "generation"):
        counted = now[f"vllm:{kind}_tokens_total"]
        by_request = now[f"vllm:request_{kind}_tokens_sum"]
        print(f"{kind} tokens: clients were told of {mix.used[kind]}, the server counted {counted:g}")
        # The rest is what was computed for clients that hung up.
        if counted < mix.used[kind] or by_request < counted:
            mix.fail(f"{kind} tokens: used {mix.used[kind]}, counted {counted:g}, by request {by_request:g}")
    if now["octavo:engine_restarts_total"]:
        mix.fail("the engine was restarted")
    print(f"preemptions: {now['vllm:num_preemptions_total']:g}")
    if must_preempt and not now["vllm:num_preemptions_total"]:
        mix.fail("nobody was preempted, so that nothing was seen of it")
    tasks_now, processes = await server.num_tasks(), server.processes()
    print(
        f"tasks {tasks} -> {tasks_now}, open files {[p.num_files for p in files]} -> {[p.num_files for p in processes]}"
    )
    if tasks_now != tasks:
        mix.fail(f"{tasks} tasks before, {tasks_now} after")
    if any(now.num_files > then.num_files + 2 for now, then in zip(processes, files, strict=True)):
        mix.fail("open files are left")
    early = watch.memory[len(watch.memory) // 3]
    for then, last in zip(early, processes, strict=True):
        print(
            f"memory of the {then.name}: {then.rss / 2**20:.0f} MiB a third in, {last.rss / 2**20:.0f} MiB at the end"
        )
        if last.rss - then.rss > MAX_GROWTH:
            mix.fail(f"the {then.name} grew by {(last.rss - then.rss) / 2**20:.0f} MiB")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; default: one is started")
    parser.add_argument("--model", help="model of the server that is started; default: a tiny random one")
    parser.add_argument("--duration", type=float, default=1800.0, help="seconds")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two lines about the server")
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
