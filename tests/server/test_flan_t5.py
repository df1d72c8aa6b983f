"""The real Flan-T5-small, an encoder-decoder model, against transformers in float32 and over HTTP."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from tests.fixtures.real_models import real_model
from tests.server.http import events
from tests.server.test_real_engine import PATIENCE, Server, start, stop

PROMPT, ANSWER = "translate English to German: The house is wonderful.", "Das Haus ist wunderbar."
PROMPTS = [
    PROMPT,
    "translate English to French: I would like a coffee and two croissants, please.",
    "summarize: The tower is 324 metres tall, about the same height as an 81-storey building. " * 4,
    "Is the sky blue? Answer yes or no.",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model("flan-t5")


@pytest.mark.filterwarnings("ignore")  # transformers' own
@torch.inference_mode()
def test_answers_equal_transformers(folder: Path):
    greedy = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0)
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes=2**26, max_num_seqs=8) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
        (begun,) = llm.generate({"encoder_prompt": PROMPT, "decoder_prompt": "Das Haus"}, greedy, use_tqdm=False)
    assert outputs[0].outputs[0].text == ANSWER and outputs[0].encoder_prompt == PROMPT
    assert (begun.prompt, begun.outputs[0].text) == ("Das Haus", " ist wunderbar.")
    oracle = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    for output in outputs:
        read, ids = torch.tensor([output.encoder_prompt_token_ids]), list(output.outputs[0].token_ids)
        decoded = torch.tensor([output.prompt_token_ids + ids])
        scores = oracle(input_ids=read, decoder_input_ids=decoded).logits[0, :-1].log_softmax(-1)
        assert scores.argmax(-1).tolist() == ids
        for token_id, entries, row in zip(ids, output.outputs[0].logprobs, scores, strict=True):
            assert entries[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-3)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    running = start(folder, "--max-model-len", "128")
    yield running
    stop(running)


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def test_completions(client: httpx.Client):
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    answer = client.post("/v1/completions", json=body).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (ANSWER, "stop")
    assert answer["usage"]["prompt_tokens"] == 12  # 11 that the encoder reads, and the one the answer begins with
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}))
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == ANSWER and len(pieces) > 3


def test_samples_and_beams(client: httpx.Client):
    body = {"prompt": PROMPT, "max_tokens": 12, "n": 3}
    first, second = (client.post("/v1/completions", json={**body, "seed": 4}).json()["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]
    beams = client.post("/v1/completions", json={**body, "use_beam_search": True, "temperature": 0}).json()["choices"]
    assert beams[0]["text"] == ANSWER and len({choice["text"] for choice in beams}) == 3


def test_echo_is_refused(client: httpx.Client):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "echo": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"


def test_a_stream_outlives_the_core(server: Server, client: httpx.Client):
    """The next core encodes the prompt again and goes on where the answer was."""
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    text, killed = "", False
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += "".join(choice["text"] for choice in httpx.Response(200, text=line[6:]).json()["choices"])
            if len(text) > 10 and not killed:
                killed = True
                os.kill(server.core_pid(), signal.SIGKILL)
    assert killed and text == whole
