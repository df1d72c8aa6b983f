"""The Responses API: POST /v1/responses, and the routes of stored responses where there is a store."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message

from octavo.errors import ClientError, QueueFullError
from octavo.server.answers import EventStream, Json, StreamStyle, run_while_connected, sse
from octavo.server.context import ServerContext
from octavo.server.errors import describe
from octavo.server.generation import ChoiceUpdate
from octavo.server.json_body import convert, read_object
from octavo.server.openai.call import served_name
from octavo.server.openai.logprobs import LogprobWriter
from octavo.server.openai.protocol import ChatCompletionRequest, refuse_unsupported
from octavo.server.openai.responses import TokenLogprob
from octavo.server.openai.serving import send_answer, start_chat
from octavo.server.responses.answer import ResponseAnswer
from octavo.server.responses.conversation import chat_fields, input_items, listed_item, to_messages
from octavo.server.responses.protocol import (
    INCLUDE_ENCRYPTED,
    INCLUDE_LOGPROBS,
    NOT_SUPPORTED,
    DeletedResponse,
    InputItems,
    JsonObject,
    Reasoning,
    Response,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)
from octavo.server.responses.store import Owner, ResponseStore, StoredResponse
from octavo.types.sampling_params import SamplingParams

PATH = "/v1/responses"


async def create_response(request: Request) -> EventStream | Json:
    """POST /v1/responses"""
    server, store = _server(request), _server(request).responses
    fields = await read_object(request, server.max_body_bytes)
    refuse_unsupported(fields, NOT_SUPPORTED)
    body = convert(fields, ResponsesRequest)
    keeps = _keeps(body, store)
    model, items = served_name(body.model, server.model), input_items(body)
    messages = [*_earlier(body, store, _owner(request)), *to_messages(items)]
    chat_body = chat_fields(body, messages)
    refuse_unsupported(chat_body)
    chat = convert(chat_body, ChatCompletionRequest)
    # Not the id that a header chose: it must not be another's.
    response_id = f"resp_{uuid.uuid4().hex if keeps else request.state.request_id}"
    generation = await start_chat(server, chat, response_id)
    response = _response(response_id, body, model, generation.params, keeps)
    entry = StoredResponse(response, _owner(request), items, messages)

    def keep() -> None:
        entry.messages = [*messages, *to_messages(msgspec.to_builtins(response.output))]
        store.put(entry)

    answer = ResponseAnswer(
        response,
        generation,
        logprobs=_scorer(server, body),
        packs_reasoning=body.includes(INCLUDE_ENCRYPTED),
        shows_cache=server.args.enable_prompt_tokens_details,
        **({"on_end": keep} if keeps else {}),
    )
    if body.background:
        return _start_in_background(server, entry, answer, streams=bool(body.stream))
    style = StreamStyle(lambda error: b"".join(answer.failed(error)), b"")
    return await send_answer(request, generation, answer, stream=bool(body.stream), style=style)


async def get_response(request: Request) -> EventStream | Json:
    """GET /v1/responses/{id}?stream=&starting_after="""
    server, entry = _server(request), _entry(request)
    if request.query_params.get("stream", "false").lower() not in ("true", "1"):
        return Json(entry.response)
    if entry.frames is None:
        raise ClientError("only a response that was made with background and stream can be streamed.", param="stream")
    after = request.query_params.get("starting_after", "-1")
    if not re.fullmatch(r"-?[0-9]{1,9}", after):
        raise ClientError(f"starting_after={after!r} must be a sequence number.", param="starting_after")
    return EventStream(
        entry.follow(max(int(after) + 1, 0)), server.activity, _FOLLOWED, server.args.sse_keep_alive_interval
    )


async def delete_response(request: Request) -> Json:
    """DELETE /v1/responses/{id}: forget it, and stop it if it is being made."""
    entry = _entry(request)
    await _stop(entry)
    _server(request).responses.remove(entry)
    return Json(DeletedResponse(entry.response.id))


async def cancel_response(request: Request) -> Json:
    """POST /v1/responses/{id}/cancel: stop making a response in the background."""
    entry = _entry(request)
    if not entry.response.background:
        raise ClientError("only responses that are made in the background can be cancelled.", param="response_id")
    await _stop(entry)
    return Json(entry.response)


async def list_input_items(request: Request) -> Json:
    """GET /v1/responses/{id}/input_items?order=&after=&limit="""
    query = request.query_params
    items = [listed_item(item, number) for number, item in enumerate(_entry(request).items)]
    if query.get("order", "desc") == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
    limit = query.get("limit", "20")
    if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= 100:
        raise ClientError(f"limit={limit!r:.40} must be 1 to 100.", param="limit")
    page = items[start : start + int(limit)]
    more = start + len(page) < len(items)
    return Json(InputItems(page, page[0]["id"] if page else None, page[-1]["id"] if page else None, has_more=more))


ROUTES = [Route(PATH, create_response, methods=["POST"])]
STORE_ROUTES = [
    Route(PATH + "/{response_id}", get_response, methods=["GET"]),
    Route(PATH + "/{response_id}", delete_response, methods=["DELETE"]),
    Route(PATH + "/{response_id}/cancel", cancel_response, methods=["POST"]),
    Route(PATH + "/{response_id}/input_items", list_input_items, methods=["GET"]),
]


def _server(request: Request) -> ServerContext:
    return request.app.context


def _owner(request: Request) -> Owner:
    return getattr(request.state, "api_key", None)


def _entry(request: Request) -> StoredResponse:
    return _server(request).responses.get(request.path_params["response_id"], _owner(request))


def _keeps(body: ResponsesRequest, store: ResponseStore) -> bool:
    """Whether the response is to be stored; refuses what needs a store where there is none."""
    asks = [name for name in ("store", "background", "previous_response_id") if getattr(body, name)]
    if asks and not store.is_enabled:
        raise ClientError(
            f"{asks[0]} needs stored responses, and this server keeps none; start it with --responses-store-bytes.",
            param=asks[0],
            code="unsupported_parameter",
        )
    if body.background and body.store is False:
        raise ClientError("background needs store: true.", param="store")
    return store.is_enabled and body.store is not False


def _earlier(body: ResponsesRequest, store: ResponseStore, owner: Owner) -> list[JsonObject]:
    """The conversation that the call goes on with."""
    if body.previous_response_id is None:
        return []
    entry = store.get(body.previous_response_id, owner)
    if entry.response.status not in ("completed", "incomplete"):
        raise ClientError(
            f"response {entry.response.id!r} is {entry.response.status}; wait until it is complete.",
            param="previous_response_id",
        )
    return entry.messages


def _scorer(server: ServerContext, body: ResponsesRequest) -> Callable[[ChoiceUpdate], list[TokenLogprob]] | None:
    """What writes the log probabilities of an update's tokens, where they were asked for."""
    if not body.includes(INCLUDE_LOGPROBS):
        return None
    writer = LogprobWriter(server.tokenizer, server.args.return_tokens_as_token_ids)

    def write(update: ChoiceUpdate) -> list[TokenLogprob]:
        token_ids, positions = update.completion.token_ids, update.completion.logprobs or []
        if update.is_reasoning:
            shown = [index for index, is_reasoning in enumerate(update.is_reasoning) if not is_reasoning]
            token_ids, positions = [token_ids[i] for i in shown], [positions[i] for i in shown]
        return writer.chat(token_ids, positions, body.top_logprobs or 0)

    return write


