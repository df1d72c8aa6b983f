"""The Responses API, through the official client where it can say what is asked."""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from octavo.server.answers import encode
from octavo.server.generation import UsageCounter
from octavo.server.openai.protocol import refuse_unsupported
from octavo.server.openai.responses import TokenLogprob
from octavo.server.responses.answer import ResponseAnswer
from octavo.server.responses.protocol import NOT_SUPPORTED, OutputMessage, ResponsesRequest
from octavo.server.responses.routes import _response
from octavo.server.text_machine import ReasoningDelta
from octavo.types.sampling_params import SamplingParams
from tests.server.fake_engine import FakeEngine, make_config, make_tokenizer
from tests.server.http import RawCall, client_of, error_of, make_app, strict_json
from tests.server.test_anthropic import CALLS, SHOW, shown, updates_of

PATH = "/v1/responses"
STORE = {"responses_store_bytes": 1 << 20}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def body(given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": given, **fields}


def show_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(texts=make_tokenizer(SHOW), config=make_config(max_model_len=4096), **fields)


@asynccontextmanager
async def official(engine: FakeEngine | None = None, **args: Any):
    transport = httpx2.ASGITransport(app=make_app(engine, **args))
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="secret",
            http_client=http,
            max_retries=0,
            _strict_response_validation=True,
        ) as client,
    ):
        yield client


def read_events(text: str) -> list[dict]:
    """The events of a stream, named by type, numbered from 0, and known to the client's types."""
    found = []
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        EVENT.validate_python(event, strict=True)
        found.append(event)
    return found


def kinds(events: list[dict]) -> list[str]:
    """Types without their prefix, repeated deltas once."""
    found: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if not (kind.endswith("delta") and found and found[-1] == kind):
            found.append(kind)
    return found


# --- the official client ---------------------------------------------------------------------------------------------


async def test_official_client_whole_and_streamed():
    async with official(api_key="secret") as client:
        whole = await client.responses.create(model="tiny", input="Hi", instructions="Be kind.", metadata={"a": "b"})
        async with client.responses.stream(model="tiny", input="Hi", instructions="Be kind.") as stream:
            seen = [event async for event in stream]
            streamed = await stream.get_final_response()
    assert whole.output_text == streamed.output_text == "Hello there"
    assert (whole.status, whole.model, whole.object, whole.metadata) == ("completed", "tiny", "response", {"a": "b"})
    assert whole.id.startswith("resp_") and whole.output[0].id.startswith("msg_")
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens > 0
    assert streamed.usage == whole.usage
    assert (whole.store, whole.background, whole.error, whole.incomplete_details) == (False, False, None, None)
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "Hello there"


async def test_chats_and_completions_hold_to_the_clients_types():
    """The older routes through the same strict client: every chunk and every answer is what it has a type for."""
    async with official() as client:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**chat, n=2)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**chat, **options)]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there"
        texts = {"model": "tiny", "prompt": ["a", "b"], "logprobs": 2}
        answer = await client.completions.create(**texts)
        # Streamed completions have no finish_reason before the last, as everywhere; the client's type has no place for that.
        models = await client.models.list()
        for value in (whole, *chunks, answer, *models.data):
            type(value).model_validate_json(value.model_dump_json(exclude_unset=True), strict=True)
    assert [choice.text for choice in answer.choices] == ["Hello there"] * 2


async def test_answers_hold_to_the_clients_types():
    async with client_of() as client:
        Response.model_validate_json((await client.post(PATH, json=body())).content, strict=True)


