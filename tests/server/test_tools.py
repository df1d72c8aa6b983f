"""Tools over HTTP (FC-070, 071, 074, 076 to 079, 082, 083): requests checked, calls streamed and whole."""

import json

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from octavo.tokenizer.backends import RustBackend
from octavo.tokenizer.tokenizer import Tokenizer, TokenizerInfo
from tests.fixtures.tokenizers import byte_tokenizer
from tests.server.fake_engine import FakeEngine, make_config, make_tokenizer, say
from tests.server.http import chat_body, client_of, error_of, events, make_app, strict_json

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": PARAMETERS}}
PING = {"type": "function", "function": {"name": "ping"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
PING_CALL = '<tool_call>{"name": "ping"}</tool_call>'
SHOWS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    "{% endfor %}\n{% endfor %}"
)


def engine_saying(text: str, template: str = SHOWS_TOOLS, **config: object) -> FakeEngine:
    return FakeEngine(
        script=say(text), config=make_config(max_model_len=4096, **config), texts=make_tokenizer(template)
    )


def tools_body(**fields: object) -> dict:
    return chat_body(**{"tools": [WEATHER, PING], **fields})


async def whole_and_streamed(text: str, **fields: object) -> tuple[dict, list[dict]]:
    """The choice of the whole answer, and the choices of a stream's chunks."""
    async with client_of(engine_saying(text), tool_call_parser="hermes") as client:
        whole = await client.post(PATH, json=tools_body(**fields))
        assert whole.status_code == 200, whole.text
        chunks = events(await client.post(PATH, json=tools_body(stream=True, **fields)))
    return strict_json(whole.content)["choices"][0], [choice for chunk in chunks for choice in chunk["choices"]]


def fold(chunks: list[dict]) -> tuple[str | None, list[tuple[str, str, str]], str]:
    """(content, calls, finish reason) of a stream, in the strict reading of FC-083."""
    content, calls, reasons = "", [], []
    for chunk in chunks:
        content += chunk["delta"].get("content") or ""
        for piece in chunk["delta"].get("tool_calls", []):
            if "id" in piece:
                assert set(piece) == {"index", "id", "type", "function"} and piece["type"] == "function"
                assert set(piece["function"]) == {"name", "arguments"} and piece["index"] == len(calls)
                calls.append((piece["id"], piece["function"]["name"], piece["function"]["arguments"]))
            else:
                assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
                call_id, name, arguments = calls[piece["index"]]
                calls[piece["index"]] = (call_id, name, arguments + piece["function"]["arguments"])
        reasons += [chunk["finish_reason"]] if chunk["finish_reason"] else []
    assert len(reasons) == 1 and chunks[-1]["finish_reason"]
    return content or None, calls, reasons[0]


@pytest.mark.parametrize(
    ("text", "content", "calls", "finish"),
    [
        (CALL, None, [("get_weather", '{"city": "Oslo"}')], "tool_calls"),
        (f"Sure.\n{CALL}\n{PING_CALL}", "Sure.", [("get_weather", '{"city": "Oslo"}'), ("ping", "{}")], "tool_calls"),
        ("No need.", "No need.", [], "stop"),
        (UNKNOWN, UNKNOWN, [], "stop"),
        ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", [], "stop"),
    ],
)  # fmt: skip
async def test_calls(text: str, content: str | None, calls: list[tuple[str, str]], finish: str) -> None:
    whole, chunks = await whole_and_streamed(text)
    message = whole["message"]
    assert message["content"] == content and whole["finish_reason"] == finish
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])] == calls
    assert all(c["type"] == "function" and c["id"] for c in message.get("tool_calls", []))
    streamed_content, streamed, reason = fold(chunks)
    assert (streamed_content, [call[1:] for call in streamed], reason) == (content, calls, finish)
    assert len({call[0] for call in streamed}) == len(calls)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("arguments", ["", ', "arguments": {}', ', "arguments": null', ', "arguments": ""'])
