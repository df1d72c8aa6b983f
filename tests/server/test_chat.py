"""POST /v1/chat/completions: whole and streamed, field by field."""

import pytest

from octavo.server.openai.protocol import NOT_YET, ChatCompletionRequest, CompletionRequest
from octavo.types.sampling_params import SamplingParams
from tests.server.fake_engine import FakeEngine, make_config, make_tokenizer, say
from tests.server.http import chat_body, client_of, error_of, events, strict_json

PATH = "/v1/chat/completions"


def by_index(prompt: list[int], params: SamplingParams, index: int) -> str:
    return f"answer {index} " + "x" * index


def joined(chunks: list[dict], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_every_field_of_the_official_client_is_dealt_with():
    """Honoured, refused by name, or ignored on purpose: what only hints or labels."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatFields
    from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionFields

    ignored = {"metadata", "safety_identifier", "prediction"}
    ignored |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    assert set(ChatFields.__annotations__) <= {*ChatCompletionRequest.__struct_fields__, *NOT_YET, *ignored}
    assert set(CompletionFields.__annotations__) <= {*CompletionRequest.__struct_fields__, *NOT_YET}


async def test_whole_answer():
    engine = FakeEngine()
    async with client_of(engine) as client:
        response = await client.post(PATH, json=chat_body(model="alias"))
    body = strict_json(response.content)
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "alias")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", None)
    rendered = make_tokenizer().encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert engine.prompts == [rendered]
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(rendered)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "prompt_tokens_details" not in usage


async def test_stream_equals_whole_answer():
    async with client_of(FakeEngine(script=by_index)) as client:
        body = chat_body(n=3, logprobs=True, top_logprobs=2, return_token_ids=True)
        whole = (await client.post(PATH, json=body)).json()
        chunks = events(await client.post(PATH, json={**body, "stream": True}))
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert joined(chunks, index) == choice["message"]["content"] == by_index([], SamplingParams(), index)
        entries = [entry for part in parts for entry in part.get("logprobs", {}).get("content", [])]
        assert entries == choice["logprobs"]["content"]
        assert [i for part in parts for i in part.get("token_ids", [])] == choice["token_ids"]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons[-1] == choice["finish_reason"] == "stop"
        assert set(reasons[:-1]) == {None}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


async def test_shape_of_chunks():
    """FC-015: the role comes first and once; later deltas leave it out rather than sending null."""
    async with client_of() as client:
        chunks = events(await client.post(PATH, json=chat_body(stream=True)))
    first, *rest = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert first == {"role": "assistant", "content": ""}
    assert rest.pop() == {}
    assert all(set(delta) == {"content"} and delta["content"] for delta in rest)
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert chunk["object"] == "chat.completion.chunk"
        assert {"index", "delta", "finish_reason"} <= set(chunk["choices"][0])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_unless_asked(options):
    """FC-013 a, b."""
    async with client_of() as client:
        chunks = events(await client.post(PATH, json=chat_body(stream=True, stream_options=options)))
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)


async def test_usage_chunk_and_running_usage():
    """FC-013 c, d: the last chunk has no choices and the usage of the whole answer."""
    async with client_of() as client:
        whole = (await client.post(PATH, json=chat_body(n=2))).json()["usage"]
        for continuous in (False, True):
            options = {"include_usage": True, "continuous_usage_stats": continuous}
            chunks = events(await client.post(PATH, json=chat_body(n=2, stream=True, stream_options=options)))
            last = chunks.pop()
            assert (last["choices"], last["usage"]) == ([], whole)
            running = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
            assert len(running) == (len(chunks) if continuous else 0)
            assert running == sorted(running)
    async with client_of(enable_force_include_usage=True) as client:
        assert events(await client.post(PATH, json=chat_body(stream=True)))[-1]["usage"]["completion_tokens"] > 0


async def test_stream_options_need_a_stream():
    """FC-013 e."""
    async with client_of() as client:
        response = await client.post(PATH, json=chat_body(stream_options={"include_usage": True}))
    assert error_of(response, 400)["param"] == "stream_options"


async def test_no_limit_runs_to_the_end_of_the_context():
    """FC-001: chat has no hidden cap."""
    engine = FakeEngine(ends=False, config=make_config(max_model_len=64))
    async with client_of(engine) as client:
        body = (await client.post(PATH, json=chat_body())).json()
    assert body["usage"]["completion_tokens"] == 64 - body["usage"]["prompt_tokens"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert engine.params[0].max_tokens is None


async def test_limits_by_either_name():
    engine = FakeEngine(ends=False)
    async with client_of(engine) as client:
        for fields, wanted in (({"max_tokens": 3}, 3), ({"max_tokens": 9, "max_completion_tokens": 2}, 2)):
            body = (await client.post(PATH, json=chat_body(**fields))).json()
            assert body["usage"]["completion_tokens"] == wanted
        assert error_of(await client.post(PATH, json=chat_body(max_tokens=0)), 400)["param"] == "max_tokens"


async def test_finish_reasons():
    """FC-014: stop by end of turn, stop by string, length; the same streamed and whole."""
    cases = (({}, ("stop", None)), ({"stop": ["t"]}, ("stop", "t")), ({"max_tokens": 2}, ("length", None)))
    async with client_of(FakeEngine(script=say("H t x"))) as client:
        for fields, wanted in cases:
            choice = (await client.post(PATH, json=chat_body(**fields))).json()["choices"][0]
            chunks = events(await client.post(PATH, json=chat_body(stream=True, **fields)))
            ends = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"] is not None]
            assert len(ends) == 1
            assert (choice["finish_reason"], choice["stop_reason"]) == wanted
            assert (ends[0]["finish_reason"], ends[0]["stop_reason"]) == wanted
            assert joined(chunks) == choice["message"]["content"]


async def test_logprobs_without_top():
    """FC-049."""
    async with client_of() as client:
        content = (await client.post(PATH, json=chat_body(logprobs=True))).json()["choices"][0]["logprobs"]["content"]
        response = await client.post(PATH, json=chat_body(top_logprobs=3))
    assert all(entry["top_logprobs"] == [] and entry["logprob"] == -0.5 for entry in content)
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "Hello there"
    error = error_of(response, 400)
    assert error["param"] == "top_logprobs" and "logprobs" in error["message"]


async def test_logprobs_are_finite():
    """FC-053: minus infinity is written as -9999."""
    async with client_of() as client:
        response = await client.post(PATH, json=chat_body(logprobs=True, top_logprobs=4))
    for entry in strict_json(response.content)["choices"][0]["logprobs"]["content"]:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -2.0, -3.0, -9999.0]


@pytest.mark.parametrize("top", [21, 50_000, 10**9, -1])
async def test_too_many_top_logprobs(top):
    """FC-054."""
    async with client_of() as client:
        assert error_of(await client.post(PATH, json=chat_body(logprobs=True, top_logprobs=top)), 400)["param"]


async def test_operator_may_lift_the_cap_of_logprobs():
    async with client_of(FakeEngine(config=make_config(max_logprobs=-1))) as client:
        response = await client.post(PATH, json=chat_body(logprobs=True, top_logprobs=100, max_tokens=1))
    assert len(response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 100


async def test_tokens_as_ids():
    async with client_of() as client:
        fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
        choice = (await client.post(PATH, json=chat_body(**fields))).json()["choices"][0]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == names[0]


async def test_bytes_of_split_characters():
    """A character spread over tokens: the bytes of the entries join to it."""
    async with client_of(FakeEngine(script=say("é🌶"))) as client:
        content = (await client.post(PATH, json=chat_body(logprobs=True))).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "é🌶"


async def test_cached_tokens():
    """FC-113: reported when asked for, on stream and whole."""
    async with client_of(enable_prompt_tokens_details=True) as client:
        body = chat_body("a long enough question, one would think")
        first = (await client.post(PATH, json=body)).json()["usage"]
        second = (await client.post(PATH, json=body)).json()["usage"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = events(await client.post(PATH, json={**body, **options}))[-1]["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    assert streamed == second
    assert first["prompt_tokens"] == second["prompt_tokens"]


async def test_continue_final_message():
    engine = FakeEngine()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    async with client_of(engine) as client:
        body = {"messages": messages, "continue_final_message": True}
        answer = (await client.post(PATH, json=body)).json()
        echoed = (await client.post(PATH, json={**body, "echo": True})).json()
        chunks = events(await client.post(PATH, json={**body, "echo": True, "stream": True}))
        both = await client.post(PATH, json={**body, "add_generation_prompt": True})
    assert engine.tokenizer.decode(engine.prompts[0], skip_special_tokens=False).endswith("<|im_start|>assistant\nWell")
    assert answer["choices"][0]["message"]["content"] == "Hello there"
    assert echoed["choices"][0]["message"]["content"] == joined(chunks) == "WellHello there"
    assert error_of(both, 400)["param"] == "continue_final_message"


async def test_template_variables_and_roles():
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ mood }}{{ reasoning_effort }}"
        "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
    )
    engine = FakeEngine(texts=make_tokenizer(template))
    async with client_of(engine, default_chat_template_kwargs={"mood": "calm"}, response_role="bot") as client:
        error = error_of(await client.post(PATH, json=chat_body(reasoning_effort="bogus")), 400)
        assert error["param"] == "reasoning_effort" and "minimal" in error["message"]
        body = chat_body(reasoning_effort="low", documents=[{"text": "D"}])
        answer = (await client.post(PATH, json=body)).json()
        await client.post(PATH, json={**body, "chat_template_kwargs": {"mood": "wild"}})
        refused = await client.post(PATH, json={**body, "chat_template_kwargs": {"chat_template": "x"}})
    assert answer["choices"][0]["message"]["role"] == "bot"
    assert [engine.tokenizer.decode(ids) for ids in engine.prompts] == ["user:Hi;calmlow[D]", "user:Hi;wildlow[D]"]
    assert error_of(refused, 400)["param"] == "chat_template_kwargs"


async def test_template_from_the_client():
    """FC-168: refused by default; limited and sandboxed when the operator allows it."""
    async with client_of() as client:
        refused = await client.post(PATH, json=chat_body(chat_template="{{ messages }}"))
    assert error_of(refused, 400)["param"] == "chat_template"
    engine = FakeEngine()
    async with client_of(engine, trust_request_chat_template=True) as client:
        taken = await client.post(PATH, json=chat_body(chat_template="say {{ messages[0].content }}"))
        escaped = await client.post(PATH, json=chat_body(chat_template="{{ ''.__class__.__mro__ }}"))
    assert taken.status_code == 200
    assert engine.tokenizer.decode(engine.prompts[0]) == "say Hi"
    error_of(escaped, 400)


async def test_messages_that_cannot_be():
    """FC-005, FC-100, FC-101, FC-102, FC-105: 400 with a reason, never 500."""
    async with client_of() as client:
        for messages, param in (
            ([], "messages"),
            ([{"content": "x"}], "messages[0].role"),
            (["x"], "messages[0]"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                "messages[0].content[0]",
            ),
            ([{"role": "user", "content": "x"}] * 5000, "messages"),
            ("hi", "messages"),
        ):
            assert error_of(await client.post(PATH, json={"messages": messages}), 400)["param"] == param
        assert error_of(await client.post(PATH, json={}), 400)["param"] == "messages"
        odd = [{"role": "critic", "content": "a"}, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
        assert (await client.post(PATH, json={"messages": odd})).status_code == 200
    async with client_of(FakeEngine(texts=make_tokenizer(None))) as client:
        assert "template" in error_of(await client.post(PATH, json=chat_body()), 400)["message"]
    strict = "{{ raise_exception('no system please') if messages[0].role == 'system' }}"
    async with client_of(FakeEngine(texts=make_tokenizer(strict))) as client:
        response = await client.post(PATH, json={"messages": [{"role": "system", "content": "x"}]})
        assert "no system please" in error_of(response, 400)["message"]


async def test_part_lists_are_text():
    """FC-101: a list of one text part is that text."""
    engine = FakeEngine()
    async with client_of(engine) as client:
        await client.post(PATH, json=chat_body("Hi"))
        await client.post(PATH, json={"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]})
    assert engine.prompts[0] == engine.prompts[1]


async def test_developer_words_reach_the_prompt():
    """FC-097."""
    engine = FakeEngine()
    async with client_of(engine) as client:
        await client.post(PATH, json={"messages": [{"role": "developer", "content": "obey me"}]})
    assert "obey me" in engine.tokenizer.decode(engine.prompts[0])


async def test_control_marks_typed_by_a_user():
    """FC-107: with the option on, marks in messages are plain text."""
    for escape in (False, True):
        engine = FakeEngine()
        async with client_of(engine, escape_special_tokens=escape) as client:
            await client.post(PATH, json=chat_body("a<|im_end|>"))
        marks = sum(token_id in (1, 2) for token_id in engine.prompts[0])
        assert marks == (3 if escape else 4)


async def test_salt_and_sampling_fields_reach_the_engine():
    engine = FakeEngine(config=make_config(default_sampling_params={"temperature": 0.6, "top_k": 20, "max_tokens": 7}))
    async with client_of(engine) as client:
        await client.post(PATH, json=chat_body(cache_salt="s", seed=5, logit_bias={"7": -100}, user="u"))
        await client.post(PATH, json=chat_body(temperature=0, top_k=None, max_tokens=3))
    first, second = engine.params
    assert engine.salts == ["s", None]
    assert (first.temperature, first.top_k, first.max_tokens, first.seed, first.logit_bias) == (
        0.6,
        20,
        7,
        5,
        {7: -100},
    )
    assert (second.temperature, second.max_tokens) == (0.0, 3)
