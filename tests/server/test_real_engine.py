"""`octavo serve` on a tiny real checkpoint: the whole way from HTTP to the engine's process and back."""

import base64
import concurrent.futures
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file

# CHAIN: after the newline behind "assistant" the model says this and ends its turn.
ANSWER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
PATIENCE = 60.0


@dataclass
class Server:
    process: "subprocess.Popen[str]"
    url: str
    reader: threading.Thread  # takes what the process says further, or it would block once the pipe is full

    def core_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = (int(child) for child in children)
        return pid


def start(model: Path, *options: str) -> Server:
    """Start a small server."""
    small = (
        "--kv-cache-memory-bytes",
        "16M",
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "256",
        "--block-size",
        "16",
    )
    return launch(model, *options, *small, environment={**os.environ, "OMP_NUM_THREADS": "1"})


def launch(model: Path, *options: str, environment: dict[str, str]) -> Server:
    """Start the command and wait until it says where it is."""
    words = [sys.executable, "-m", "octavo", "serve", str(model), "--port", "0", *options]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"serving on (\w+://\S+)", line):
            reader = threading.Thread(target=process.stderr.read, daemon=True)
            reader.start()
            return Server(process, found[1], reader)
    process.wait()
    process.stderr.close()
    raise AssertionError("".join(lines))


def stop(server: Server) -> None:
    if server.process.poll() is None:
        server.process.kill()
    server.process.wait()
    server.reader.join()
    assert server.process.stderr is not None
    server.process.stderr.close()


@pytest.fixture(scope="module")
def server(chain_llama_dir: Path) -> Iterator[Server]:
    """One server for most tests here. At the end SIGTERM stops it with status 0, and its core with it (FC-162)."""
    running = start(chain_llama_dir, "--served-model-name", "chain", "--enable-prompt-tokens-details")
    try:
        core = running.core_pid()
        yield running
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE) == 0
        assert not Path(f"/proc/{core}").exists()
    finally:
        stop(running)


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def chat(text: str = "Hi", **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def metric(client: httpx.Client, name: str) -> float:
    (value,) = re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(value)


def test_official_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=PATIENCE) as client:
        whole = client.chat.completions.create(model="chain", messages=chat()["messages"], temperature=0)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (ANSWER, "stop")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(
            client.chat.completions.create(model="chain", messages=chat()["messages"], temperature=0, **options)
        )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    # The cache may have helped the second one; all else is equal.
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(ANSWER) + 1


def test_stop_strings_and_limits(client):
    """FC-014, FC-021, FC-024: the same streamed and whole."""
    for fields, text, reason, stopped_by in (
        ({"stop": ["DEF"]}, "ABC", "stop", "DEF"),
        ({"stop": ["DEF"], "include_stop_str_in_output": True}, "ABCDEF", "stop", "DEF"),
        ({"max_tokens": 5}, "ABCDE", "length", None),
        ({}, ANSWER, "stop", None),
    ):
        whole = client.post("/v1/chat/completions", json=chat(**fields)).json()["choices"][0]
        assert (whole["message"]["content"], whole["finish_reason"], whole["stop_reason"]) == (text, reason, stopped_by)
        response = client.post("/v1/chat/completions", json=chat(stream=True, **fields))
        chunks = [
            json.loads(block[6:])["choices"][0] for block in response.text.split("\n\n") if block.startswith("data: {")
        ]
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [reason]


def test_logprobs_of_prompt_and_answer(client):
    """FC-050, FC-051 on real numbers: scoring gives what echo gave, alone and next to others."""
    prompts = ["\nABC", "\nABCDEFG", "XY"]
    fields = {"echo": True, "logprobs": 2, "temperature": 0}
    alone = [
        client.post("/v1/completions", json={"prompt": p, "max_tokens": 2, **fields}).json()["choices"][0]["logprobs"]
        for p in prompts
    ]
    scored = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 0, **fields}).json()
    assert scored["usage"]["completion_tokens"] == 0
    for prompt, one, choice in zip(prompts, alone, scored["choices"], strict=True):
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == prompt
        count = len(choice["logprobs"]["tokens"])
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(one["token_logprobs"][1:count], abs=1e-4)
        assert len(one["tokens"]) == count + 2


