"""Beam search: against a plain implementation over transformers, and through every door."""

import math

import pytest
import torch

from octavo import LLM, BeamSearchParams
from octavo.engine.beam_search import BeamSearch
from octavo.errors import ClientError
from octavo.types.outputs import Logprob
from octavo.types.sampling_params import SamplingParams
from tests.server.http import chat_body, client_of, error_of, strict_json

PROMPTS = [[5, 6, 7], [300, 2]]


@pytest.fixture(scope="module")
def llm(tiny_llama_dir):
    with LLM(str(tiny_llama_dir), max_num_seqs=8, max_logprobs=20) as llm:
        yield llm


def plain_search(model, prompt, width, steps, eos, penalty):
    """Beam search without a cache, batching or bookkeeping: [(tokens, cumulative logprob)], best first."""

    def score(beam):
        tokens, total = beam
        return total / (len(tokens) - (tokens[-1] == eos)) ** penalty

    beams, done = [(list(prompt), 0.0)], []
    for _ in range(steps):
        found = []
        for tokens, total in beams:
            with torch.no_grad():
                logprobs = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
            for token in logprobs.topk(2 * width).indices.tolist():
                (done if token == eos else found).append(([*tokens, token], total + logprobs[token].item()))
        beams = sorted(found, key=score, reverse=True)[:width]
    return sorted(done + beams, key=score, reverse=True)[:width]


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (5, 0.0), (4, 2.0)])
def test_equals_a_plain_search(llm, tiny_llama_dir, width, penalty):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()
    params = BeamSearchParams(beam_width=width, max_tokens=4, length_penalty=penalty, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        want = plain_search(model, prompt, width, 4, None, penalty)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in want]
        for beam, (_, total) in zip(output.sequences, want, strict=True):
            assert math.isclose(beam.cum_logprob, total, rel_tol=1e-4)
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)
            assert (beam.finish_reason, len(beam.logprobs)) == ("length", 4)


def test_one_beam_is_greedy(llm):
    want = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(1, 6, ignore_eos=True), concurrency_limit=1)
    assert [o.sequences[0].tokens for o in outputs] == [[*w.prompt_token_ids, *w.outputs[0].token_ids] for w in want]


def test_the_end_token_ends_a_beam():
    """EOS is not part of the answer unless asked for, and does not count as length."""
    for keeps in (False, True):
        params = BeamSearchParams(2, 2, include_stop_str_in_output=keeps)
        search = BeamSearch([1], params, [9], room=50)
        search.advance([{9: Logprob(-1.0), 5: Logprob(-0.5), 6: Logprob(-3.0), 7: Logprob(-4.0)}])
        assert [beam.tokens for beam in search.beams] == [[1, 5], [1, 6]]
        search.advance([{9: Logprob(-0.1), 4: Logprob(-2.0)}, {9: Logprob(-9.0), 4: Logprob(-9.0)}])
        assert search.beams == []
        best, second = search.result(None)
        assert (best.tokens, best.finish_reason) == ([1, 5, 9] if keeps else [1, 5], "stop")
        assert math.isclose(best.cum_logprob, -0.6)
        assert len(best.logprobs) == len(best.tokens) - 1
        assert (second.tokens, second.finish_reason) == ([1, 5, 4], "length")


def test_the_context_bounds_the_beams(llm):
    prompt = [5] * 250
    [output] = llm.beam_search(prompt, BeamSearchParams(2, 100, ignore_eos=True))
    assert [len(beam.tokens) for beam in output.sequences] == [256, 256]


def test_what_is_refused(llm):
    with pytest.raises(ClientError, match="beam_width of at most 10"):
        llm.beam_search([[5]], BeamSearchParams(11, 4))
    with pytest.raises(ClientError, match="concurrency_limit"):
        llm.beam_search([[5]], BeamSearchParams(1, 4), concurrency_limit=0)
    with pytest.raises(ValueError, match="empty"):
        llm.beam_search([[]], BeamSearchParams(1, 4))
    for wrong in ({"beam_width": 0}, {"max_tokens": 0}, {"length_penalty": math.nan}, {"temperature": -1}):
        with pytest.raises(ClientError):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **wrong})


async def test_over_http():
    async with client_of() as client:
        body = {"prompt": "ab", "use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": 1, "ignore_eos": True}
        answer = strict_json((await client.post("/v1/completions", json=body)).content)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
        assert all(len(choice["logprobs"]["tokens"]) == 3 for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 6
        chat = chat_body(use_beam_search=True, n=2, max_tokens=2, ignore_eos=True, length_penalty=0.5)
        answer = strict_json((await client.post("/v1/chat/completions", json=chat)).content)
        assert len(answer["choices"]) == 2
        for wrong in ({"stream": True}, {"top_k": 5}, {"stop": ["x"]}, {"logit_bias": {"1": 1}}, {"echo": True}):
            error = error_of(await client.post("/v1/completions", json=body | wrong), 400)
            assert error["param"] == next(iter(wrong))
        error = error_of(await client.post("/v1/completions", json={"prompt": "a", "length_penalty": 2.0}), 400)
        assert error["param"] == "length_penalty"
        error = error_of(await client.post("/v1/completions", json=body | {"n": 11}), 400)
        assert error["param"] == "beam_width"