async def test_a_tool_without_parameters(parameters: dict | None, arguments: str) -> None:
    """FC-074: its arguments are `{}`, whole and streamed, with or without the key."""
    tool = {"type": "function", "function": {"name": "ping", "parameters": parameters}}
    whole, chunks = await whole_and_streamed(f'<tool_call>{{"name": "ping"{arguments}}}</tool_call>', tools=[tool])
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "ping", "arguments": "{}"}
    content, ((_, name, streamed),), finish = fold(chunks)
    assert (content, name, streamed, finish) == (None, "ping", "{}", "tool_calls")


async def test_official_client() -> None:
    """FC-078, FC-083: the client's own types and accumulator, with strict validation of what it gets."""
    app = make_app(engine_saying(f"Well.\n{CALL}{PING_CALL}"), tool_call_parser="hermes")
    async with client_of(app=app) as http:
        client = openai.AsyncOpenAI(
            api_key="-", base_url="http://localhost/v1", http_client=http, _strict_response_validation=True
        )
        arguments = {"model": "tiny", "messages": chat_body()["messages"], "tools": [WEATHER, PING]}
        whole = (await client.chat.completions.create(**arguments)).choices[0]
        state = ChatCompletionStreamState()
        async for chunk in await client.chat.completions.create(**arguments, stream=True):
            state.handle_chunk(chunk)
    streamed = state.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Well."
        first, second = choice.message.tool_calls
        assert json.loads(first.function.arguments) == {"city": "Oslo"} and first.function.name == "get_weather"
        assert (second.function.name, second.function.arguments) == ("ping", "{}")


@pytest.mark.parametrize("limit", range(1, len(make_tokenizer().encode(CALL)) + 1, 7))
async def test_cut_by_the_limit(limit: int) -> None:
    """FC-071."""
    whole, chunks = await whole_and_streamed(CALL, max_tokens=limit)
    content, calls, finish = fold(chunks)
    message = whole["message"]
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    assert (message["content"] or None, found, whole["finish_reason"]) == (content, [c[1:] for c in calls], finish)
    assert finish == "length" and content is None
    assert all('{"city": "Oslo"}'.startswith(arguments) for _, arguments in found)


async def test_one_call_only() -> None:
    """FC-076: the rest is not generated at all."""
    for stream in (False, True):
        engine = engine_saying(CALL + PING_CALL * 50)
        async with client_of(engine, tool_call_parser="hermes") as client:
            body = tools_body(parallel_tool_calls=False, stream=stream)
            response = await client.post(PATH, json=body)
            if stream:
                _, calls, finish = fold([choice for chunk in events(response) for choice in chunk["choices"]])
                names = [name for _, name, _ in calls]
            else:
                choice = response.json()["choices"][0]
                names, finish = (
                    [c["function"]["name"] for c in choice["message"]["tool_calls"]],
                    choice["finish_reason"],
                )
                assert response.json()["usage"]["completion_tokens"] < len(CALL + PING_CALL)
        assert (names, finish) == (["get_weather"], "tool_calls")
        assert len(engine.aborted) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None},
        {"tools": [], "tool_choice": "none"},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
    ],
)
async def test_without_tools_a_call_is_text(fields: dict) -> None:
    """FC-077."""
    whole, chunks = await whole_and_streamed(CALL, **fields)
    assert (whole["message"]["content"], whole["finish_reason"]) == (CALL, "stop")
    assert fold(chunks) == (CALL, [], "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [PING, PING]}, "tools[1].function.name"),
        ({"tools": [PING] * 600}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
    ],
)
async def test_what_is_wrong_with_tools(fields: dict, param: str) -> None:
    async with client_of(engine_saying("x"), tool_call_parser="hermes") as client:
        error = error_of(await client.post(PATH, json=tools_body(**fields)), 400)
    assert error["param"] == param


