"""POST /v1/completions: prompts in every spelling, echo, logprobs, order."""

import time

import pytest

from octavo.types.sampling_params import SamplingParams
from tests.server.fake_engine import FakeEngine, make_config, make_tokenizer, say
from tests.server.http import client_of, error_of, events, strict_json

PATH = "/v1/completions"


def repeat_prompt(prompt: list[int], params: SamplingParams, index: int) -> str:
    return make_tokenizer().decode(prompt) * (index + 1)


async def test_whole_answer_and_default_limit():
    """FC-001: 16 tokens unless asked otherwise."""
    async with client_of(FakeEngine(ends=False)) as client:
        response = await client.post(PATH, json={"prompt": "Hi", "model": "tiny"})
    body = strict_json(response.content)
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18}
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length" and choice["text"] and choice["logprobs"] is None


async def test_prompts_in_four_spellings():
    engine = FakeEngine()
    ids = engine.tokenizer.encode("Hi")
    async with client_of(engine) as client:
        for prompt in ("Hi", ["Hi"], ids, [ids]):
            assert (await client.post(PATH, json={"prompt": prompt})).status_code == 200
    assert engine.prompts == [ids] * 4


async def test_choices_are_numbered_prompt_major():
    """FC-011: prompt × n + i, and each prompt counted once."""
    async with client_of(FakeEngine(script=repeat_prompt)) as client:
        body = {"prompt": ["a", "b", "c"], "n": 2}
        whole = (await client.post(PATH, json=body)).json()
        chunks = events(await client.post(PATH, json={**body, "stream": True}))
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["a", "aa", "b", "bb", "c", "cc"]
    assert whole["usage"]["prompt_tokens"] == 3
    for index, text in enumerate(texts):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == text
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]


@pytest.mark.parametrize("prompt", [["a"] * 100_000, [[5]] * 1025])
async def test_too_many_prompts(prompt):
    """FC-011: refused at once."""
    async with client_of() as client:
        started = time.monotonic()
        assert error_of(await client.post(PATH, json={"prompt": prompt}), 400)["param"] == "prompt"
        assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        None,
        {},
        5,
        True,
        ["a", [5]],
        [[5], "a"],
        [5, "a"],
        [5, 512],
        [-1, 5],
        [1.5],
        [True],
        [[5], [999]],
    ],
)
async def test_prompts_that_cannot_be(prompt):
    """FC-005, FC-009: 400, and the engine sees none of it."""
    engine = FakeEngine()
    async with client_of(engine) as client:
        assert error_of(await client.post(PATH, json={"prompt": prompt}), 400)["param"] == "prompt"
        assert engine.prompts == []
        assert (await client.post(PATH, json={"prompt": "Hi"})).status_code == 200


async def test_bad_id_is_named_with_the_range():
    async with client_of() as client:
        error = error_of(await client.post(PATH, json={"prompt": [5, 999999]}), 400)
    assert "999999" in error["message"] and "0 to 511" in error["message"]


async def test_length_of_the_context():
    """FC-003."""
    async with client_of(FakeEngine(config=make_config(max_model_len=32))) as client:
        fits = await client.post(PATH, json={"prompt": [5] * 31, "max_tokens": 1})
        assert fits.json()["choices"][0]["finish_reason"] == "length"
        for length in (32, 33):
            for stream in (False, True):
                body = {"prompt": [5] * length, "max_tokens": 1, "stream": stream}
                error = error_of(await client.post(PATH, json=body), 400)
                assert error["code"] == "context_length_exceeded"
                assert str(length) in error["message"] and "32" in error["message"]
        scored = await client.post(PATH, json={"prompt": [5] * 32, "max_tokens": 0, "echo": True, "logprobs": 0})
        assert len(scored.json()["choices"][0]["logprobs"]["tokens"]) == 32


async def test_hopelessly_long_text_is_not_tokenized():
    async with client_of() as client:
        error = error_of(await client.post(PATH, json={"prompt": "x" * (128 * 256 + 1)}), 400)
    assert error["code"] == "context_length_exceeded"


async def test_long_text_is_tokenized_on_a_thread():
    engine = FakeEngine(config=make_config(max_model_len=20_000))
    async with client_of(engine) as client:
        assert (await client.post(PATH, json={"prompt": "y" * 9000})).status_code == 200
    assert len(engine.prompts[0]) == 9000


