"""What the door refuses, and how: bodies, types, ranges, models, fields of later features."""

import json

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.http import chat_body, client_of, error_of, events

CHAT = "/v1/chat/completions"
POST_ROUTES = [CHAT, "/v1/completions", "/tokenize", "/detokenize"]
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"[1,2]",
        b'"hi"',
        b"null",
        b"{bad",
        b"",
        b"\xff\xfe",
        b"[" * (1 << 20),
        b'{"a":' * 200_000,
        b'{"a": "\\ud800"}',
        b"7",
    ],
    ids=["list", "text", "null", "bad", "empty", "bytes", "nested", "nested objects", "surrogate", "number"],
)
async def test_bodies_that_are_no_json_object(path, body):
    """FC-006."""
    async with client_of() as client:
        error_of(await client.post(path, content=body, headers=JSON), 400)
        assert (await client.get("/health")).status_code == 200


async def test_invocations_are_told_apart_by_their_fields():
    async with client_of() as client:
        for path, body in ((CHAT, chat_body(seed=1)), ("/v1/completions", {"prompt": "Hi", "seed": 1})):
            direct, invoked = [(await client.post(where, json=body)).json() for where in (path, "/invocations")]
            assert direct["choices"] == invoked["choices"] and direct["object"] == invoked["object"]
        streamed = events(await client.post("/invocations", json=chat_body(stream=True)))
        assert streamed[0]["object"] == "chat.completion.chunk"
        assert error_of(await client.post("/invocations", json={"input": "x"}), 400)["code"] == "unsupported_task"
        assert "messages" in error_of(await client.post("/invocations", json={"x": 1}), 400)["message"]


async def test_routes_of_others_say_what_serves_instead():
    async with client_of() as client:
        for path in ("/v1/chat/completions/derender", "/inference/v1/generate", "/tokenizer_info"):
            for method in ("GET", "POST"):
                assert path in error_of(await client.request(method, path), 501)["message"]
        error_of(await client.put("/tokenizer_info"), 405)
    async with client_of(enable_scale_out=True) as client:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        assert (await client.post("/inference/v1/generate", json=body)).status_code == 200


async def test_nesting_inside_strings_does_not_count():
    async with client_of() as client:
        assert (await client.post(CHAT, json=chat_body("[" * 500 + '"\\' + "{" * 500 + "x"))).status_code == 400
        assert (await client.post(CHAT, json=chat_body("[{" * 40 + '"\\'))).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_content_type_is_needed(content_type):
    """FC-006: a web page may post anything but JSON to a loopback server without asking."""
    headers = {} if content_type is None else {"content-type": content_type}
    async with client_of() as client:
        error_of(await client.post(CHAT, content=json.dumps(chat_body()).encode(), headers=headers), 415)
        charset = {"content-type": "application/json; charset=utf-8"}
        assert (await client.post(CHAT, content=json.dumps(chat_body()).encode(), headers=charset)).status_code == 200


