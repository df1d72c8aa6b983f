"""Structured output over HTTP: what each field asks for, and field cases against a real server with a random model."""

import json
from collections.abc import Iterator

import httpx
import jsonschema
import openai
import pytest

from octavo.types.structured_outputs import StructuredOutputsParams
from tests.server.fake_engine import FakeEngine
from tests.server.http import chat_body, client_of, error_of, strict_json
from tests.server.test_real_engine import Server, start, stop

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0}, "w": {"enum": ["naïve", "🌶"]}},
    "required": ["n", "w"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "required": ["children"],
    "additionalProperties": False,
}


def json_schema(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": json_schema(SCHEMA)}, StructuredOutputsParams(json=SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        ),
        ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputsParams(json=json.dumps(SCHEMA))),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"),
        ),
        ({"guided_regex": "a"}, StructuredOutputsParams(regex="a")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutputsParams(grammar='root ::= "a"')),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_spelling_reaches_the_engine(path, fields, expected):
    engine = FakeEngine()
    body = chat_body(**fields) if path == CHAT else {"prompt": "Hi", **fields}
    async with client_of(engine) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert engine.params[-1].structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema is missing"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "schema is missing",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "choice"),
        ({"guided_choice": []}, "guided_choice", "0 texts"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice exclude"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
        ({"response_format": {"type": "json_object"}, "use_beam_search": True}, "response_format", "use_beam_search"),
    ],
)
async def test_what_is_wrong_is_named(fields, param, words):
    """FC-065, FC-066: a missing key, an unknown type, an empty list are 400 with the field's name."""
    async with client_of() as client:
        error = error_of(await client.post(CHAT, json=chat_body(**fields)), 400)
    assert error["param"] == param and words in error["message"]


# ---- a real server


@pytest.fixture(scope="module")
def server(tiny_llama_dir) -> Iterator[Server]:
    patience = '{"compile_timeout": 120}'  # on a busy machine the second engine alone takes long to import
    running = start(
        tiny_llama_dir, "--served-model-name", "rand", "--reasoning-parser", "deepseek_r1",
        "--structured-outputs-config", patience,
    )  # fmt: skip
    yield running
    stop(running)


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
        # Whatever was asked, the engine lives and others are served.
        assert client.get("/health").status_code == 200
        good = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3, "structured_outputs": {"regex": "abc"}})
        assert good.json()["choices"][0]["text"] == "abc"


def chat(**fields) -> dict:
    return chat_body(temperature=1.0, chat_template_kwargs={"thinking": False}, **({"max_tokens": 60} | fields))