async def test_echo_with_logprobs_lines_up():
    """FC-050: four lists of one length, the first logprob null, offsets into the text, tokens that join to it."""
    async with client_of() as client:
        body = {"prompt": "DEFGHIJ 🌶", "echo": True, "logprobs": 2, "max_tokens": 2}
        whole = (await client.post(PATH, json=body)).json()["choices"][0]
        chunks = events(await client.post(PATH, json={**body, "stream": True}))
    logprobs = whole["logprobs"]
    num_prompt = len(make_tokenizer().encode("DEFGHIJ 🌶"))
    assert {len(values) for values in logprobs.values()} == {num_prompt + 2}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
    assert whole["text"] == "DEFGHIJ 🌶Hel"
    ends = [*logprobs["text_offset"][1:], len(whole["text"])]
    for token, start, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        if "\ufffd" not in token:
            assert whole["text"][start:end] == token
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name, values in logprobs.items():
        assert [value for part in streamed for value in part[name]] == values
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


@pytest.mark.parametrize("scores_at", [0, 1, 2])
async def test_every_choice_begins_with_the_scores_of_the_prompt(scores_at):
    """The engine tells them once, whenever they are complete; the stream is the same as the whole answer."""
    async with client_of(FakeEngine(script=say("abc"), scores_at=scores_at)) as client:
        body = {"prompt": ["xyz", "12"], "n": 2, "echo": True, "logprobs": 1}
        whole = (await client.post(PATH, json=body)).json()["choices"]
        chunks = events(await client.post(PATH, json={**body, "stream": True}))
    for index, choice in enumerate(whole):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values


async def test_echo_of_token_ids():
    ids = make_tokenizer().encode("abc")
    async with client_of() as client:
        text = (await client.post(PATH, json={"prompt": ids, "echo": True})).json()["choices"][0]["text"]
    assert text == "abcHello there"


async def test_scoring():
    """FC-051: echo with max_tokens 0 generates nothing."""
    prompts = ["ab", "abc", "abcd", "x" * 20]
    async with client_of() as client:
        body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = (await client.post(PATH, json=body)).json()
        refused = await client.post(PATH, json={"prompt": "a", "max_tokens": 0})
    assert answer["usage"]["completion_tokens"] == 0
    assert [choice["text"] for choice in answer["choices"]] == prompts
    lengths = [len(make_tokenizer().encode(prompt)) for prompt in prompts]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == lengths
    assert error_of(refused, 400)["param"] == "max_tokens"


async def test_logprobs_are_finite_and_capped():
    """FC-053, FC-054."""
    async with client_of(FakeEngine(script=say("abc"))) as client:
        response = await client.post(PATH, json={"prompt": "a", "logprobs": 3})
        for top in strict_json(response.content)["choices"][0]["logprobs"]["top_logprobs"]:
            assert sorted(top.values()) == [-9999.0, -2.0, -0.5]
        assert error_of(await client.post(PATH, json={"prompt": "a", "logprobs": 50_000}), 400)["param"] == "logprobs"
        for value in (-1, 21):
            error = error_of(await client.post(PATH, json={"prompt": "a", "prompt_logprobs": value}), 400)
            assert error["param"] == "prompt_logprobs"


async def test_prompt_logprobs_and_ids():
    async with client_of() as client:
        fields = {"prompt": "ab", "prompt_logprobs": 2, "return_token_ids": True}
        choice = (await client.post(PATH, json=fields)).json()["choices"][0]
        streamed = await client.post(PATH, json={**fields, "stream": True})
    ids = choice["prompt_token_ids"]
    assert ids == make_tokenizer().encode("ab")
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second[str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert second[str((ids[1] + 2) % 512)]["logprob"] == -9999.0
    assert choice["token_ids"][-1] == 2
    assert error_of(streamed, 400)["param"] == "prompt_logprobs"


async def test_one_bad_prompt_of_several_is_an_error():
    """The engine refuses one of three: the call fails with its reason, and nothing goes on running."""
    engine = FakeEngine(config=make_config(max_model_len=32))
    async with client_of(engine) as client:
        for stream in (False, True):
            body = {"prompt": [[5], [6] * 40, [7]], "stream": stream, "max_tokens": 1}
            assert error_of(await client.post(PATH, json=body), 400)["code"] == "context_length_exceeded"
    assert engine.running == []


async def test_stream_usage():
    async with client_of(FakeEngine(script=say("ab"))) as client:
        fields = {"prompt": ["a", "b"], "stream": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(await client.post(PATH, json={**fields, "stream_options": options}))
        plain = events(await client.post(PATH, json=fields))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert all("usage" in chunk for chunk in chunks)
    assert all("usage" not in chunk for chunk in plain)


async def test_server_without_a_tokenizer():
    engine = FakeEngine(texts=None)
    async with client_of(engine) as client:
        answer = await client.post(PATH, json={"prompt": [5, 6], "logprobs": 0, "return_token_ids": True})
        assert error_of(await client.post(PATH, json={"prompt": "a"}), 400)["message"]
    choice = answer.json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert engine.params[0].detokenize is False
