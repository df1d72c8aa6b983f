"""From a checked body to its generation, and from there to an answer: what every API that generates shares.

The Anthropic and Responses routes bring their bodies into the form of a chat completion and go the same way, so a
conversation means the same prompt and the same parameters whichever API it came by.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

from starlette.requests import Request

from octavo.errors import ServerError
from octavo.server.answers import OPENAI_STREAM, EventStream, Json, StreamStyle, run_while_connected
from octavo.server.context import ServerContext
from octavo.server.generation import BeamGeneration, ChoiceUpdate, Generation
from octavo.server.limits import check_extra_args, check_size
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from octavo.server.text_machine import PlainText, TextMachine
from octavo.types.prompts import EmbedsPrompt, TokensPrompt
from octavo.types.sampling_params import SamplingParams

Updates = AsyncGenerator[ChoiceUpdate, None]


class Answer(Protocol):
    """Writes one call's updates, streamed or whole."""

    def chunks(self, updates: Updates) -> AsyncGenerator[bytes, None]: ...

    async def whole(self, updates: Updates) -> Any: ...


async def start_completion(server: ServerContext, body: CompletionRequest, request_id: str) -> Generation:
    """The generation of a completions body; nothing runs until its updates are read."""
    params = body.sampling_params(server.model.default_sampling_params, server.model.max_logprobs)
    prompts = await server.prompts.completion(body)
    return _generation(server, body, request_id, prompts, params)


async def start_chat(server: ServerContext, body: ChatCompletionRequest, request_id: str) -> Generation:
    """The generation of a conversation; nothing runs until its updates are read."""
    params = body.sampling_params(server.model.default_sampling_params, server.model.max_logprobs)
    prompt = await server.prompts.chat(body, body.cache_salt)
    reading = server.formats.read(body, prompt["prompt"] or "", server.prompts.variables(body))
    reading.adjust(params)
    return _generation(server, body, request_id, [prompt], params, reading.make_machine)


def _generation(
    server: ServerContext,
    body: GenerationRequest,
    request_id: str,
    prompts: Sequence[TokensPrompt | EmbedsPrompt],
    params: SamplingParams,
    make_machine: Callable[[], TextMachine] = PlainText,
) -> Generation:
    # Embeddings do not count: no scores are given for them.
    num_prompt_tokens = sum(len(cast(dict[str, Any], prompt).get("prompt_token_ids", ())) for prompt in prompts)
    check_size(params, len(prompts), num_prompt_tokens, server.model.max_model_len)
    check_extra_args(params.extra_args)
    if server.tokenizer is None:
        params.detokenize = False
    common: dict[str, Any] = {
        "request_id": request_id,
        "priority": body.priority or 0,
        "make_machine": make_machine,
    }
    beam_params = body.beam_search_params(server.model.default_sampling_params, server.model.max_model_len)
    if beam_params is not None:
        return BeamGeneration(server.engine, prompts, params, beam_params=beam_params, **common)
    return Generation(server.engine, prompts, params, **common)


async def send_answer(
    request: Request, generation: Generation, answer: Answer, *, stream: bool, style: StreamStyle = OPENAI_STREAM
) -> EventStream | Json:
    """Stream the updates or fold them, and give up when the client does."""
    server: ServerContext = request.app.context
    updates, interval = generation.updates(), server.args.sse_keep_alive_interval
    if not stream:
        return Json(await run_while_connected(request.receive, server.activity, answer.whole(updates)))
    try:
        primed = await run_while_connected(request.receive, server.activity, _primed(updates, interval))
    except BaseException:
        await updates.aclose()  # the first update may have come at the same moment
        raise
    return EventStream(answer.chunks(primed), server.activity, style, interval)


async def _primed(updates: Updates, patience: float) -> Updates:
    """Wait for the first update, so that a mistake only the engine sees still gets its own status.

    A fault of ours is left to the stream: it becomes an event there, as it would one token later. So does everything
    once `patience` seconds (0: for ever) have passed, and the stream begins with signs of life.
    """
    first = asyncio.ensure_future(anext(updates, None))
    try:
        done, _ = await asyncio.wait({first}, timeout=patience or None)
    except asyncio.CancelledError:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    if done and not isinstance(first.exception(), ServerError | None):
        await first

    async def resumed() -> Updates:
        async with aclosing(updates):
            if (update := await first) is not None:
                yield update
            async for update in updates:
                yield update

    return resumed()
