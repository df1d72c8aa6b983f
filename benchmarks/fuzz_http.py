"""Send thousands of broken requests to a server and see that nobody is hurt by them.

    python benchmarks/fuzz_http.py --bodies 20000                  # a tiny random model, started here
    python benchmarks/fuzz_http.py --url http://127.0.0.1:8000     # a server that runs
    python benchmarks/fuzz_http.py --seed 0 --only 1234            # one of them again, shown

Each request is a good one with a few mutations: of a value anywhere in the body, of the text of its JSON, of its headers,
method and path, or of the HTTP around it. Fields come from the server's own /openapi.json, so new routes and fields are
covered as they appear. Exits with 1 when an answer is a 5xx other than 501 and 503, is late, is no JSON where it should
be, when hardly any body is answered, when the known good request between the batches is answered differently, or when
something is left at the end: gauges above zero, tasks, open files, growing memory.
"""

import argparse
import asyncio
import base64
import copy
import http.client
import io
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import quote, urlsplit

import torch
from live_server import LiveServer, running_server

DEADLINE_SECONDS = 60.0
IDLE_SECONDS = 10.0
MAX_GROWTH = 64 << 20  # bytes a process may grow in the second half of a run: allocators keep what they had to have
ALLOWED_5XX = (501, 503)
MIN_ANSWERED = 0.02  # share of the bodies that are answered with 200 in spite of all: about a tenth is usual
MAX_REPEATED = 1_000_000  # characters of JSON that a repeated list may have
# An early answer to a body larger than this may be lost: the server closes on a client that is still sending.
SOCKET_BUFFER = 32 << 10
SERVER_OPTIONS = (
    *("--kv-cache-memory-bytes", "16M", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"),
    *("--client-stall-timeout", "5", "--enable-server-load-tracking", "--enable-scale-out"),
    *("--responses-store-bytes", "1M", "--enable-prompt-embeds"),
)

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
_TURN = {"role": "user", "content": "Hi"}
_SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "seed": 7,
    "n": 2,
    "max_tokens": 4,
    "stop": ["zz"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [3, 4],
    "logit_bias": {"7": 1.5},
    "bad_words": ["bad"],
    "min_tokens": 1,
    "ignore_eos": True,
    "priority": 0,
}
_SHORT = {"max_output_tokens": 4}
_FORCED = {"tool_choice": "required", "max_output_tokens": 4}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA}
_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
_RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
_TOOL_BLOCKS = [
    _TURN,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
]


def _embeds() -> str:
    """Three tokens for the tiny random model, whose hidden states have 64 numbers."""
    file = io.BytesIO()
    torch.save(torch.arange(192.0).view(3, 64) / 192, file)
    return base64.b64encode(file.getvalue()).decode()


