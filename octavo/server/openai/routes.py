"""The OpenAI routes: validate, make prompts, generate, write. What goes wrong is raised, and answered elsewhere."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.routing import Route

from octavo.errors import ClientError, ServerError
from octavo.server.answers import EventStream, Json, run_while_connected
from octavo.server.context import ServerContext
from octavo.server.generation import BeamGeneration, ChoiceUpdate, Generation
from octavo.server.json_body import convert, read_object
from octavo.server.limits import check_extra_args, check_size
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
from octavo.server.text_machine import PlainText
from octavo.types.prompts import TokensPrompt
from octavo.types.sampling_params import SamplingParams

R = TypeVar("R", bound=GenerationRequest)

Updates = AsyncGenerator[ChoiceUpdate, None]


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
    params = body.sampling_params(server.model.default_sampling_params, server.model.max_logprobs)
    prompts = await server.prompts.completion(body)
    generation = _generate(server, body, call, prompts, params)
    answer = CompletionAnswer(call, body, generation, server.tokenizer)
    return await _answer(request, body, generation, answer.chunks, answer.whole)


async def create_chat_completion(request: Request) -> EventStream | Json:
    """POST /v1/chat/completions"""
    server = _server(request)
    body, call = await _begin(request, ChatCompletionRequest, "chatcmpl")
    params = body.sampling_params(server.model.default_sampling_params, server.model.max_logprobs)
    prompt = await server.prompts.chat(body, body.cache_salt)
    generation = _generate(server, body, call, [prompt], params)
    role, prefix = _role_and_prefix(body, server.args.response_role)
    answer = ChatAnswer(call, body, generation, server.tokenizer, role, prefix)
    return await _answer(request, body, generation, answer.chunks, answer.whole)


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


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]


def _server(request: Request) -> ServerContext:
    return request.app.context


async def _begin(request: Request, kind: type[R], prefix: str) -> tuple[R, Call]:
    """Read the body and settle what does not depend on the prompt."""
    server = _server(request)
    fields = await read_object(request, _server(request).max_body_bytes)
    refuse_unsupported(fields)
    body = convert(fields, kind)
    return body, Call.of(prefix, body, request.state.request_id, server.model, server.args)


def _generate(
    server: ServerContext,
    body: GenerationRequest,
    call: Call,
    prompts: Sequence[TokensPrompt],
    params: SamplingParams,
) -> Generation:
    num_prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    check_size(params, len(prompts), num_prompt_tokens, server.model.max_model_len)
    check_extra_args(params.extra_args)
    if server.tokenizer is None:
        params.detokenize = False
    common: dict[str, Any] = {
        "request_id": call.response_id,
        "priority": body.priority or 0,
        "make_machine": PlainText,
    }
    beam_params = body.beam_search_params(server.model.default_sampling_params, server.model.max_model_len)
    if beam_params is not None:
        return BeamGeneration(server.engine, prompts, params, beam_params=beam_params, **common)
    return Generation(server.engine, prompts, params, **common)


async def _answer(
    request: Request,
    body: GenerationRequest,
    generation: Generation,
    chunks: Callable[[Updates], AsyncGenerator[bytes, None]],
    whole: Callable[[Updates], Coroutine[Any, Any, Any]],
) -> EventStream | Json:
    """Stream the updates or fold them, and give up when the client does."""
    activity = _server(request).activity
    updates = generation.updates()
    if not body.stream:
        return Json(await run_while_connected(request.receive, activity, whole(updates)))
    updates = await run_while_connected(request.receive, activity, _primed(updates))
    return EventStream(chunks(updates), activity)


async def _primed(updates: Updates) -> Updates:
    """Wait for the first update, so that a mistake only the engine sees still gets its own status.

    A fault of ours is left to the stream: it becomes an event there, as it would one token later.
    """
    failure: ServerError | None = None
    first: ChoiceUpdate | None = None
    try:
        first = await anext(updates, None)
    except ServerError as error:
        failure = error

    async def resumed() -> Updates:
        async with aclosing(updates):
            if failure is not None:
                raise failure
            if first is not None:
                yield first
            async for update in updates:
                yield update

    return resumed()


def _role_and_prefix(body: ChatCompletionRequest, response_role: str) -> tuple[str, str]:
    """Who speaks, and with `echo` the text of the last message when it is the same speaker's."""
    last = body.messages[-1]
    role = str(last.get("role")) if body.continue_final_message else response_role
    content = last.get("content")
    return role, content if body.echo and last.get("role") == role and isinstance(content, str) else ""