async def test_body_size_limit():
    async def chunks():
        for _ in range(5):
            yield b"x" * 300

    async with client_of(max_body_bytes=1000) as client:
        for content in (b"x" * 1001, chunks()):
            assert error_of(await client.post(CHAT, content=content, headers=JSON), 413)["code"] == "body_too_large"
        assert (await client.post(CHAT, json=chat_body())).status_code == 200


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('"temperature": NaN', "temperature"),
        ('"temperature": Infinity', "temperature"),
        ('"temperature": -Infinity', "temperature"),
        ('"temperature": 1e400', "temperature"),
        ('"temperature": -1', "temperature"),
        ('"temperature": "1"', "temperature"),
        ('"temperature": true', "temperature"),
        ('"top_p": 0', "top_p"),
        ('"top_p": 1.0001', "top_p"),
        ('"min_p": -0.1', "min_p"),
        ('"repetition_penalty": 0', "repetition_penalty"),
        ('"presence_penalty": 2.1', "presence_penalty"),
        ('"frequency_penalty": -2.1', "frequency_penalty"),
        ('"top_k": 2.5', "top_k"),
        ('"top_k": -2', "top_k"),
        ('"top_k": true', "top_k"),
        ('"max_tokens": 3.0', "max_tokens"),
        ('"max_tokens": -1', "max_tokens"),
        ('"max_completion_tokens": "3"', "max_completion_tokens"),
        ('"min_tokens": 5, "max_tokens": 3', "min_tokens"),
        ('"n": 0', "n"),
        ('"n": 5000000', "n"),
        ('"n": 129', "n"),
        ('"n": true', "n"),
        ('"seed": 9223372036854775808', "seed"),
        ('"seed": 1180591620717411303424', "seed"),
        ('"seed": 1.5', "seed"),
        ('"seed": "7"', "seed"),
        ('"seed": true', "seed"),
        ('"stop": ""', "stop"),
        ('"stop": ["", "x"]', "stop"),
        ('"stop": [5]', "stop[]"),
        ('"stop_token_ids": [999999]', "stop_token_ids"),
        ('"stop_token_ids": [-1]', "stop_token_ids"),
        ('"logit_bias": {"512": 1}', "logit_bias"),
        ('"logit_bias": {"-1": 1}', "logit_bias"),
        ('"logit_bias": {"abc": 1}', "logit_bias"),
        ('"logit_bias": {"7": 101}', "logit_bias"),
        ('"logit_bias": {"7": null}', "logit_bias[]"),
        ('"allowed_token_ids": []', "allowed_token_ids"),
        ('"bad_words": [""]', "bad_words"),
        ('"truncate_prompt_tokens": 0', "truncate_prompt_tokens"),
        ('"stream": 1', "stream"),
        ('"stream_options": 5, "stream": true', "stream_options"),
        ('"logprobs": 3', "logprobs"),
        ('"messages": "x"', "messages"),
        ('"messages": [5]', "messages[]"),
        ('"request_id": "a b"', "request_id"),
        ('"prompt_logprobs": 1, "stream": true, "echo": true', "prompt_logprobs"),
        ('"model": 5', "model"),
    ],
)
async def test_values_out_of_range(text, param):
    """FC-026, FC-031, FC-032, FC-034, FC-035, FC-036, FC-037: 400 naming the field; the server lives."""
    body = '{"messages": [{"role": "user", "content": "x"}], ' + text + "}"
    async with client_of() as client:
        error = error_of(await client.post(CHAT, content=body.encode(), headers=JSON), 400)
        assert error["param"].split("[")[0] == param.split("[")[0]
        assert (await client.post(CHAT, json=chat_body())).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.0},
        {"temperature": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"seed": 0},
        {"seed": -1},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"stop": []},
        {"stop": None},
        {"n": 128, "max_tokens": 1},
        {"unheard_of": {"x": 1}},
        {"metadata": {}, "store": False, "service_tier": "auto"},
    ],
)
async def test_values_at_the_border(fields):
    async with client_of() as client:
        assert (await client.post(CHAT, json=chat_body(**fields))).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_decoding_backend", "xgrammar"),
        ("prompt_embeds", "AAAA"),
        ("kv_transfer_params", {"x": 1}),
        ("best_of", 2),
        ("suffix", "x"),
        ("truncation_side", "right"),
        ("store", True),
        ("service_tier", "flex"),
    ],
)
async def test_fields_of_later_features_are_refused_by_name(name, value):
    """FC-169 among them: a conversation is no tensor, and completions take one only where the operator says so."""
    async with client_of() as client:
        error = error_of(await client.post(CHAT, json=chat_body(**{name: value})), 400)
        if name == "prompt_embeds":
            for given in (value, [value], []):
                error = error_of(await client.post("/v1/completions", json={"prompt_embeds": given}), 400)
    assert error["param"] == name and error["code"] == "unsupported_parameter" and name in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "prompt_embeds": None},
        {"use_beam_search": False, "vllm_xargs": {}, "best_of": 1, "length_penalty": 1.0, "suffix": ""},
    ],
)
async def test_neutral_values_of_later_features_are_fine(fields):
    async with client_of() as client:
        assert (await client.post(CHAT, json=chat_body(**fields))).status_code == 200


async def test_models_and_names():
    """FC-008: every served name is listed and echoed; an unknown one is a 404 that lists them."""
    async with client_of() as client:
        listed = (await client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
        card = listed["data"][0]
        assert (card["object"], card["owned_by"], card["root"], card["max_model_len"]) == (
            "model",
            "octavo",
            "org/tiny",
            128,
        )
        assert card["permission"][0]["object"] == "model_permission"
        assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
        for name in ("tiny", "alias"):
            assert (await client.post(CHAT, json=chat_body(model=name))).json()["model"] == name
            chunks = events(await client.post(CHAT, json=chat_body(model=name, stream=True)))
            assert {chunk["model"] for chunk in chunks} == {name}
        for name in (None, ""):
            assert (await client.post(CHAT, json=chat_body(model=name))).json()["model"] == "tiny"
        for stream in (False, True):
            error = error_of(await client.post(CHAT, json=chat_body(model="nope", stream=stream)), 404)
            assert error["param"] == "model" and error["code"] == "model_not_found"
            assert all(name in error["message"] for name in ("nope", "tiny", "alias"))
        error_of(await client.get("/v1/models/nope"), 404)


async def test_request_ids():
    async with client_of(enable_request_id_headers=True) as client:
        response = await client.post(CHAT, json=chat_body(), headers={"x-request-id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1" and response.json()["id"] == "chatcmpl-abc-1"
        response = await client.post(CHAT, json=chat_body(request_id="mine"), headers={"x-request-id": "abc-1"})
        assert response.json()["id"] == "chatcmpl-mine"
        response = await client.post(CHAT, json=chat_body(), headers={"x-request-id": "a\tb"})
        assert response.headers["x-request-id"] != "a\tb"
        missing = await client.get("/nope", headers={"x-request-id": "e"})
        assert missing.headers["x-request-id"] == "e"
    async with client_of() as client:
        assert "x-request-id" not in (await client.post(CHAT, json=chat_body())).headers


async def test_one_id_may_be_used_twice_at_once():
    engine = FakeEngine(hold_after=0)
    async with client_of(engine) as client:
        import asyncio

        calls = [asyncio.create_task(client.post(CHAT, json=chat_body(request_id="same"))) for _ in range(2)]
        await engine.reached.wait()
        engine.release.set()
        for response in await asyncio.gather(*calls):
            assert response.status_code == 200


async def test_no_such_route_and_wrong_method():
    """FC-163: JSON errors; a wrong method gets Allow."""
    async with client_of() as client:
        error_of(await client.get("/nope"), 404)
        error_of(await client.post("/v1/chat/completions/", json=chat_body()), 404)
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"):
            response = await client.request(method, CHAT)
            error_of(response, 405)
            assert response.headers["allow"] == "POST"
        response = await client.put("/health")
        error_of(response, 405)
        assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}
        assert (await client.head("/health")).status_code == 200