_EMBEDS = _embeds()
# Bodies that are answered with 200. A route that is not here is fuzzed from its fields in /openapi.json alone.
GOOD: dict[str, tuple[dict[str, Any], ...]] = {
    COMPLETIONS: (
        {"prompt": "One, two", "max_tokens": 4, "temperature": 0},
        {"prompt": ["a", "b"], "logprobs": 2, "echo": True, **_SAMPLING},
        {"prompt": "a", "prompt_embeds": _EMBEDS, "max_tokens": 3},
        {"prompt": [[5, 6, 7], [8, 9]], "stream": True, "stream_options": {"include_usage": True}, **_SAMPLING},
        {"prompt": [5, 6], "use_beam_search": True, "n": 2, "max_tokens": 3, "length_penalty": 1.1},
        {"prompt": "a", "structured_outputs": {"regex": "[ab]{2}"}, "max_tokens": 4},
        {"prompt": "score me", "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1},
    ),
    CHAT: (
        {"messages": [_TURN], "max_tokens": 4},
        {"messages": [{"role": "system", "content": "x"}, _TURN], "logprobs": True, "top_logprobs": 2, **_SAMPLING},
        {"messages": [_TURN], "stream": True, "stream_options": {"continuous_usage_stats": True}, **_SAMPLING},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_completion_tokens": 2},
        {"messages": [_TURN, {"role": "assistant", "content": "So"}], "max_tokens": 2, "continue_final_message": True},
        {
            "messages": [_TURN],
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "none",
            "max_tokens": 2,
        },
        {"messages": [_TURN], "response_format": {"type": "json_object"}, "max_tokens": 4},
        {
            "messages": [_TURN],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}},
            "max_tokens": 4,
        },
    ),
    RESPONSES: (
        {"input": "Hi", "max_output_tokens": 4, "temperature": 0.5, "store": False},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "stream": True, **_SHORT},
        {
            "input": [_TURN, _CALL, _RESULT],
            "instructions": "Be kind",
            "tools": [{"type": "function", **_FUNCTION}],
            **_FORCED,
        },
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}}, **_SHORT},
    ),
    MESSAGES: (
        {"messages": [_TURN], "max_tokens": 4, "system": "x", "stop_sequences": ["zz"], "temperature": 0.5, "top_k": 5},
        {"messages": [_TURN], "max_tokens": 4, "stream": True, "system": [{"type": "text", "text": "x"}]},
        {
            "messages": _TOOL_BLOCKS,
            "max_tokens": 4,
            "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    COUNT_TOKENS: ({"messages": [_TURN], "system": "x"},),
    TOKENIZE: ({"prompt": "a b c", "return_token_strs": True}, {"messages": [_TURN], "add_generation_prompt": True}),
    DETOKENIZE: ({"tokens": [5, 6, 7]},),
}
# Routes that steer the engine are called between batches: a pause in the middle of one would hold up the others.
STEERING = ("/pause", "/resume", "/reset_prefix_cache")
STEERING_QUERIES = ("", "mode=abort", "mode=keep&clear_cache=false", "mode=wait&clear_cache=maybe", "mode=%00", "mode")
PROBE = {"prompt": "The known good request", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}

_DEEP = "@@deep@@"  # replaced in the text of the JSON: no encoder goes this deep
_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 2.5, 1e-9, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 2**70, 10**400),
    *("", "a", "7", "\x00", "\ud800", "\udc00\ud800", "🌶", "\n\n", "a" * 5000, "á" * 200_000, "<|im_start|>", "}{"),
    *("../../etc/passwd", "{{ 7 * 7 }}", "{% for i in range(99999999) %}x{% endfor %}", "AAAA", "1e5", "-1", "٣"),
    *([], [[]], [None], [[[1]]], {}, {"": None}, {"type": "x"}, {"role": "user"}, [{}], [True], [1.5], [-1], [10**9]),
    *(
        [""],
        ["a", 1],
        ["\ud800"],
        [0] * 30_000,
        ["a"] * 5000,
        [[5] for _ in range(2000)],
        list(range(300)),
        {"7": math.nan},
    ),
    *({str(i): 1 for i in range(2000)}, {"\x00": "\x00"}, {"a": {"b": {"c": [1, {"d": None}]}}}, _DEEP),
)
_CONTENT_TYPES = (
    *("text/plain", "", "application/json; charset=utf-7", "APPLICATION/JSON", "application/xml", "a" * 5000, "\x00"),
    *(
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/msgpack",
        "application/json,",
    ),
)
_HEADERS = (
    *(("Content-Encoding", "gzip"), ("Content-Encoding", "br"), ("Accept", "text/html"), ("Accept-Encoding", "gzip")),
    *(("Authorization", "Bearer " + "x" * 9000), ("Authorization", "Basic \xff"), ("X-Request-Id", "a b\tc")),
    *(("X-Request-Id", "x" * 4000), ("Expect", "100-continue"), ("Origin", "http://evil"), ("Range", "bytes=0-1")),
    *(("X-Big", "x" * 60_000), ("Upgrade", "websocket"), ("Content-Language", "\xff\xfe"), ("Host", "")),
    *(("Content-Length", "-1"), ("Content-Length", "99999999999999999999"), ("Content-Length", "5, 5")),
    *(("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "gzip, chunked"), ("Transfer-Encoding", "identity")),
)
# Headers that break the framing of the request: the HTTP parser, or the end of patience, answers.
_FRAMING = frozenset({"Content-Length", "Transfer-Encoding", "Upgrade", "Host", "Expect"})
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW", "post")


@dataclass
class Shot:
    """One request to be; mutations change it in place."""

    route: str
    path: str
    fields: Any
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    # Applied to the encoded body, in order.
    on_text: list[Callable[[bytes], bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was done to it
    is_framed: bool = True  # the server can tell where it ends
    is_blown_up: bool = False  # a list in it may be long: whatever is put into an item of it would be so as often

    @cached_property
    def body(self) -> bytes:
        nested = "[" * 100_000 + "]" * 100_000
        data = json.dumps(self.fields).replace(json.dumps(_DEEP), nested, 1).encode()
        for change in self.on_text:
            data = change(data)
        return data

    def message(self) -> bytes:
        headers = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(self.body)), **self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace") + self.body


class Mutator:
    """Makes shot number i of a seed, the same one every time."""

    def __init__(self, seed: int, fields: dict[str, list[str]]):
        self.seed = seed
        self.fields = fields  # POST route -> names of its body's fields
        self.all_fields = sorted({name for names in fields.values() for name in names})
        self.values = [v for bodies in GOOD.values() for body in bodies for v in body.values()]
        value_changes = [self._swap_value, self._swap_value, self._drop, self._add, self._repeat_list, self._nest]
        self.outer_changes = [*[self._text] * 5, self._header, self._header, self._method, self._path]
        self.changes = [*value_changes * 4, *self.outer_changes]

    def shot(self, number: int) -> Shot:
        rng = random.Random(f"{self.seed}/{number}")
        path = rng.choice(sorted(self.fields))
        good = rng.choice(GOOD.get(path, ({},)))
        shot = Shot(path, path, json.loads(json.dumps(good)))
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
            rng.choice(self.outer_changes if shot.is_blown_up else self.changes)(rng, shot)
        return shot

    def _value(self, rng: random.Random) -> Any:
        return copy.deepcopy(rng.choice(_HOSTILE if rng.random() < 0.8 else self.values))  # mutated later in place

    def _swap_value(self, rng: random.Random, shot: Shot) -> None:
        place = _random_place(rng, shot.fields)
        if place is None:
            shot.fields = self._value(rng)
        else:
            container, key = place
            container[key] = self._value(rng)
            shot.notes.append(f"swap {key}")

    def _drop(self, rng: random.Random, shot: Shot) -> None:
        if place := _random_place(rng, shot.fields):
            container, key = place
            del container[key]
            shot.notes.append(f"drop {key}")

    def _add(self, rng: random.Random, shot: Shot) -> None:
        if isinstance(shot.fields, dict):
            name = rng.choice(
                self.fields[shot.route] if rng.random() < 0.7 else [*self.all_fields, "unknown", "", "\x00"]
            )
            shot.fields[name] = self._value(rng)
            shot.notes.append(f"add {name}")

    def _repeat_list(self, rng: random.Random, shot: Shot) -> None:
        lists = [value for value in _walk(shot.fields) if isinstance(value, list) and value]
        chosen = rng.choice(lists) if lists else []
        if chosen:
            chosen *= min(rng.choice((0, 2, 50, 1500, 20_000)), MAX_REPEATED // len(json.dumps(chosen)))
            shot.is_blown_up = True
            shot.notes.append(f"list of {len(chosen)}")

    def _nest(self, rng: random.Random, shot: Shot) -> None:
        if place := _random_place(rng, shot.fields):
            container, key = place
            depth = rng.choice((1, 2, 20, 61, 62, 63, 64, 65))
            for _ in range(depth):
                container[key] = [container[key]] if rng.random() < 0.5 else {"content": container[key]}
            shot.notes.append(f"nest {key} {depth}")

    def _text(self, rng: random.Random, shot: Shot) -> None:
        at, noise = rng.random(), rng.randbytes(rng.choice((1, 4, 4000)))
        again = f'{{"{rng.choice(self.fields[shot.route] or ["model"])}": {json.dumps(self._value(rng))}, '.encode()
        kinds: dict[str, Callable[[bytes], bytes]] = {
            "cut": lambda data: data[: int(at * len(data))],
            "noise": lambda data: data[: int(at * len(data))] + noise + data[int(at * len(data)) :],
            "overwrite": lambda data: data[: int(at * len(data))] + noise + data[int(at * len(data)) + len(noise) :],
            "twice": lambda data: data + data,
            "key twice": lambda data: again + data[1:] if data.startswith(b"{") and len(data) > 2 else data,
            "tail": lambda data: data + noise,
            "bom": lambda data: b"\xef\xbb\xbf" + data,
            "utf-16": lambda data: data.decode(errors="replace").encode("utf-16", "replace"),
            "gzip": lambda data: b"\x1f\x8b\x08\x00" + data,
            "empty": lambda data: b"",
            "array": lambda data: b"[" + data + b"]",
            "comment": lambda data: b"/* x */" + data,
            "quotes": lambda data: data.replace(b'"', b"'"),
            "brackets": lambda data: b"[" * 1_000_000,
        }
        kind = rng.choice(sorted(kinds))
        shot.on_text.append(kinds[kind])
        shot.notes.append(kind)

    def _header(self, rng: random.Random, shot: Shot) -> None:
        if rng.random() < 0.4:
            name, value = "Content-Type", rng.choice(_CONTENT_TYPES)
        else:
            name, value = rng.choice(_HEADERS)
        shot.headers[name] = value
        shot.is_framed &= name not in _FRAMING and "\x00" not in value
        shot.notes.append(f"{name}: {value[:20]}")

    def _method(self, rng: random.Random, shot: Shot) -> None:
        shot.method = rng.choice(_METHODS)
        shot.is_framed &= shot.method not in ("BREW", "post")
        shot.notes.append(shot.method)

    def _path(self, rng: random.Random, shot: Shot) -> None:
        path = shot.path
        kinds = (
            path + "/",
            "/" + path,
            path + "%00",
            path + "?" + "x=1&" * 2000,
            "/" + quote(path, safe=""),
            path + "/../..",
        )
        shot.path = rng.choice(
            (*kinds, path.upper(), "/v1/models/" + "a/" * 500, "/v1/models/%ff%fe", "/" + "x" * 9000)
        )
        shot.notes.append(f"path {shot.path[:30]}")


def _walk(value: Any) -> list[Any]:
    """The value and everything in it."""
    found = [value]
    for item in found:  # which grows on the way
        found.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
    return found


def _random_place(rng: random.Random, value: Any) -> tuple[Any, Any] | None:
    """A container somewhere in `value` and a key or index of it."""
    containers = [found for found in _walk(value) if isinstance(found, (dict, list)) and found]
    if not containers:
        return None
    container = rng.choice(containers)
    return container, rng.choice(list(container) if isinstance(container, dict) else range(len(container)))


_DONE = "data: [DONE]"
_LAST_EVENTS = ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")


class _Replay(io.BytesIO):
    def makefile(self, *_: Any) -> "io.BytesIO":
        return self


async def exchange(url: str, message: bytes) -> tuple[int, str, bytes] | None:
    """Send bytes on a connection of their own; status, content type and body, or None when it is just closed."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(message)
        data = await reader.read()
    except ConnectionError:  # it was closed while we were still writing
        data = b""
    finally:
        writer.close()
    if not data:
        return None
    method = message.split(b" ", 1)[0].decode("latin-1")
    response = http.client.HTTPResponse(_Replay(data), method=method)  # type: ignore[arg-type]
    response.begin()
    return response.status, response.headers.get("content-type", ""), response.read()


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} in JSON")


def _is_our_fault(event: dict[str, Any]) -> bool:
    """Whether a stream tells of a failure that would be a 5xx if it had come earlier."""
    error = event.get("error") or (event.get("response") or {}).get("error") or {}
    return "server_error" in (error.get("type"), error.get("code")) or error.get("type") == "api_error"


def judge(shot: Shot, answer: tuple[int, str, bytes] | None) -> str | None:
    """What is wrong with an answer; None when it is as it should be."""
    if answer is None:
        return "closed without an answer" if shot.is_framed and len(shot.body) < SOCKET_BUFFER else None
    status, content_type, body = answer
    if status >= 500 and status not in ALLOWED_5XX:
        return f"status {status}: {body[:300]!r}"
    if not shot.is_framed or shot.method == "HEAD":
        return None
    try:
        if status >= 400:
            error = json.loads(body)["error"]
            if not (error["message"] and error["type"]):
                return f"an error without words: {body[:300]!r}"
        elif content_type == "application/json":
            json.loads(body, parse_constant=_refuse_constant)
        elif content_type.startswith("text/event-stream"):
            lines = [line for line in body.decode().splitlines() if line.startswith("data: ")]
            events = [json.loads(line[6:], parse_constant=_refuse_constant) for line in lines if line != _DONE]
            is_ended = lines[-1] == _DONE or events[-1].get("type") in _LAST_EVENTS
            if not is_ended:
                return f"a stream that ends with {lines[-1][:100]}"
            if found := [event for event in events if _is_our_fault(event)]:
                return f"in the stream: {str(found[0])[:300]}"
    except (ValueError, KeyError, TypeError) as error:
        return f"status {status} with a body that is not right ({error!r}): {body[:300]!r}"
    return None


class Fuzz:
    """One run against one server."""

    def __init__(self, server: LiveServer, args: argparse.Namespace, mutator: Mutator):
        self.server = server
        self.args = args
        self.mutator = mutator
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest = (0.0, -1)

    def fail(self, message: str) -> None:
        self.failures.append(message)
        print(f"FAILED {message}", flush=True)

    async def fire(self, number: int) -> None:
        shot = self.mutator.shot(number)
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.args.deadline):
                answer = await exchange(self.server.url, shot.message())
        except TimeoutError:
            found: str | None = f"no answer within {self.args.deadline:g} s"
            self.statuses["late"] += 1
        except (http.client.HTTPException, OSError) as error:
            found = f"{error!r}"
            self.statuses["broken"] += 1
        else:
            found = judge(shot, answer)
            self.statuses[str(answer[0]) if answer else "closed"] += 1
        self.slowest = max(self.slowest, (time.monotonic() - started, number))
        if found:
            self.fail(f"--only {number}: {shot.method} {shot.path[:40]} {shot.notes}: {found}")

    async def batch(self, numbers: range) -> None:
        slots = asyncio.Semaphore(self.args.concurrency)

        async def one(number: int) -> None:
            async with slots:
                await self.fire(number)

        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(one(number))

    async def steer(self, number: int) -> None:
        """Routes that pause and reset, in broken spellings too; at last everything goes on."""
        rng = random.Random(f"{self.args.seed}/steer/{number}")
        for path in (*rng.sample(STEERING, k=len(STEERING)), "/resume"):
            query = rng.choice(STEERING_QUERIES) if path == "/pause" else ""
            status, body = await self.server.post(f"{path}?{query}")
            if status >= 500 and status not in ALLOWED_5XX:
                self.fail(f"POST {path}?{query}: status {status}: {body[:300]!r}")

    async def probe(self) -> Any:
        """The known good request: its choice, and the server's word that it is well."""
        async with asyncio.timeout(self.args.deadline):
            health, _ = await self.server.get("/health")
            status, body = await self.server.post(COMPLETIONS, PROBE)
        if (health, status) != (200, 200):
            return f"health {health}, known good request {status}: {body[:300]!r}"
        return json.loads(body)["choices"][0]

    async def run(self) -> None:
        known = await self.probe()
        print(f"the known good request gives {known}", flush=True)
        tasks, files = await self.server.num_tasks(), [p.num_files for p in self.server.processes()]
        memory: list[list[int]] = []
        done, total = 0, self.args.bodies
        while done < total:
            count = min(self.args.batch, total - done)
            await self.batch(range(done, done + count))
            done += count
            if tasks is not None:  # the steering routes are there
                await self.steer(done)
            if (answer := await self.probe()) != known:
                self.fail(f"after {done} bodies the known good request gives {answer}")
            memory.append([p.rss for p in self.server.processes()])
            if done % (10 * self.args.batch) == 0 or done == total:
                print(
                    f"{done} bodies, answers {dict(sorted(self.statuses.items()))}, {_megabytes(memory[-1])}",
                    flush=True,
                )
        if self.statuses["200"] < MIN_ANSWERED * total:
            self.fail(f"only {self.statuses['200']} bodies were answered: they do not get past the door")
        await self.look_for_leaks(tasks, files, memory)

    async def look_for_leaks(self, tasks: int | None, files: list[int], memory: list[list[int]]) -> None:
        if busy := await self.server.wait_idle(IDLE_SECONDS):
            self.fail(f"left at the end: {busy}")
        samples = await self.server.metrics()
        if samples["octavo:engine_restarts_total"]:
            self.fail(f"the engine was restarted {samples['octavo:engine_restarts_total']:g} times")
        tasks_now, processes = await self.server.num_tasks(), self.server.processes()
        print(f"gauges 0, tasks {tasks} -> {tasks_now}, open files {files} -> {[p.num_files for p in processes]}")
        if tasks != tasks_now:
            self.fail(f"{tasks} tasks before, {tasks_now} after")
        if any(p.num_files > before + self.args.concurrency for p, before in zip(processes, files, strict=True)):
            self.fail(f"open files {files} before, {[p.num_files for p in processes]} after")
        if memory and memory[-1]:
            middle = memory[len(memory) // 2]
            print(
                f"memory at the first batch {_megabytes(memory[0])}, half way {_megabytes(middle)}, "
                f"at the end {_megabytes(memory[-1])}"
            )
            if any(now - then > MAX_GROWTH for now, then in zip(memory[-1], middle, strict=True)):
                self.fail("memory grew in the second half of the run")
        print(f"slowest answer {self.slowest[0]:.1f} s (--only {self.slowest[1]})")


def _megabytes(sizes: list[int]) -> str:
    return " + ".join(f"{size / 2**20:.0f}" for size in sizes) + " MiB"


async def body_fields(server: LiveServer) -> dict[str, list[str]]:
    """The POST routes of the server's own description, and the fields of their bodies."""
    _, text = await server.get("/openapi.json")
    described = json.loads(text)
    routes = {}
    for path, methods in described["paths"].items():
        if "requestBody" in methods.get("post", {}):
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            name = schema["$ref"].rsplit("/", 1)[-1]
            routes[path] = sorted(described["components"]["schemas"][name]["properties"])
    return routes


async def fuzz(args: argparse.Namespace) -> int:
    async with running_server(args.url, args.model, SERVER_OPTIONS) as server:
        routes = await body_fields(server)
        run = Fuzz(server, args, Mutator(args.seed, routes))
        if args.only is not None:
            shot = run.mutator.shot(args.only)
            print(shot.notes, shot.message()[:2000])
            await run.fire(args.only)
            print(dict(run.statuses))
        else:
            print(f"routes: {', '.join(routes)}")
            for path, bodies in GOOD.items():
                for body in bodies:
                    status, answer = await server.post(path, body)
                    # Conversations with tools are long; a model with a short context says so.
                    if path in routes and status != 200 and b"context" not in answer:
                        run.fail(f"a good body of {path} is answered {status}: {answer[:300]!r}")
            await run.run()
    print(f"{len(run.failures)} failures")
    return 1 if run.failures else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; default: one is started")
    parser.add_argument("--model", help="model of the server that is started; default: a tiny random one")
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=200, help="bodies between two known good requests")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--deadline", type=float, default=DEADLINE_SECONDS, help="seconds for each answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="send this one alone")
    return asyncio.run(fuzz(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
