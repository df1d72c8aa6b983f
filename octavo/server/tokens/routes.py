"""POST /inference/v1/generate, and …/render of the routes whose prompts it takes. Mounted with `enable_scale_out`.

A fleet renders in one place, generates in another, and reads what came in a third; here is each step by itself.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar, cast

from starlette.requests import Request
from starlette.routing import Route

from octavo.server.answers import EventStream, Json, sse
from octavo.server.context import ServerContext
from octavo.server.generation import ChoiceUpdate, Generation
from octavo.server.json_body import convert, read_object
from octavo.server.limits import check_extra_args, check_size
from octavo.server.openai.call import served_name
from octavo.server.openai.logprobs import LogprobWriter, prompt_logprobs
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    refuse_unsupported,
)
from octavo.server.openai.responses import ChatLogprobs, usage_of
from octavo.server.openai.serving import send_answer, start_chat, start_completion
from octavo.server.text_machine import PlainText
from octavo.server.tokens.protocol import (
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    RenderedRequest,
    rendered_params,
)
from octavo.types.prompts import TokensPrompt

Body = TypeVar("Body", bound=GenerationRequest)
Updates = AsyncGenerator[ChoiceUpdate, None]


async def generate(request: Request) -> EventStream | Json:
    """POST /inference/v1/generate"""
    server: ServerContext = request.app.context
    body = convert(await read_object(request, server.max_body_bytes), GenerateRequest)
    body.check()
    server.prompts.check_ids(body.token_ids, "token_ids")
    params = body.params(server.model.default_sampling_params)
    check_size(params, 1, len(body.token_ids), server.model.max_model_len)
    check_extra_args(params.extra_args)
    prompt = TokensPrompt(prompt_token_ids=body.token_ids)
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    generation = Generation(
        server.engine,
        [prompt],
        params,
        request_id=body.request_id or f"generate-{request.state.request_id}",
        priority=body.priority or 0,
        make_machine=PlainText,
    )
    answer = _Answer(body, served_name(body.model, server.model), generation, server)
    return await send_answer(request, generation, answer, stream=bool(body.stream))


class _Answer:
    """Writes one call."""

    def __init__(self, body: GenerateRequest, model: str, generation: Generation, server: ServerContext):
        self.body = body
        self.model = model
        self.generation = generation
        self._usage_details = server.args.enable_prompt_tokens_details
        self._writer = LogprobWriter(server.tokenizer if body.wants_text else None, as_ids=not body.wants_text)

    async def chunks(self, updates: Updates) -> AsyncGenerator[bytes, None]:
        async with aclosing(updates):
            async for update in updates:
                yield sse(self._response([self._choice(update)]))
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            last = self._response([])
            last.usage = usage_of(self.generation.usage, self._usage_details)
            yield sse(last)

    async def whole(self, updates: Updates) -> GenerateResponse:
        """One update a choice: the engine is asked for whole answers."""
        response = self._response([])
        async with aclosing(updates):
            async for update in updates:
                response.choices.append(self._choice(update))
                if update.request.prompt_logprobs:
                    response.prompt_logprobs = prompt_logprobs(update.request.prompt_logprobs)
        response.choices.sort(key=lambda choice: choice.index)
        response.usage = usage_of(self.generation.usage, self._usage_details)
        return response

    def _response(self, choices: list[GenerateChoice]) -> GenerateResponse:
        mode = self.body.output_mode or "tokens"
        return GenerateResponse(self.generation.request_id, self.model, choices, mode)

    def _choice(self, update: ChoiceUpdate) -> GenerateChoice:
        completion, k = update.completion, self.generation.params.logprobs
        choice = GenerateChoice(update.choice, completion.token_ids, update.finish_reason, completion.stop_reason)
        if k is not None:
            choice.logprobs = ChatLogprobs(self._writer.chat(completion.token_ids, completion.logprobs or [], k))
        if self.body.wants_text:
            choice.text = update.text
        return choice


async def render_chat(request: Request) -> Json:
    """POST /v1/chat/completions/render: what the conversation is as a body of /inference/v1/generate."""
    server: ServerContext = request.app.context
    body = await _read(request, ChatCompletionRequest)
    generation = await start_chat(server, body, body.request_id or f"generate-{request.state.request_id}")
    return Json(_rendered(server, body, generation)[0])


async def render_completion(request: Request) -> Json:
    """POST /v1/completions/render: the same of each prompt, in order."""
    server: ServerContext = request.app.context
    body = await _read(request, CompletionRequest)
    generation = await start_completion(server, body, body.request_id or f"generate-{request.state.request_id}")
    return Json(_rendered(server, body, generation))


ROUTES = [
    Route("/inference/v1/generate", generate, methods=["POST"]),
    Route("/v1/chat/completions/render", render_chat, methods=["POST"]),
    Route("/v1/completions/render", render_completion, methods=["POST"]),
]


async def _read(request: Request, kind: type[Body]) -> Body:
    fields = await read_object(request, request.app.context.max_body_bytes)
    refuse_unsupported({"use_beam_search": fields.get("use_beam_search")}, {"use_beam_search": (False,)})
    refuse_unsupported(fields)
    return convert(fields, kind)


def _rendered(server: ServerContext, body: GenerationRequest, generation: Generation) -> list[RenderedRequest]:
    """A generation that is not run, as requests to run somewhere: one for each prompt."""
    params, count = rendered_params(generation.params), len(generation.prompts)
    return [
        RenderedRequest(
            request_id=generation.request_id if count == 1 else f"{generation.request_id}-{index}",
            model=served_name(body.model, server.model),
            token_ids=cast(TokensPrompt, prompt)["prompt_token_ids"],  # embeddings are refused here
            sampling_params=params,
            stream=bool(body.stream),
            stream_options=body.stream_options,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
        )
        for index, prompt in enumerate(generation.prompts)
    ]
