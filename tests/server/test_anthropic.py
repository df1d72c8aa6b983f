"""Anthropic's routes, through the official client where it can say what is asked."""

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types import MessageTokensCount as TokenCount
from pydantic import TypeAdapter

from octavo.server.anthropic.answer import MessagesAnswer
from octavo.server.anthropic.protocol import InputMessage, MessagesRequest, Thinking
from octavo.server.generation import ChoiceUpdate, UsageCounter
from octavo.server.text_machine import (
    ContentDelta,
    Event,
    Finish,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from octavo.types.outputs import CompletionOutput, RequestOutput
from tests.server.fake_engine import FakeEngine, make_config, make_tokenizer, say
from tests.server.http import client_of, make_app, strict_json

PATH = "/v1/messages"
# Writes every message out, so that the prompt shows what reached the template.
SHOW = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}{{ '>' if add_generation_prompt }}"
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": m} if isinstance(m, str | list) else m for m in messages or ("Hi",)]
    return {"model": "tiny", "max_tokens": 50, "messages": turns, **fields}


def shown(engine: FakeEngine) -> list[dict]:
    """The messages of the last prompt."""
    text = make_tokenizer().decode(engine.prompts[-1], skip_special_tokens=False)
    return [json.loads(line) for line in text.removesuffix(">").splitlines()]


def show_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(texts=make_tokenizer(SHOW), config=make_config(max_model_len=4096), **fields)


@asynccontextmanager
async def official(engine: FakeEngine | None = None, **args: Any):
    transport = httpx2.ASGITransport(app=make_app(engine, **args))
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        anthropic.AsyncAnthropic(
            base_url="http://localhost",
            api_key="secret",
            http_client=http,
            max_retries=0,
            _strict_response_validation=True,
        ) as client,
    ):
        yield client


def read_events(text: str) -> list[dict]:
    """The events of a stream; each is named by its type and known to the client's types, pings aside."""
    found = []
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENTS.validate_python(event, strict=True)
        found.append(event)
    return found


