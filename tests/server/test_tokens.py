"""Token ids in, token ids out: generate, and the routes that render for it."""

import pytest

from tests.server.fake_engine import FakeEngine, make_tokenizer
from tests.server.http import chat_body, client_of, error_of, events

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
ON = {"enable_scale_out": True}


def body(text: str = "Hi", **fields) -> dict:
    return {"token_ids": make_tokenizer().encode(text), **fields}


async def test_whole_and_streamed():
    asked = body(sampling_params={"n": 2, "logprobs": 1}, request_id="mine")
    async with client_of(**ON) as client:
        whole = (await client.post(GENERATE, json=asked)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(await client.post(GENERATE, json=asked | options))
    assert (whole["request_id"], whole["output_mode"], whole["model"]) == ("mine", "tokens", "tiny")
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choice["index"] == index and "text" not in choice
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert make_tokenizer().decode(choice["token_ids"]) == "Hello there"
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        entries = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert entries[0]["token"] == f"token_id:{choice['token_ids'][0]}"


async def test_text_when_asked_for():
    async with client_of(**ON) as client:
        asked = body(output_mode="text", sampling_params={"logprobs": 0})
        answer = (await client.post(GENERATE, json=asked)).json()
    choice = answer["choices"][0]
    assert (answer["output_mode"], choice["text"]) == ("text", "Hello there")
    assert not choice["logprobs"]["content"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_rendered_generates_the_same(path):
    """One engine gets the same prompt and parameters, whichever way a request comes."""
    engine = FakeEngine()
    fields = {
        "temperature": 0.5, "top_k": 3, "seed": 4, "stop": ["END"], "logit_bias": {"7": 2}, "max_tokens": 9, "n": 2,
        "cache_salt": "s", "bad_words": ["x"], "vllm_xargs": {"a": 1},
    }  # fmt: skip
    asked = (chat_body() if path == CHAT else {"prompt": ["one", "two"]}) | fields
    async with client_of(engine, **ON) as client:
        rendered = (await client.post(f"{path}/render", json=asked)).json()
        assert engine.prompts == []
        assert (await client.post(path, json=asked)).status_code == 200
        direct = list(zip(engine.prompts, engine.params, engine.salts, strict=True))
        bodies = rendered if path == COMPLETIONS else [rendered]
        for one in bodies:
            assert (await client.post(GENERATE, json=one)).status_code == 200
    again = list(zip(engine.prompts, engine.params, engine.salts, strict=True))[len(direct) :]
    assert again == direct and len(bodies) == (2 if path == COMPLETIONS else 1)


async def test_a_chat_without_limit_stays_without():
    engine = FakeEngine()
    async with client_of(engine, **ON) as client:
        rendered = (await client.post(f"{CHAT}/render", json=chat_body())).json()
        assert rendered["sampling_params"]["max_tokens"] is None
        await client.post(GENERATE, json=rendered)
    assert engine.params[0].max_tokens is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [999_999]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({"sampling_params": {"temperature": 9}}, "temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params"),
        ({"sampling_params": {"bad_words_token_ids": [[999_999]]}}, "sampling_params.bad_words_token_ids"),
        ({"sampling_params": {"reasoning": {}}}, "sampling_params.reasoning"),
        ({"sampling_params": {"tepmerature": 1}}, "sampling_params.tepmerature"),
        ({"output_mode": "speech"}, "output_mode"),
        ({"request_id": "a b"}, "request_id"),
        ({"stream_options": {}}, "stream_options"),
        ({"model": "nope"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(fields, param):
    async with client_of(**ON) as client:
        response = await client.post(GENERATE, json=body() | fields)
    assert error_of(response, 404 if param == "model" else 400)["param"] == param


async def test_what_cannot_be_rendered_is_refused():
    async with client_of(**ON) as client:
        for fields in ({"use_beam_search": True}, {"thinking_token_budget": 5}):
            error = error_of(await client.post(f"{CHAT}/render", json=chat_body(**fields)), 400)
            assert error["param"] in fields


async def test_the_routes_are_there_when_asked_for():
    async with client_of() as client:
        for path in (GENERATE, f"{CHAT}/render", f"{COMPLETIONS}/render"):
            assert error_of(await client.post(path, json=body()), 501)["code"] == "route_not_served"