async def test_stored_responses():
    engine = show_engine()
    async with official(engine, **STORE) as client:
        first = await client.responses.create(model="tiny", input="One", instructions="Be kind.")
        second = await client.responses.create(model="tiny", input="Two", previous_response_id=first.id)
        assert second.previous_response_id == first.id and second.store is True
        # Instructions are each call's own.
        assert [(m["role"], m["content"]) for m in shown(engine)] == [
            ("user", "One"),
            ("assistant", "Hello there"),
            ("user", "Two"),
        ]
        assert (await client.responses.retrieve(second.id)).output_text == "Hello there"
        items = await client.responses.input_items.list(second.id)
        assert [item.content[0].text for item in items.data] == ["Two"]
        await client.responses.delete(second.id)
        for gone in (second.id, "resp_unknown"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(gone)
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="tiny", input="x", previous_response_id=gone)
        kept_not = await client.responses.create(model="tiny", input="One", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(kept_not.id)


async def test_background_and_cancel():
    engine = FakeEngine(hold_after=3)
    async with official(engine, **STORE) as client:
        begun = await client.responses.create(model="tiny", input="Hi", background=True)
        assert begun.status == "queued" and begun.background
        await engine.reached.wait()
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            await client.responses.create(model="tiny", input="x", previous_response_id=begun.id)
        cancelled = await client.responses.cancel(begun.id)
        assert (cancelled.status, cancelled.output) == ("cancelled", [])
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        assert engine.running == [] and engine.aborted

        # One that is cancelled before it begins.
        begun = await client.responses.create(model="tiny", input="Hi", background=True)
        assert (await client.responses.cancel(begun.id)).status == "cancelled"

        engine.hold_after = None
        begun = await client.responses.create(model="tiny", input="Hi", background=True)
        while (done := await client.responses.retrieve(begun.id)).status != "completed":
            await asyncio.sleep(0)
        assert done.output_text == "Hello there"
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel((await client.responses.create(model="tiny", input="Hi")).id)


async def test_background_stream_can_be_taken_up_again():
    async with official(**STORE) as client:
        stream = await client.responses.create(model="tiny", input="Hi", background=True, stream=True)
        events = [event async for event in stream]
        assert events[0].response.status == "queued" and events[-1].type == "response.completed"
        response_id = events[0].response.id
        again = [event async for event in await client.responses.retrieve(response_id, stream=True, starting_after=3)]
        assert [event.sequence_number for event in again] == list(range(4, len(events)))
        plain = await client.responses.create(model="tiny", input="Hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.retrieve(plain.id, stream=True)


async def test_a_cancelled_stream_tells_what_there_was():
    engine = FakeEngine(hold_after=3)
    app = make_app(engine, **STORE)
    call = RawCall(app, PATH, body(background=True, stream=True))
    await engine.reached.wait()
    while "output_text.delta" not in call.text:
        await asyncio.sleep(0)
    (response_id,) = {event["response"]["id"] for event in read_events(call.text) if "response" in event}
    async with client_of(app=app) as client:
        cancelled = (await client.post(f"{PATH}/{response_id}/cancel", json={})).json()
    await call.task
    events = read_events(call.text)
    assert cancelled["status"] == "cancelled" and cancelled["output"][0]["status"] == "incomplete"
    assert events[-1]["item"] == cancelled["output"][0]
    assert cancelled["output"][0]["content"][0]["text"] == "Hello"


async def test_failure_in_the_background():
    async with official(FakeEngine(fail_after=2), **STORE) as client:
        begun = await client.responses.create(model="tiny", input="Hi", background=True)
        while (done := await client.responses.retrieve(begun.id)).status == "in_progress" or done.status == "queued":
            await asyncio.sleep(0)
        assert (done.status, done.error.code) == ("failed", "server_error")


# --- the store -------------------------------------------------------------------------------------------------------


async def test_without_a_store_what_needs_it_is_refused():
    async with client_of() as client:
        for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            error = error_of(await client.post(PATH, json=body(**fields)), 400)
            assert error["param"] in fields and "--responses-store-bytes" in error["message"]
        assert (await client.post(PATH, json=body(store=False))).status_code == 200
        error_of(await client.get(f"{PATH}/resp_1"), 404)
    async with client_of(**STORE) as client:
        assert error_of(await client.post(PATH, json=body(store=False, background=True)), 400)["param"] == "store"


async def test_keys_do_not_see_each_others_responses():
    keys = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]
    async with client_of(api_key=["one", "two"], **STORE) as client:
        chosen = {**keys[0], "x-request-id": "chosen"}
        response = (await client.post(PATH, json=body(), headers=chosen)).json()
        assert response["id"] != "resp_chosen"  # another's id cannot be taken over
        path = f"{PATH}/{response['id']}"
        assert (await client.get(path, headers=keys[0])).status_code == 200
        for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            error_of(await client.request(method, path + suffix, headers=keys[1]), 404)
        call = body(previous_response_id=response["id"])
        error_of(await client.post(PATH, json=call, headers=keys[1]), 404)


async def test_store_is_bounded():
    app = make_app(FakeEngine(), responses_store_bytes=10_000)
    store = app.context.responses
    async with client_of(app=app) as client:
        ids = [(await client.post(PATH, json=body())).json()["id"] for _ in range(20)]
        statuses = [(await client.get(f"{PATH}/{i}")).status_code for i in ids]
        kept = statuses.count(200)
        assert 2 <= kept < 20 and statuses == [404] * (20 - kept) + [200] * kept
        assert 0 < store.num_bytes <= 10_000
        # The least recently used goes first.
        oldest = ids[20 - kept]
        await client.get(f"{PATH}/{oldest}")
        await client.post(PATH, json=body())
        assert (await client.get(f"{PATH}/{oldest}")).status_code == 200
        for i in ids:
            await client.delete(f"{PATH}/{i}")


async def test_running_responses_cannot_fill_more_than_the_store():
    engine = FakeEngine(hold_after=0)
    app = make_app(engine, responses_store_bytes=6000)
    async with client_of(app=app) as client:
        begun = []
        while (response := await client.post(PATH, json=body(background=True))).status_code == 200:
            begun.append(response.json()["id"])
        error_of(response, 429)
        assert 2 <= len(begun) < 20 and app.context.responses.num_bytes <= 6000
        for response_id in begun:
            await client.delete(f"{PATH}/{response_id}")
        assert app.context.responses.num_bytes == 0
        assert (await client.post(PATH, json=body(background=True))).status_code == 200


async def test_pages_of_input_items():
    given = [{"role": "user", "content": str(number)} for number in range(45)]
    async with official(show_engine(), **STORE) as client:
        response = await client.responses.create(model="tiny", input=given)
        newest = [item.content[0].text async for item in client.responses.input_items.list(response.id)]
        assert newest == [str(number) for number in reversed(range(45))]
        page = await client.responses.input_items.list(response.id, order="asc", limit=2)
        assert page.has_more and [item.content[0].text for item in page.data] == ["0", "1"]
    async with client_of(**STORE) as client:
        path = f"{PATH}/{(await client.post(PATH, json=body())).json()['id']}"
        for wrong in ("0", "101", "x", "9" * 5000):
            error_of(await client.get(f"{path}/input_items", params={"limit": wrong}), 400)
        for wrong in ("x", "9" * 5000):
            error_of(await client.get(path, params={"stream": "true", "starting_after": wrong}), 400)


async def test_background_counts_for_its_key():
    engine = FakeEngine(hold_after=0)
    headers = {"authorization": "Bearer one"}
    async with client_of(engine, api_key="one", max_concurrency_per_key=2, **STORE) as client:
        begun = [(await client.post(PATH, json=body(background=True), headers=headers)).json() for _ in range(2)]
        error_of(await client.post(PATH, json=body(background=True), headers=headers), 429)
        for response in begun:
            await client.post(f"{PATH}/{response['id']}/cancel", headers=headers)
        begun = [(await client.post(PATH, json=body(background=True), headers=headers)).json()]
        await client.delete(f"{PATH}/{begun[0]['id']}", headers=headers)
        assert engine.running == []


# --- the wire --------------------------------------------------------------------------------------------------------


async def test_events_of_a_text():
    async with client_of() as client:
        response = await client.post(PATH, json=body(stream=True))
    events = read_events(response.text)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert events[-1]["response"]["usage"]["output_tokens"] > 0
    assert events[-1]["response"]["output"][0] == events[-2]["item"]


async def test_cut_answers_are_incomplete():
    async with client_of() as client:
        whole = (await client.post(PATH, json=body(max_output_tokens=2))).json()
        events = read_events((await client.post(PATH, json=body(max_output_tokens=2, stream=True))).text)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    for response in (whole, last):
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["content"] == last["output"][0]["content"]


async def test_failures():
    """FC-019: before the first token a status, later an event."""
    async with client_of(FakeEngine(fail_after=0)) as client:
        error_of(await client.post(PATH, json=body()), 503)
    async with client_of(FakeEngine(fail_after=2)) as client:
        error_of(await client.post(PATH, json=body()), 503)
        events = read_events((await client.post(PATH, json=body(stream=True))).text)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["output"][0]["status"]) == ("failed", "incomplete")
    assert "gone" in failed["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "messages"),
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": ["input_text"], "text": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        ({"input": ["x"]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_completion_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"model": "nope"}, "model"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(fields, param):
    async with client_of(show_engine()) as client:
        response = await client.post(PATH, json=body() | fields)
    assert error_of(response, 404 if param == "model" else 400)["param"] == param


def test_request_parameters_are_those_of_the_client():
    """Every field that the client can send is one of ours, or refused or ignored on purpose."""
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    ignored = {"prompt_cache_options", "prompt_cache_retention"}
    ours = set(ResponsesRequest.__struct_fields__) | set(NOT_SUPPORTED) | ignored
    assert set(ResponseCreateParamsBase.__annotations__) <= ours
    refuse_unsupported({"service_tier": "auto", "truncation": "disabled"}, NOT_SUPPORTED)


# --- items -----------------------------------------------------------------------------------------------------------


async def test_developer_words_are_in_the_prompt():
    """FC-097."""
    engine = show_engine()
    async with client_of(engine) as client:
        given = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        assert (await client.post(PATH, json=body(given))).status_code == 200
        assert shown(engine)[0] == {"role": "system", "content": "Be kind."}
        assert (await client.post("/v1/chat/completions", json={"messages": given})).status_code == 200
        assert shown(engine)[0] == {"role": "system", "content": "Be kind."}


async def test_items_of_one_turn_are_one_message():
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking.", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "seen"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "nothing"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "octavo:SG0gYWdhaW4u"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    engine = show_engine()
    async with client_of(engine) as client:
        assert (await client.post(PATH, json=body(given))).status_code == 200
    user, turn, *results, last, thanks = shown(engine)
    assert user["content"] == "a\nb"
    assert (turn["content"], turn["reasoning_content"]) == ("Looking.", "Hm.")
    assert [(c["id"], c["function"]["arguments"]) for c in turn["tool_calls"]] == [("1", {"at": 1}), ("2", {})]
    assert [(r["role"], r["tool_call_id"], r["content"]) for r in results] == [
        ("tool", "1", "seen"),
        ("tool", "2", "nothing"),
    ]
    assert (last["content"], last["reasoning_content"]) == ("Done.", "Hm again.")
    assert thanks["content"] == "Thanks"


def answer(**fields: Any) -> ResponseAnswer:
    response = _response("resp_1", ResponsesRequest(input="Hi"), "tiny", SamplingParams(), False)
    generation: Any = SimpleNamespace(usage=UsageCounter())
    return ResponseAnswer(response, generation, **{"packs_reasoning": False, "shows_cache": False, **fields})


async def test_items_of_reasoning_text_and_parallel_calls():
    frames = [frame async for frame in answer().chunks(updates_of(*CALLS))]
    events = read_events(b"".join(frames).decode())
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
               "content_part.done", "output_item.done"]  # fmt: skip
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [
        "created",
        "in_progress",
        *(kind.replace("output_text", "reasoning_text") for kind in message),
        *message,
        *call,
        *(call[0], *call[2:]),
        *message,
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert len({item["id"] for item in output}) == 5
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Thinking"}]
    assert output[1]["content"][0]["text"] == "\n\nLet me look."
    assert (output[2]["call_id"], output[2]["name"], output[2]["arguments"]) == ("a", "look", '{"at": [1]}')
    assert output[3]["arguments"] == ""
    whole = strict_json(encode(await answer().whole(updates_of(*CALLS))))
    assert whole["output"] == output


async def test_logprobs_of_the_message():
    async with client_of() as client:
        asked = body(include=["message.output_text.logprobs"], top_logprobs=2)
        whole = (await client.post(PATH, json=asked)).json()
        events = read_events((await client.post(PATH, json=asked | {"stream": True})).text)
        bare = (await client.post(PATH, json=body())).json()
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "Hello there<|im_end|>"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.5 for entry in entries)
    deltas = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert deltas == entries[:-1] and len(deltas) > 2
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries
    assert bare["output"][0]["content"][0]["logprobs"] == []
    Response.model_validate(whole, strict=True)