HOSTILE = (
    None,
    5,
    "x",
    [],
    [5],
    [[]],
    {},
    {"id": []},
    [{"id": []}],
    [{"function": 5}],
    [{"id": {}, "function": {"name": []}}],
)


@pytest.mark.parametrize("template", [SHOWS_TOOLS, "{% for m in messages %}{{ m.content }}{% endfor %}"])
async def test_hostile_values_are_answered(template: str) -> None:
    """Whatever stands where calls, ids and choices belong: no 5xx, and the server goes on."""
    engine = engine_saying("x", template)
    async with client_of(engine, tool_call_parser="hermes") as client:
        for value in HOSTILE:
            history = [
                {"role": "assistant", "content": "a", "tool_calls": value},
                {"role": "tool", "tool_call_id": value, "name": value, "content": "b"},
            ]
            choices = ({"type": "allowed_tools", "allowed_tools": value}, {"type": "function", "function": value})
            for fields in ({"messages": history}, {"tools": value}, *({"tool_choice": choice} for choice in choices)):
                response = await client.post(PATH, json=tools_body(**fields))
                assert response.status_code in (200, 400), (fields, response.text)
                response = await client.post("/tokenize", json=tools_body(**fields))
                assert response.status_code in (200, 400), (fields, response.text)
        assert (await client.post(PATH, json=tools_body())).status_code == 200


async def test_allowed_tools() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [PING]}}
    whole, _ = await whole_and_streamed(CALL + PING_CALL, tool_choice=choice)
    assert [c["function"]["name"] for c in whole["message"]["tool_calls"]] == ["ping"]
    assert whole["message"]["content"] == CALL


async def test_the_template_sees_tools_and_arguments_as_a_mapping() -> None:
    """FC-079: text or object, the prompt is the same; text that holds no object goes through or is refused."""

    def history(arguments: object) -> list[dict]:
        call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        return [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        ]

    engine = engine_saying("Fine.")
    async with client_of(engine, tool_call_parser="hermes") as client:
        for arguments in ('{"city": "Oslo"}', {"city": "Oslo"}):
            response = await client.post(PATH, json=tools_body(messages=history(arguments)))
            assert response.status_code == 200, response.text
        broken = await client.post(PATH, json=tools_body(messages=history("not json")))
        counted = await client.post("/tokenize", json={"messages": history("{}"), "tools": [WEATHER]})
        assert counted.json()["count"] > 0
    assert engine.prompts[0] == engine.prompts[1]
    text = make_tokenizer().decode(engine.prompts[0])
    assert "get_weather ping user: Hi" in text and "city=Oslo" in text and "tool: 12 degrees" in text
    assert broken.status_code == 400


async def test_a_template_that_knows_no_tools() -> None:
    """Tools, calls and results reach the model as text, in the format that its answers are read in."""
    role = "<{% if m.role == 'system' %}s{% elif m.role == 'user' %}u{% else %}a{% endif %}>"
    engine = engine_saying("Fine.", f"{{% for m in messages %}}{role}{{{{ m.content }}}}{{% endfor %}}")
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12 degrees"},
    ]
    async with client_of(engine, tool_call_parser="hermes") as client:
        assert (await client.post(PATH, json=tools_body(messages=messages))).status_code == 200
        assert (await client.post(PATH, json=tools_body())).status_code == 200
        assert (await client.post(PATH, json=tools_body(messages=messages, tool_choice="none"))).status_code == 200
    first, second, third = (make_tokenizer().decode(prompt, skip_special_tokens=False) for prompt in engine.prompts)
    assert first.startswith("<s>Be brief.\n\nYou can call tools.") and '"name": "ping"' in first
    assert '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>' in first
    turns = f"<u>Hi<a>Let me see.\n{CALL}<u>Result of get_weather:\n12 degrees"
    assert first.endswith(turns) and third == f"<s>Be brief.{turns}"
    assert second.startswith("<s>You can call tools.") and second.endswith("<u>Hi")