def contents(client: httpx.Client, path: str, body: dict) -> list[tuple[str, str]]:
    """(text, finish reason) of every choice; the stream says the same as the whole answer."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    pick = (lambda choice: choice["message"]["content"]) if path == CHAT else (lambda choice: choice["text"])
    whole = [(pick(choice), choice["finish_reason"]) for choice in strict_json(answer.content)["choices"]]
    streamed = [["", None] for _ in whole]
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in strict_json(line.removeprefix("data: "))["choices"]:
                    text = choice["delta"].get("content") if path == CHAT else choice["text"]
                    streamed[choice["index"]][0] += text or ""
                    streamed[choice["index"]][1] = choice["finish_reason"] or streamed[choice["index"]][1]
    assert [tuple(choice) for choice in streamed] == whole
    return whole


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_json_schema_is_applied_on_every_route(client, path):
    """FC-064: the answer matches the schema from its first byte, streamed or not."""
    body = chat(seed=1, n=8, response_format=json_schema(SCHEMA))
    if path == COMPLETIONS:
        body = {"prompt": "x", **{k: v for k, v in body.items() if k not in ("messages", "chat_template_kwargs")}}
    for text, reason in contents(client, path, body):
        if reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert reason == "length" and text.startswith("{")


def test_a_recursive_schema_works(client):
    """FC-058: a tree is bounded by max_tokens or done."""
    found = contents(client, CHAT, chat(seed=2, n=10, max_tokens=200, response_format=json_schema(TREE)))
    assert {reason for _, reason in found} <= {"stop", "length"}
    for text, reason in found:
        if reason == "stop":
            jsonschema.validate(json.loads(text), TREE)


def test_choices_come_out_byte_exact_and_all_of_them(client):
    """FC-066: a choice that begins another does not shut it out; other scripts come out whole."""
    choices = ["yes", "yes, but", "naïve", "🌶", "yes"]
    found = contents(
        client, COMPLETIONS, {"prompt": "x", "seed": 1, "n": 100, "temperature": 2.0, "guided_choice": choices}
    )
    assert {text for text, _ in found} == set(choices)
    assert {reason for _, reason in found} == {"stop"}


def test_json_cut_by_the_limit_is_left_as_it_is(client):
    """FC-069."""
    ((text, reason),) = contents(client, CHAT, chat(seed=3, max_tokens=10, response_format=json_schema(SCHEMA)))
    assert reason == "length" and text.startswith("{") and not text.endswith("}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # FC-057, FC-058
        ({"response_format": json_schema({"type": "strnig"})}, "$.type"),
        ({"response_format": json_schema({"type": "object", "properties": 5})}, "$.properties"),
        ({"response_format": json_schema({"$ref": "#/nowhere"})}, "$.$ref"),
        ({"response_format": json_schema({"$ref": "#"})}, "refers to itself"),
        ({"response_format": json_schema({"type": "string", "pattern": "(?=a)"})}, "look-around"),
        # FC-059
        *(
            ({"structured_outputs": {"regex": regex}}, words)
            for regex, words in (
                ("foo**", "multiple repeat"),
                ("[a-", "unclosed character class"),
                ("(", "unclosed group"),
                ("(?<=x)y", "look-around"),
                ("", "regex is empty"),
            )
        ),
        # FC-067
        ({"structured_outputs": {"grammar": 'root ::= "a" nothing'}}, "nothing"),
        ({"structured_outputs": {"grammar": 'x ::= "a"'}}, "root"),
        ({"structured_outputs": {"grammar": "root ::= root"}}, "no text"),
        ({"structured_outputs": {"grammar": "(" * 1024}}, "brackets"),
    ],
)
def test_bad_constraints_are_400_and_hurt_nobody(client, fields, words):
    plain = {"prompt": "y", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with client.stream("POST", COMPLETIONS, json=plain) as other:
        lines = other.iter_lines()
        next(lines)
        for stream in (False, True):
            error = error_of(client.post(CHAT, json=chat(stream=stream, **fields)), 400)
            assert words in error["message"]
        assert "data: [DONE]" in list(lines)


def test_control_characters_in_a_pattern(client):
    """FC-059: the class works."""
    ((text, _),) = contents(
        client,
        COMPLETIONS,
        {"prompt": "x", "seed": 1, "max_tokens": 5, "structured_outputs": {"regex": "[\\x00-\\x1f]+"}},
    )
    assert text and all(ord(character) < 32 for character in text)


def test_a_grammar_behind_a_reasoning_budget(client):
    """FC-086: reasoning is free and apart; the content behind it obeys the schema."""
    body = chat_body(
        temperature=1.0, seed=4, max_tokens=150, thinking_token_budget=8, response_format=json_schema(SCHEMA),
        chat_template_kwargs={"thinking": True},
    )  # fmt: skip
    message = strict_json(client.post(CHAT, json=body).content)["choices"][0]["message"]
    assert message["reasoning"] or message.get("reasoning_content")
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_json_with_thinking_switched_off(client):
    """FC-085: the grammar rules from the first token on, and nothing is reasoning; streamed and whole the same."""
    for seed in range(3):
        body = chat_body(
            temperature=1.0, seed=seed, max_tokens=80, response_format=json_schema(SCHEMA),
            chat_template_kwargs={"thinking": False},
        )  # fmt: skip
        message = strict_json(client.post(CHAT, json=body).content)["choices"][0]["message"]
        assert not message.get("reasoning") and not message.get("reasoning_content")
        lines = client.post(CHAT, json=body | {"stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
        assert not any(delta.get("reasoning") for delta in deltas)
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_the_official_client_parses(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as api:
        answer = api.chat.completions.create(
            model="rand", messages=[{"role": "user", "content": "Hi"}], seed=5, max_tokens=60, temperature=1.0,
            response_format=json_schema(SCHEMA), extra_body={"chat_template_kwargs": {"thinking": False}},
        )  # fmt: skip
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