def check_order(events: list[dict]) -> None:
    """FC-091: what may follow what, and blocks numbered in turn with deltas inside them only."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == kinds.count("message_stop") == 1
    is_open, index = False, -1
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == index + 1
                is_open, index = True, index + 1
            case "content_block_delta":
                assert is_open and event["index"] == index
            case "content_block_stop":
                assert is_open and event["index"] == index
                is_open = False
    assert not is_open


# --- the official client ---------------------------------------------------------------------------------------------


async def test_official_client_whole_and_streamed():
    async with official(api_key="secret") as client:
        whole = await client.messages.create(**body())
        async with client.messages.stream(**body()) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
    assert (whole.content[0].type, whole.content[0].text) == ("text", "Hello there")
    assert "".join(texts) == "Hello there" and len(texts) > 1
    assert (whole.role, whole.model, whole.stop_reason, whole.stop_sequence) == ("assistant", "tiny", "end_turn", None)
    assert whole.id.startswith("msg_") and whole._request_id
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    Message.model_validate(whole.model_dump(), strict=True)


async def test_count_tokens_counts_what_a_message_costs():
    conversation = {"model": "tiny", "messages": [{"role": "user", "content": "Count me"}], "system": "Be brief."}
    async with official() as client:
        counted = await client.messages.count_tokens(**conversation)
        message = await client.messages.create(max_tokens=5, **conversation)
    assert isinstance(counted, TokenCount)
    assert counted.input_tokens == message.usage.input_tokens > 10


async def test_errors_raise_the_clients_own_exceptions():
    async with official() as client:
        with pytest.raises(anthropic.NotFoundError, match="nope") as missing:
            await client.messages.create(**body(model="nope"))
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="stop"):
            await client.messages.create(**body(stop_sequences=[""]))
    async with official(api_key="another") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**body())
    async with official(FakeEngine(fail_after=0)) as client:
        with pytest.raises(anthropic.InternalServerError) as dead:
            await client.messages.create(**body())
        assert dead.value.body["error"]["type"] == "overloaded_error"
    async with official(FakeEngine(fail_after=2)) as client:
        with pytest.raises(anthropic.APIStatusError, match="gone"):
            async with client.messages.stream(**body()) as stream:
                await stream.get_final_message()


# --- the wire --------------------------------------------------------------------------------------------------------


async def test_events_of_a_text():
    async with client_of() as client:
        response = await client.post(PATH, json=body(stream=True), headers={"x-request-id": "r1"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == "r1"
    events = read_events(response.text)
    check_order(events)
    assert [event["type"] for event in events[:4]] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
    ]
    start, end = events[0]["message"], events[-2]
    assert (start["id"], start["content"], start["stop_reason"], start["stop_sequence"]) == ("msg_r1", [], None, None)
    assert start["usage"]["input_tokens"] > 0
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] > start["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"stop_sequences": ["x", "t"]}, "stop_sequence", "t"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"max_tokens": 100, "context": 40}, "model_context_window_exceeded", None),
    ],
)
async def test_stop_reasons(fields, reason, sequence):
    """FC-094; the same streamed and whole, the key always there."""
    fields = dict(fields)
    config = make_config(max_model_len=fields.pop("context", 128))
    async with client_of(FakeEngine(script=say("H" * 40 + " t x"), config=config)) as client:
        whole = strict_json((await client.post(PATH, json=body(**fields))).content)
        events = read_events((await client.post(PATH, json=body(stream=True, **fields))).text)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert events[-2]["usage"] == whole["usage"]


async def test_empty_stop_sequence_is_refused():
    """FC-026."""
    async with client_of() as client:
        for wrong in ([""], ["", "\n"]):
            assert (await client.post(PATH, json=body(stop_sequences=wrong))).status_code == 400
        assert (await client.post(PATH, json=body(stop_sequences=[]))).status_code == 200


async def test_cached_tokens_are_counted_apart_when_asked_for():
    for args, cached in (({}, 0), ({"enable_prompt_tokens_details": True}, 16)):
        async with client_of(**args) as client:
            first, second = [(await client.post(PATH, json=body("twelve words"))).json()["usage"] for _ in range(2)]
        assert first["cache_read_input_tokens"] == 0
        assert second["cache_read_input_tokens"] == cached
        assert second["input_tokens"] == first["input_tokens"] - cached


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1000}, "max_tokens": 2000}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "https://a.example"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ],
)
async def test_what_is_wrong_is_named(fields, place):
    async with client_of(show_engine()) as client:
        response = await client.post(PATH, json=body() | fields)
    assert response.status_code == 400, response.text
    found = strict_json(response.content)
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert place in found["error"]["message"]


async def test_neutral_fields_of_other_providers_are_taken():
    async with client_of() as client:
        neutral = {
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "a_field_of_the_future": 1,
        }
        assert (await client.post(PATH, json=body(**neutral))).status_code == 200


async def test_errors_before_the_route_have_the_shape_too():
    async with client_of(api_key="secret") as client:
        for response, status, kind in (
            (await client.post(PATH, json=body()), 401, "authentication_error"),
            (await client.get(PATH, headers={"x-api-key": "secret"}), 405, "invalid_request_error"),
            (
                await client.post(PATH, content=b"x" * 99, headers={"x-api-key": "secret"}),
                415,
                "invalid_request_error",
            ),
        ):
            assert response.status_code == status
            found = strict_json(response.content)
            assert set(found) == {"type", "error"} and found["error"]["type"] == kind
            assert response.headers["request-id"]


# --- what becomes of a conversation ----------------------------------------------------------------------------------


async def test_system_text_in_every_place():
    """FC-093."""
    engine = show_engine()
    spellings = [
        body(system="Be kind."),
        body(system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]),
        body({"role": "system", "content": "Be kind."}, "Hi"),
        body("Hi", {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}),
    ]
    async with client_of(engine) as client:
        for spelling in spellings:
            assert (await client.post(PATH, json=spelling)).status_code == 200
        assert shown(engine) == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        assert all(prompt == engine.prompts[0] for prompt in engine.prompts)
        counts = [
            (await client.post(f"{PATH}/count_tokens", json=spelling)).json()["input_tokens"] for spelling in spellings
        ]
        assert counts == [len(engine.prompts[0])] * 4
        await client.post(PATH, json=body({"role": "system", "content": "B"}, "Hi", system="A"))
        assert shown(engine)[0] == {"role": "system", "content": "A\nB"}


async def test_tool_results_in_all_shapes():
    """FC-096: each is a tool message in order with its id; failures are marked."""
    calls = [{"type": "tool_use", "id": f"t{i}", "name": "look", "input": {"at": i}} for i in range(4)]
    results = [
        {"type": "tool_result", "tool_use_id": "t0", "content": "plain"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
        {"type": "text", "text": "Go on."},
    ]
    engine = show_engine()
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Looking."}, *calls]}
    async with client_of(engine) as client:
        assert (await client.post(PATH, json=body("Look", said, results))).status_code == 200
        user, assistant, *rest = shown(engine)
        assert user == {"role": "user", "content": "Look"}
        assert (assistant["content"], assistant["reasoning_content"]) == ("Looking.", "Hm.")
        assert [call["function"] for call in assistant["tool_calls"]] == [
            {"name": "look", "arguments": {"at": i}} for i in range(4)
        ]
        assert rest == [
            {"role": "tool", "tool_call_id": "t0", "content": "plain"},
            {"role": "tool", "tool_call_id": "t1", "content": "one\ntwo"},
            {"role": "tool", "tool_call_id": "t2", "content": "Error: no such file"},
            {"role": "tool", "tool_call_id": "t3", "content": ""},
            {"role": "user", "content": "Go on."},
        ]
        image = {"type": "tool_result", "tool_use_id": "t0", "content": [{"type": "image", "source": {}}]}
        refused = await client.post(PATH, json=body("Look", said, [image]))
        assert refused.status_code == 400 and "messages[2].content[0].content[0]" in refused.text


async def test_neighbours_of_one_role_are_one_message():
    engine = show_engine()
    async with client_of(engine) as client:
        await client.post(PATH, json=body("a", "b", {"role": "assistant", "content": "c"}, "d"))
    assert [(m["role"], m["content"]) for m in shown(engine)] == [("user", "a\nb"), ("assistant", "c"), ("user", "d")]


async def test_a_last_message_of_the_assistant_is_continued():
    engine = FakeEngine()
    async with client_of(engine) as client:
        answer = (await client.post(PATH, json=body("Hi", {"role": "assistant", "content": "Well,"}))).json()
        assert answer["content"] == [{"type": "text", "text": "Hello there"}]
        prompt = make_tokenizer().decode(engine.prompts[-1], skip_special_tokens=False)
        assert prompt.endswith("<|im_start|>assistant\nWell,")
        call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
        assert (await client.post(PATH, json=body("Hi", call))).status_code == 400


async def test_fields_reach_the_engine():
    engine = FakeEngine()
    async with client_of(engine) as client:
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["END"], "vllm_xargs": {"a": 1}}
        await client.post(PATH, json=body(**fields))
    params = engine.params[0]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (params.stop, params.max_tokens, params.extra_args) == (["END"], 50, {"a": 1})


# --- blocks ----------------------------------------------------------------------------------------------------------


def updates_of(*steps: list[Event]):
    """The updates of a generation in which each step brings these events."""

    async def updates():
        for number, events in enumerate(steps):
            last = events[-1] if events else None
            reason = last.reason if isinstance(last, Finish) else None
            completion = CompletionOutput(0, "", [7], finish_reason=reason)
            yield ChoiceUpdate(0, number == 0, events, completion, RequestOutput("r", None, [1], [completion], False))

    return updates()


def answer(**fields: Any) -> MessagesAnswer:
    request = MessagesRequest(messages=[InputMessage("user", "Hi")], max_tokens=1, **fields)
    return MessagesAnswer("msg_1", "tiny", request, SimpleNamespace(usage=UsageCounter()), show_cache=False)


CALLS: list[list[Event]] = [
    [ReasoningDelta("Think")],
    [ReasoningDelta("ing"), ContentDelta("\n\n")],
    [ContentDelta("Let me"), ContentDelta(" look.")],
    [ToolCallStart(0, "a", "look"), ToolCallArguments(0, '{"at":'), ToolCallArguments(0, " [1]}"), ToolCallEnd(0)],
    [ContentDelta("\n"), ToolCallStart(1, "b", "ping"), ToolCallEnd(1)],
    [ContentDelta("Done.")],
    [Finish("tool_calls")],
]


async def test_blocks_of_thinking_text_and_parallel_calls():
    """FC-091: text, a call, text. Streamed and whole are the same; the client's own reader agrees."""
    events = read_events(b"".join([frame async for frame in answer().chunks(updates_of(*CALLS))]).decode())
    check_order(events)
    blocks: list[dict] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"deltas": []})
        elif event["type"] == "content_block_delta":
            blocks[-1]["deltas"].append(event["delta"])
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert [delta["type"] for delta in blocks[0]["deltas"]] == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert blocks[1]["deltas"][0] == {"type": "text_delta", "text": "\n\nLet me"}
    assert blocks[2]["input"] == {} and blocks[2]["id"] == "a"
    assert "".join(delta["partial_json"] for delta in blocks[2]["deltas"]) == '{"at": [1]}'
    whole = await answer().whole(updates_of(*CALLS))
    assert [block.__struct_config__.tag for block in whole.content] == [block["type"] for block in blocks]
    assert (whole.content[0].thinking, whole.content[0].signature) == (
        "Thinking",
        blocks[0]["deltas"][-1]["signature"],
    )
    assert (whole.content[2].input, whole.content[3].input) == ({"at": [1]}, {})
    assert whole.content[4].text == "Done."
    assert whole.stop_reason == events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_thinking_may_be_left_out_but_its_signature():
    wanted = {"thinking": Thinking("adaptive", display="omitted")}
    whole = await answer(**wanted).whole(updates_of(*CALLS))
    assert whole.content[0].thinking == "" and whole.content[0].signature
    assert whole.content[0].signature == (await answer().whole(updates_of(*CALLS))).content[0].signature


