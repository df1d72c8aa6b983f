"""POST /v1/messages and POST /v1/messages/count_tokens."""

from typing import TypeVar

from starlette.requests import Request
from starlette.routing import Route

from octavo.server.answers import EventStream, Json, StreamStyle, sse
from octavo.server.anthropic.answer import MessagesAnswer
from octavo.server.anthropic.conversation import NOT_SUPPORTED, chat_fields
from octavo.server.anthropic.errors import PREFIX, encode_problem
from octavo.server.anthropic.protocol import CountTokensRequest, MessagesRequest, Ping, TokenCount
from octavo.server.context import ServerContext
from octavo.server.errors import describe
from octavo.server.json_body import convert, read_object
from octavo.server.openai.call import served_name
from octavo.server.openai.protocol import ChatCompletionRequest, refuse_unsupported
from octavo.server.openai.serving import send_answer, start_chat

Body = TypeVar("Body", bound=CountTokensRequest)

_STREAM = StreamStyle(
    fail=lambda error: b"event: error\ndata: " + encode_problem(describe(error), PREFIX) + b"\n\n",
    end=b"",
    keep_alive=sse(Ping(), "ping"),
)


async def create_message(request: Request) -> EventStream | Json:
    """POST /v1/messages"""
    server: ServerContext = request.app.context
    body, chat = await _read(request, MessagesRequest)
    model, message_id = served_name(body.model, server.model), f"msg_{request.state.request_id}"
    generation = await start_chat(server, chat, message_id)
    answer = MessagesAnswer(message_id, model, body, generation, show_cache=server.args.enable_prompt_tokens_details)
    return await send_answer(request, generation, answer, stream=bool(body.stream), style=_STREAM)


async def count_tokens(request: Request) -> Json:
    """POST /v1/messages/count_tokens: what the same conversation costs as input."""
    server: ServerContext = request.app.context
    _, chat = await _read(request, CountTokensRequest)
    served_name(chat.model, server.model)
    chat.check()
    prompt = await server.prompts.chat(chat)
    return Json(TokenCount(len(prompt["prompt_token_ids"])))


async def _read(request: Request, kind: type[Body]) -> tuple[Body, ChatCompletionRequest]:
    """The body, and the chat completion that it stands for."""
    fields = await read_object(request, request.app.context.max_body_bytes)
    refuse_unsupported(fields, NOT_SUPPORTED)
    body = convert(fields, kind)
    chat = chat_fields(body)
    if request.app.context.formats.reasoning is None:
        chat.pop("thinking_token_budget", None)  # a model that does not think keeps within any budget
    refuse_unsupported(chat)
    return body, convert(chat, ChatCompletionRequest)


ROUTES = [
    Route(PREFIX, create_message, methods=["POST"]),
    Route(f"{PREFIX}/count_tokens", count_tokens, methods=["POST"]),
]