async def test_logprobs_leave_reasoning_and_calls_out():
    """Each token of the scripted updates is its own entry; only those of the message are told."""
    counter = itertools.count()
    told: list[int] = []

    def score(update):
        if any(isinstance(event, ReasoningDelta) for event in update.events):
            return []  # as the route does with tokens of reasoning
        told.append(next(counter))
        return [TokenLogprob(str(told[-1]), -1.0, None, [])]

    whole = await answer(logprobs=score).whole(updates_of(*CALLS))
    parts = [item.content[0].logprobs for item in whole.output if isinstance(item, OutputMessage)]
    assert [[entry.token for entry in part] for part in parts] == [["0"], ["3", "4"]]


async def test_reasoning_travels_as_opaque_text():
    """What `include` asked for can be sent back instead of the content."""
    whole = await answer(packs_reasoning=True).whole(updates_of(*CALLS))
    packed = whole.output[0].encrypted_content
    assert packed and "Thinking" not in packed
    engine = show_engine()
    async with client_of(engine) as client:
        given = [{"type": "reasoning", "summary": [], "encrypted_content": packed}, {"role": "user", "content": "x"}]
        await client.post(PATH, json=body(given, include=["reasoning.encrypted_content"]))
    assert shown(engine)[0]["reasoning_content"] == "Thinking"


async def test_text_grows_in_linear_time():
    """100,000 deltas of one character."""
    from octavo.server.text_machine import ContentDelta, Finish

    steps = [[ContentDelta("x")] for _ in range(100_000)]
    whole = await answer().whole(updates_of(*steps, [Finish("stop")]))
    assert len(whole.output[0].content[0].text) == 100_000
    assert json.loads(encode(whole))["status"] == "completed"