@pytest.mark.parametrize(
    ("arguments", "input_"),
    [
        ('{"a": 1, "b": "un', {"a": 1}),
        ("", {}),
        ('{"a": }', {"INVALID_JSON": '{"a": }'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ],
)
async def test_a_call_that_was_cut(arguments, input_):
    """FC-071: what is complete is kept; the reason says that it was cut."""
    cut: list[list[Event]] = [[ToolCallStart(0, "a", "f")], [ToolCallArguments(0, arguments)], [Finish("length")]]
    whole = await answer().whole(updates_of(*cut))
    assert whole.content[0].input == input_
    assert whole.stop_reason in ("max_tokens", "model_context_window_exceeded")


async def test_nothing_but_white_space_is_no_block():
    whole = await answer().whole(updates_of([ContentDelta(" \n")], [Finish("stop")]))
    assert (whole.content, whole.stop_reason) == ([], "end_turn")


def test_request_parameters_are_those_of_the_client():
    """Every field that the client can send is one of ours, or refused or ignored on purpose."""
    from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

    from octavo.server.anthropic.conversation import NOT_SUPPORTED

    ignored = {"cache_control", "metadata", "diagnostics", "user_profile_id", "workspace_id"}
    ours = set(MessagesRequest.__struct_fields__) | set(NOT_SUPPORTED) | ignored
    assert set(MessageCreateParamsNonStreaming.__annotations__) <= ours