async def test_a_format_in_python_is_explained_in_python() -> None:
    engine = engine_saying("[get_weather(city='Oslo'), ping()]", "{% for m in messages %}{{ m.content }}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    async with client_of(engine, tool_call_parser="pythonic") as client:
        choice = (await client.post(PATH, json=tools_body(messages=messages))).json()["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather", "ping"]
    prompt = make_tokenizer().decode(engine.prompts[0])
    assert "[NAME(KEYWORDS)]" in prompt and prompt.endswith("Hi[get_weather(city='Oslo')]")


async def test_a_format_that_cannot_be_explained() -> None:
    engine = engine_saying("x", "{% for m in messages %}{{ m.content }}{% endfor %}")
    async with client_of(engine, tool_call_parser="glm45") as client:
        error = error_of(await client.post(PATH, json=tools_body()), 400)
    assert error["param"] == "tools" and "--chat-template" in error["message"]


async def test_tokenize_checks_tools_too() -> None:
    async with client_of(engine_saying("x")) as client:
        body = {"messages": chat_body()["messages"], "tools": [{"type": "function"}]}
        assert error_of(await client.post("/tokenize", json=body), 400)["param"] == "tools[0].function"


async def test_tools_may_be_kept_from_the_template() -> None:
    for keep in (True, False):
        engine = engine_saying("x")
        async with client_of(engine, exclude_tools_when_tool_choice_none=keep) as client:
            await client.post(PATH, json=tools_body(tool_choice="none"))
        assert ("get_weather" in make_tokenizer().decode(engine.prompts[0])) is not keep


async def test_a_model_whose_format_is_not_known() -> None:
    async with client_of(engine_saying("x")) as client:
        error = error_of(await client.post(PATH, json=tools_body()), 400)
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
        assert (await client.post(PATH, json=tools_body(tool_choice="none"))).status_code == 200


async def test_the_format_is_found_in_the_template() -> None:
    template = '{# <tool_call>{"name" …}</tool_call> #}' + SHOWS_TOOLS
    async with client_of(engine_saying(CALL, template)) as client:
        choice = (await client.post(PATH, json=tools_body())).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"


async def test_strict_tools() -> None:
    """With `auto`, a grammar takes over behind the opening mark; where the format has none, strict is refused."""
    strict = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
    engine = engine_saying(CALL)
    async with client_of(engine, tool_call_parser="hermes") as client:
        choice = (await client.post(PATH, json=chat_body(tools=[strict, PING]))).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    tag = engine.params[0].structured_outputs.structural_tag["format"]
    assert tag["triggers"] == ["<tool_call>"]
    first, second = tag["tags"]
    assert first["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": ' and first["end"] == "}\n</tool_call>"
    assert first["content"]["json_schema"] == PARAMETERS and second["content"]["json_schema"] == {"type": "object"}
    async with client_of(engine_saying("x"), tool_call_parser="glm45") as client:
        error = error_of(await client.post(PATH, json=chat_body(tools=[strict])), 400)
    assert error["param"] == "tools" and "strict" in error["message"]


async def test_strict_calls_stand_behind_the_mark_that_the_grammar_knows() -> None:
    """What a format reads elsewhere besides could not be held to the schema: it is content. JSON is no mark."""
    strict = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
    call = '[{"name": "get_weather", "arguments": {"city": 1}}]'
    for text, is_call in ((call, False), (f"<tool_call>{call}", False), (f"<|tool_call|>{call}", True)):
        async with client_of(engine_saying(text), tool_call_parser="granite") as client:
            choice = (await client.post(PATH, json=chat_body(tools=[strict]))).json()["choices"][0]
        assert (choice["finish_reason"] == "tool_calls") == is_call
        assert choice["message"]["content"] == (None if is_call else text)
    async with client_of(engine_saying("x"), tool_call_parser="llama3_json") as client:
        error_of(await client.post(PATH, json=chat_body(tools=[strict])), 400)


async def test_forced_calls() -> None:
    """FC-070: what the engine is asked for, and what becomes of the JSON that it answers with."""
    engine = engine_saying('[{"name": "get_weather", "parameters": {"city": "Oslo"}}]')
    async with client_of(engine, tool_call_parser="hermes") as client:
        whole = (await client.post(PATH, json=tools_body(tool_choice="required"))).json()["choices"][0]
        chunks = events(await client.post(PATH, json=tools_body(tool_choice="required", stream=True)))
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    assert [c["function"]["arguments"] for c in whole["message"]["tool_calls"]] == ['{"city": "Oslo"}']
    _, calls, finish = fold([choice for chunk in chunks for choice in chunk["choices"]])
    assert [call[1:] for call in calls] == [("get_weather", '{"city": "Oslo"}')] and finish == "tool_calls"
    schema = engine.params[0].structured_outputs.json
    first, second = schema["items"]["anyOf"]
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert first["properties"] == {"name": {"const": "get_weather"}, "parameters": PARAMETERS}
    assert second["properties"]["parameters"]["additionalProperties"] is False

    engine = engine_saying('{"city": "Oslo"}')
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with client_of(engine, tool_call_parser="hermes") as client:
        whole = (await client.post(PATH, json=tools_body(tool_choice=named))).json()["choices"][0]
    assert whole["finish_reason"] == "stop" and whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert engine.params[0].structured_outputs.json == PARAMETERS


async def test_references_inside_of_a_schema_still_find_their_target() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    tree = {"$defs": {"node": node}, "properties": {"root": {"$ref": "#/$defs/node"}}}
    tool = {"type": "function", "function": {"name": "grow", "parameters": tree}}
    engine = engine_saying("[]")
    async with client_of(engine, tool_call_parser="hermes") as client:
        await client.post(PATH, json=chat_body(tools=[tool, PING], tool_choice="required", parallel_tool_calls=False))
    schema = engine.params[0].structured_outputs.json
    assert schema["maxItems"] == 1
    moved = schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert moved["properties"]["root"]["$ref"] == "#/items/anyOf/0/properties/parameters/$defs/node"
    assert moved["$defs"]["node"]["properties"]["next"]["$ref"] == "#/items/anyOf/0/properties/parameters/$defs/node"


async def test_marks_that_are_special_tokens_are_not_skipped() -> None:
    rust = byte_tokenizer()
    rust.add_special_tokens(["<tool_call>", "</tool_call>", "<think>", "<other>"])
    texts = Tokenizer(RustBackend(rust), TokenizerInfo(chat_templates={"default": SHOWS_TOOLS + "{# <think> #}"}))
    engine = FakeEngine(script=say(CALL), config=make_config(max_model_len=4096, vocab_size=600), texts=texts)
    async with client_of(engine, tool_call_parser="hermes") as client:
        await client.post(PATH, json=tools_body())
        await client.post(PATH, json=chat_body())
    with_tools, without = (
        [texts.id_to_token(i) for i in params.shown_special_token_ids or []] for params in engine.params
    )
    assert with_tools == ["<tool_call>", "</tool_call>", "<think>"] and without == ["<think>"]


async def test_a_format_of_ones_own(tmp_path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from octavo.server.parsers.answer import Opening\n"
        "from octavo.server.parsers.json_calls import json_calls\n"
        "from octavo.server.tool_formats import ToolFormat\n"
        "TOOL_FORMATS = [ToolFormat(('mine',), 'mine', '', {'CALL ': Opening(json_calls())})]\n"
    )
    args = {"tool_parser_plugin": str(plugin), "tool_call_parser": "mine"}
    async with client_of(engine_saying('CALL {"name": "ping"}'), **args) as client:
        choice = (await client.post(PATH, json=tools_body())).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "ping"