def _response(response_id: str, body: ResponsesRequest, model: str, params: SamplingParams, keeps: bool) -> Response:
    text = body.text or TextConfig()
    text.format = text.format or TextFormat()
    return Response(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or Reasoning(),
        safety_identifier=body.safety_identifier,
        store=keeps,
        temperature=params.temperature,
        text=text,
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )


# --- in the background -----------------------------------------------------------------------------------------------


def _start_in_background(
    server: ServerContext, entry: StoredResponse, answer: ResponseAnswer, *, streams: bool
) -> EventStream | Json:
    """Make the response with nobody connected; a server that stops waits for it as for any request."""
    limit = server.args.max_concurrency_per_key
    if limit is not None and server.responses.num_running(entry.owner) >= limit:
        raise QueueFullError(f"this API key has {limit} responses running in the background, the most allowed.")
    if streams:
        entry.frames = []
    entry.task = asyncio.create_task(_run(server, entry, answer), name=entry.response.id)
    server.responses.put(entry)
    if server.responses.is_full:
        entry.task.cancel()
        server.responses.remove(entry)
        raise QueueFullError("the responses that are running in the background take all the room for stored ones.")
    if not streams:
        return Json(entry.response)
    return EventStream(entry.follow(0), server.activity, _FOLLOWED, server.args.sse_keep_alive_interval)


async def _run(server: ServerContext, entry: StoredResponse, answer: ResponseAnswer) -> None:
    def record(frames: list[bytes]) -> None:
        if entry.frames is not None:
            entry.frames += frames
            server.responses.grow(entry, sum(map(len, frames)))
            entry.tell()

    async def work() -> None:
        async with aclosing(answer.chunks(answer.generation.updates())) as frames:
            async for frame in frames:
                record([frame])

    try:
        with server.activity:
            await run_while_connected(_never, server.activity, work())
    except asyncio.CancelledError:
        record(answer.cut("cancelled"))
    except Exception as error:
        record(answer.failed(error))
    finally:
        entry.tell()


async def _never() -> Message:
    """Nobody is connected, so nobody hangs up."""
    await asyncio.Event().wait()
    raise AssertionError


async def _stop(entry: StoredResponse) -> None:
    if entry.task is not None:
        entry.task.cancel()
        await asyncio.gather(entry.task, return_exceptions=True)
        if not entry.has_ended:  # it was never begun
            entry.response.status = "cancelled"
            entry.tell()


_FOLLOWED = StreamStyle(
    lambda error: sse({"type": "error", "sequence_number": 0, **_error_fields(error)}, "error"), b""
)


def _error_fields(error: BaseException) -> dict[str, str | None]:
    found = describe(error).body.error
    return {"code": found.code, "message": found.message, "param": found.param}
