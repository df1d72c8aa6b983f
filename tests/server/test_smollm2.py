"""The demo model with no option but a port, on whatever machine this is, and with any number of threads."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.http import events, strict_json
from tests.server.test_real_engine import PATIENCE, Server, launch, stop

COUNTING = {"prompt": "One, two, three, four,", "max_tokens": 12, "temperature": 0}
IDLE_SHARE = 5.0  # percent of a core that a server without requests may use


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[Server]:
    """FC-177: it starts with no option; the threads are those that the machine has."""
    running = launch(smollm2_gguf, environment={**os.environ, "OMP_NUM_THREADS": ""})
    yield running
    stop(running)


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def test_everything_comes_from_the_file(client):
    """FC-154: context, template and end of turn."""
    (card,) = client.get("/v1/models").json()["data"]
    assert card["max_model_len"] == 8192
    messages = [{"role": "user", "content": "Reply with the one word: yes"}]
    body = {"messages": messages, "temperature": 0, "return_token_ids": True, "max_tokens": 200}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", None, 2)


def test_two_choices_interleaved(client):
    """FC-018: each chunk has one choice; joined by index they are the whole answer of the same seed."""
    body = {"prompt": "Once upon a time", "max_tokens": 20, "n": 2, "seed": 7, "temperature": 1, "ignore_eos": True}
    whole = client.post("/v1/completions", json=body).json()["choices"]
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == whole[index]["text"]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
    assert whole[0]["text"] != whole[1]["text"]
    order = [choice["index"] for choice in choices]
    assert order != sorted(order)


def test_idle_server_rests(server):
    """FC-178: nobody spins while there is nothing to do."""
    front = psutil.Process(server.process.pid)
    processes = [front, *front.children()]
    for process in processes:
        process.cpu_percent()  # begins the measurement
    psutil.cpu_percent(interval=1.0)
    assert sum(process.cpu_percent() for process in processes) < IDLE_SHARE


@pytest.mark.parametrize("threads", ["1", "17"])
def test_answers_do_not_depend_on_threads(client, smollm2_gguf, threads):
    """FC-178: fewer than there are cores, and many more."""
    answer = strict_json(client.post("/v1/completions", json=COUNTING).content)["choices"][0]["text"]
    code = (
        "import json, sys; from octavo import LLM, SamplingParams; body = json.loads(sys.argv[2]); "
        "llm = LLM(sys.argv[1], max_model_len=256); prompt = body.pop('prompt'); "
        "print(json.dumps(llm.generate(prompt, SamplingParams(**body), use_tqdm=False)[0].outputs[0].text))"
    )
    words = [sys.executable, "-c", code, str(smollm2_gguf), json.dumps(COUNTING)]
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    said = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE, check=True)
    assert json.loads(said.stdout.splitlines()[-1]) == answer
    assert answer.startswith(" five, six, seven, eight")
