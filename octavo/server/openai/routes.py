"""The OpenAI routes: validate, make prompts, generate, write. What goes wrong is raised, and answered elsewhere."""

from typing import TypeVar

from starlette.requests import Request
from starlette.routing import Route

from octavo.errors import ClientError
from octavo.server.answers import EventStream, Json
from octavo.server.context import ServerContext
from octavo.server.json_body import convert, read_object
from octavo.server.openai.call import Call, served_name
from octavo.server.openai.chat import ChatAnswer
from octavo.server.openai.completions import CompletionAnswer
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    check_messages,
    check_turn,
    refuse_unsupported,
)
from octavo.server.openai.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    ModelPermission,
    TokenizeResponse,
)
from octavo.server.openai.serving import send_answer, start_chat, start_completion

R = TypeVar("R", bound=GenerationRequest)


async def list_models(request: Request) -> Json:
    """GET /v1/models"""
    server = _server(request)
    return Json(ModelList([_card(server, name) for name in server.model.served_model_names]))


async def get_model(request: Request) -> Json:
    """GET /v1/models/{name}"""
    server = _server(request)
    return Json(_card(server, served_name(request.path_params["name"], server.model)))


def _card(server: ServerContext, name: str) -> ModelCard:
    model = server.model
    permission = ModelPermission(f"modelperm-{name}", server.started)
    return ModelCard(name, server.started, model.model, model.max_model_len, [permission])


async def create_completion(request: Request) -> EventStream | Json:
    """POST /v1/completions"""
    server = _server(request)
    body, call = await _begin(request, CompletionRequest, "cmpl")
    generation = await start_completion(server, body, call.response_id)
    answer = CompletionAnswer(call, body, generation, server.tokenizer)
    return await send_answer(request, generation, answer, stream=bool(body.stream))


async def create_chat_completion(request: Request) -> EventStream | Json:
    """POST /v1/chat/completions"""
    server = _server(request)
    body, call = await _begin(request, ChatCompletionRequest, "chatcmpl")
    generation = await start_chat(server, body, call.response_id)
    role, prefix = _role_and_prefix(body, server.args.response_role)
    answer = ChatAnswer(call, body, generation, server.tokenizer, role, prefix)
    return await send_answer(request, generation, answer, stream=bool(body.stream))


async def tokenize(request: Request) -> Json:
    """POST /tokenize"""
    server = _server(request)
    fields = await read_object(request, _server(request).max_body_bytes)
    refuse_unsupported(fields)
    body = convert(fields, TokenizeRequest)
    served_name(body.model, server.model)
    if (body.prompt is None) == (body.messages is None):
        raise ClientError("send either prompt or messages.", param="prompt")
    if body.messages is not None:
        check_messages(body.messages)
        check_turn(body.add_generation_prompt, body.continue_final_message)
        token_ids = (await server.prompts.chat(body))["prompt_token_ids"]
    else:
        token_ids = await server.prompts.encode(body.prompt or "", body.add_special_tokens is not False)
    answer = TokenizeResponse(len(token_ids), server.model.max_model_len, token_ids)
    if body.return_token_strs:
        answer.token_strs = server.engine.tokenizer.convert_ids_to_tokens(token_ids)
    return Json(answer)


async def detokenize(request: Request) -> Json:
    """POST /detokenize"""
    server = _server(request)
    body = convert(await read_object(request, _server(request).max_body_bytes), DetokenizeRequest)
    served_name(body.model, server.model)
    return Json(DetokenizeResponse(await server.prompts.decode(body.tokens)))


# The field by which a body of /invocations shows its kind -> the route it is for.
_BY_FIELD = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "text_1": "/score",
    "query": "/rerank",
}


async def invoke(request: Request) -> EventStream | Json:
    """POST /invocations, SageMaker's one route: what a body is for shows in its fields."""
    fields = await read_object(request, _server(request).max_body_bytes)
    path = next((path for field, path in _BY_FIELD.items() if field in fields), None)
    if path is None:
        raise ClientError(f"the body must have one of the fields {', '.join(_BY_FIELD)}.")
    return await next(route for route in request.app.routes if route.path == path).endpoint(request)


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/invocations", invoke, methods=["POST"]),
]


def _server(request: Request) -> ServerContext:
    return request.app.context


async def _begin(request: Request, kind: type[R], prefix: str) -> tuple[R, Call]:
    """Read the body and settle what does not depend on the prompt."""
    server = _server(request)
    fields = await read_object(request, _server(request).max_body_bytes)
    refuse_unsupported(fields, known=kind.__struct_fields__)
    body = convert(fields, kind)
    return body, Call.of(prefix, body, request.state.request_id, server.model, server.args)


def _role_and_prefix(body: ChatCompletionRequest, response_role: str) -> tuple[str, str]:
    """Who speaks, and with `echo` the text of the last message when it is the same speaker's."""
    last = body.messages[-1]
    role = str(last.get("role")) if body.continue_final_message else response_role
    content = last.get("content")
    return role, content if body.echo and last.get("role") == role and isinstance(content, str) else ""