def test_cached_tokens_and_the_hit_metric(client):
    """FC-113."""
    body = chat("a question nobody asked before, long enough for two blocks", max_tokens=1)
    hits = metric(client, "prefix_cache_hits_total")
    first, second = (client.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["prompt_tokens"] and cached % 16 == 0
    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert metric(client, "prefix_cache_hits_total") - hits == cached + first["prompt_tokens_details"]["cached_tokens"]


def test_every_scrape_says_the_same(client):
    """FC-160: there is one front, whoever asks it."""
    client.post("/v1/chat/completions", json=chat(max_tokens=3))
    scrapes = [re.findall(r"^vllm:.*$", client.get("/metrics").text, re.MULTILINE) for _ in range(10)]
    assert scrapes[0] and scrapes[1:] == scrapes[:-1]


def test_tokenize_counts_what_chat_counts(client):
    """FC-012."""
    usage = client.post("/v1/chat/completions", json=chat("count me", max_tokens=1)).json()["usage"]
    assert (
        client.post("/tokenize", json={"messages": chat("count me")["messages"]}).json()["count"]
        == usage["prompt_tokens"]
    )


def test_hostile_requests_leave_the_engine_unharmed(client):
    for body in (
        {"prompt": [5, 999999]},
        {"prompt": "a", "stop_token_ids": [999999]},
        {"prompt": "a", "logit_bias": {"600": 1}},
        {"prompt": "a", "priority": 3},
        {"prompt": "a", "cache_salt": "a/b"},
        {"prompt": [5] * 5000},
        {"prompt": "a", "max_tokens": 10**9},
    ):
        assert client.post("/v1/completions", json=body).status_code == 400
    assert client.post("/v1/chat/completions", json=chat()).json()["choices"][0]["message"]["content"] == ANSWER
    assert client.get("/health").status_code == 200


def test_hanging_up_frees_everything(server, client):
    """FC-122, FC-156, FC-157: aborts are counted and the gauges fall to zero without another request."""
    aborts = 'request_success_total{engine="0",finished_reason="abort",model_name="chain"}'

    def read(name: str) -> float:
        (value,) = re.findall(rf"^vllm:{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return float(value)

    def leave_early(index: int) -> None:
        body = {"prompt": f"{index}", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE) as own,
            own.stream("POST", "/v1/completions", json=body) as answer,
        ):
            next(answer.iter_raw())

    before = read(aborts)
    with concurrent.futures.ThreadPoolExecutor(5) as threads:
        list(threads.map(leave_early, range(5)))
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(2000):  # each scrape is a round trip, so this is bounded by work, not by a clock
        if read(aborts) == before + 5 and not any(metric(client, name) for name in gauges):
            break
    assert read(aborts) == before + 5
    assert [metric(client, name) for name in gauges] == [0, 0, 0]


@pytest.fixture(scope="module")
def embeds_server(chain_llama_dir: Path) -> Iterator[Server]:
    running = start(chain_llama_dir, "--enable-prompt-embeds")
    yield running
    stop(running)


def test_prompt_embeds_over_http(embeds_server, chain_llama_dir):
    """FC-169: the right tensors are answered, before text prompts; wrong ones are refused, and nobody is hurt."""
    table = load_file(chain_llama_dir / "model.safetensors")["model.embed_tokens.weight"]

    def encode(value: object) -> str:
        file = io.BytesIO()
        torch.save(value, file)
        return base64.b64encode(file.getvalue()).decode()

    with httpx.Client(base_url=embeds_server.url, timeout=PATIENCE) as http:
        ids = http.post("/tokenize", json={"prompt": "AB"}).json()["tokens"]
        right = encode(table[ids])
        body = {"temperature": 0, "max_tokens": 4, "logprobs": 1}

        def ask(**fields) -> httpx.Response:
            return http.post("/v1/completions", json=body | fields)

        whole = ask(prompt_embeds=[right, right], prompt="Q", n=2).json()
        assert [choice["text"] for choice in whole["choices"]] == ["CDEF"] * 4 + ["RSTU"] * 2
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        assert whole["usage"]["prompt_tokens"] == 5 and whole["usage"]["completion_tokens"] == 24
        streamed = ask(prompt_embeds=right, prompt="", stream=True).text
        pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "CDEF"
        hidden = table.shape[1]
        for wrong in (
            {"prompt_embeds": "@@@"},
            {"prompt_embeds": ""},
            {"prompt_embeds": [right, 5]},
            {"prompt_embeds": encode(torch.zeros(2, hidden + 1))},
            {"prompt_embeds": encode(torch.full((2, hidden), float("nan")))},
            {"prompt_embeds": encode(torch.zeros(10_000, hidden))},
            {"prompt_embeds": encode({"a": 1})},
            {"prompt_embeds": right, "echo": True},
            {"prompt_embeds": right, "prompt_logprobs": 1},
            {"prompt_embeds": right, "repetition_penalty": 1.2},
            {"prompt_embeds": right, "use_beam_search": True, "logprobs": None},
            {"prompt_embeds": right, "prompt": [-1]},
        ):
            answer = ask(**wrong)
            assert answer.status_code == 400 and answer.json()["error"]["message"], wrong
        assert ask(prompt_embeds=right).json()["choices"][0]["text"] == "CDEF"


def test_death_of_the_engine(chain_llama_dir):
    """FC-161, without restarts: an open stream ends with an error, /health is 503, the process exits with 1."""
    running = start(chain_llama_dir, "--max-engine-restarts", "0")
    try:
        with httpx.Client(base_url=running.url, timeout=PATIENCE) as client:
            body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                pieces = answer.iter_text()
                next(pieces)
                os.kill(running.core_pid(), signal.SIGKILL)
                text = "".join(pieces)
            assert '"engine_dead"' in text and text.endswith("data: [DONE]\n\n")
            response = client.get("/health")
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
        assert running.process.wait(PATIENCE) == 1
    finally:
        stop(running)


def test_a_stream_outlives_the_core(chain_llama_dir):
    """FC-161, promise 4: clients see a pause; /health tells ready from live."""
    running = start(chain_llama_dir)
    try:
        with httpx.Client(base_url=running.url, timeout=PATIENCE) as client:
            body = {"prompt": "a", "max_tokens": 230, "ignore_eos": True, "stream": True, "seed": 5}

            def read(kill: bool) -> list[str]:
                """The text of each chunk."""
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
                    texts = [json.loads(next(lines))["choices"][0]["text"]]
                    if kill:
                        os.kill(running.core_pid(), signal.SIGKILL)
                        problem = until_unready()
                        assert problem["code"] == "engine_restarting" and "signal 9" in problem["message"]
                        with httpx.Client(base_url=running.url) as other:
                            assert other.get("/health/live").status_code == 200
                    texts += [json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]"]
                return texts

            def until_unready() -> dict:
                with httpx.Client(base_url=running.url) as other:
                    for _ in range(100_000):  # round trips
                        response = other.get("/health")
                        if response.status_code == 503:
                            assert response.headers["retry-after"] == "1"
                            return response.json()["error"]
                raise AssertionError("the death was not noticed")

            undisturbed = "".join(read(kill=False))
            assert "".join(read(kill=True)) == undisturbed
            assert client.get("/health").status_code == client.get("/health/ready").status_code == 200
            assert re.search(r"^octavo:engine_restarts_total{.*} 1.0$", client.get("/metrics").text, re.MULTILINE)
    finally:
        stop(running)


def test_failed_start_says_why_in_its_last_line(tmp_path):
    """FC-166."""
    words = [sys.executable, "-m", "octavo", "serve", str(tmp_path / "missing"), "--port", "0"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert "missing" in last and "Traceback" not in ended.stderr
