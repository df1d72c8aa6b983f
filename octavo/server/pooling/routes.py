"""The routes of models that make vectors, classes and scores; for models that make text they say so."""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.routing import Route

from octavo.engine.scoring import make_score_plan
from octavo.errors import ClientError, RequestFailedError
from octavo.server.answers import Json, run_while_connected
from octavo.server.context import ServerContext
from octavo.server.json_body import convert, read_object
from octavo.server.openai.call import served_name
from octavo.server.openai.protocol import ChatCompletionRequest, refuse_unsupported
from octavo.server.pooling.protocol import (
    INPUT_TYPES,
    MAX_INPUTS,
    NOT_YET,
    Classification,
    ClassifyRequest,
    CohereEmbedRequest,
    CohereEmbedResponse,
    Embedding,
    EmbeddingRequest,
    InputBody,
    PoolingBody,
    PoolingItem,
    PoolingList,
    PoolingRequest,
    PoolingUsage,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
)
from octavo.server.prompts import split_prompts
from octavo.types.pooling_outputs import PoolingOutput, PoolingRequestOutput
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PairPrompt, PromptType, TokensPrompt

B = TypeVar("B", bound=msgspec.Struct)
Outputs = list[PoolingRequestOutput[PoolingOutput]]


async def create_embeddings(request: Request) -> Json:
    """POST /v1/embeddings"""
    server, body = await _read(request, EmbeddingRequest)
    params = body.params("embed", dimensions=body.dimensions, prompt_name=body.prompt_name)
    outputs = await _run_inputs(request, server, body, params, "embd")
    data = [
        Embedding(index=i, embedding=_encoded(output.outputs.data, body.encoding_format))
        for i, output in enumerate(outputs)
    ]
    return _listed(request, server, body, "embd", data, outputs)


async def pool(request: Request) -> Json:
    """POST /pooling"""
    server, body = await _read(request, PoolingRequest)
    params = body.params(
        body.task,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        step_tag_id=body.step_tag_id,
        returned_token_ids=body.returned_token_ids,
    )
    outputs = await _run_inputs(request, server, body, params, "pooling")
    data = [
        PoolingItem(index=i, data=_encoded(output.outputs.data, body.encoding_format))
        for i, output in enumerate(outputs)
    ]
    return _listed(request, server, body, "pooling", data, outputs)


async def classify(request: Request) -> Json:
    """POST /classify"""
    server, body = await _read(request, ClassifyRequest)
    outputs = await _run_inputs(request, server, body, body.params("classify"), "classify")
    labels = server.pooling.labels
    data = []
    for i, output in enumerate(outputs):
        probs = output.outputs.data
        data.append(
            Classification(index=i, label=labels[int(probs.argmax())], probs=probs.tolist(), num_classes=len(probs))
        )
    return _listed(request, server, body, "classify", data, outputs)


async def score(request: Request) -> Json:
    """POST /score"""
    server, body = await _read(request, ScoreRequest)
    first, second = body.sides()
    scores, outputs = await _score(request, server, body, first, second, "score")
    data = [Score(index=i, score=value) for i, value in enumerate(scores)]
    return _listed(request, server, body, "score", data, outputs)


async def rerank(request: Request) -> Json:
    """POST /rerank"""
    server, body = await _read(request, RerankRequest)
    body.check()
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise ClientError(f"documents holds {len(texts)} texts; 1 to {MAX_INPUTS} are possible.", param="documents")
    scores, outputs = await _score(request, server, body, [body.query], texts, "score")
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    shown = body.return_documents is not False
    results = [
        RerankResult(index=i, document=RerankDocument(texts[i]) if shown else None, relevance_score=scores[i])
        for i in order
    ]
    return Json(
        RerankResponse(
            id=_response_id(request, body, "score"),
            model=served_name(body.model, server.model),
            results=results,
            usage=_usage(outputs),
        )
    )


async def cohere_embed(request: Request) -> Json:
    """POST /v2/embed"""
    server, body = await _read(request, CohereEmbedRequest)
    body.check()
    served_name(body.model, server.model)
    texts = split_prompts(body.texts, "texts", MAX_INPUTS)
    truncate = None if body.truncate == "NONE" else -1
    names = INPUT_TYPES.get(body.input_type or "", ())
    params = PoolingParams(
        task="embed",
        dimensions=body.output_dimension,
        truncate_prompt_tokens=body.max_tokens or truncate,
        prompt_name=next((name for name in names if name in server.pooling.prompts), None),
    )
    response_id = f"embd-{request.state.request_id}"
    work = _run(server, cast(list[PromptType], texts), params, response_id, body.priority, True)
    outputs = await run_while_connected(request.receive, server.activity, work)
    vectors = [output.outputs.data for output in outputs]
    kinds = body.embedding_types or ["float"]
    num_tokens = _usage(outputs).prompt_tokens
    return Json(
        CohereEmbedResponse(
            id=response_id,
            embeddings={kind: [_cohere_vector(vector, kind) for vector in vectors] for kind in kinds},
            texts=body.texts,
            meta={"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
        )
    )


async def _read(request: Request, kind: type[B]) -> tuple["_Server", B]:
    context: ServerContext = request.app.context
    fields = await read_object(request, context.max_body_bytes)
    refuse_unsupported(fields, NOT_YET)
    return _Server(context), convert(fields, kind)


class _Server:
    """The server's context, of a model that pools."""

    def __init__(self, context: ServerContext):
        pooling = context.engine.config.pooling
        assert pooling is not None
        self.pooling = pooling
        self.engine, self.activity, self.prompts = context.engine, context.activity, context.prompts
        self.model, self.args, self.tokenizer = context.model, context.args, context.tokenizer


async def _run_inputs(
    request: Request, server: _Server, body: InputBody, params: PoolingParams, prefix: str
) -> Outputs:
    """The engine's answers to the body's inputs, in their order."""
    body.check()
    served_name(body.model, server.model)
    if body.messages is not None:
        chat = convert({name: getattr(body, name) for name in _CHAT_FIELDS}, ChatCompletionRequest)
        chat.add_generation_prompt = bool(body.add_generation_prompt)
        prompts: list[Any] = [await server.prompts.chat(chat)]
    else:
        prompts = []
        for item in split_prompts(body.input, "input", MAX_INPUTS):
            if isinstance(item, str):
                if params.truncate_prompt_tokens is None:
                    server.prompts.check_length(len(item))
                prompts.append(item)
            else:
                server.prompts.check_ids(item, "input")
                prompts.append(TokensPrompt(prompt_token_ids=item))
    add_special_tokens = body.add_special_tokens is not False
    work = _run(server, prompts, params, _response_id(request, body, prefix), body.priority, add_special_tokens)
    return await run_while_connected(request.receive, server.activity, work)


_CHAT_FIELDS = ("messages", "chat_template", "chat_template_kwargs", "continue_final_message", "add_special_tokens")


async def _score(
    request: Request,
    server: _Server,
    body: ScoreRequest | RerankRequest,
    first: list[str],
    second: list[str],
    prefix: str,
) -> tuple[list[float], Outputs]:
    served_name(body.model, server.model)
    if body.truncate_prompt_tokens is None:
        for text in (*first, *second):
            server.prompts.check_length(len(text))
    variables = dict(body.chat_template_kwargs or {})
    if body.instruction is not None:
        variables["instruction"] = body.instruction
    template = server.engine.config.tokenizer.chat_template
    plan = make_score_plan(server.pooling, server.tokenizer, first, second, chat_template=template, variables=variables)
    add_special_tokens = body.add_special_tokens is not False
    response_id = _response_id(request, body, prefix)
    work = _run(server, plan.prompts, body.params(plan.task), response_id, body.priority, add_special_tokens)
    outputs = await run_while_connected(request.receive, server.activity, work)
    return plan.scores([output.outputs.data for output in outputs]), outputs


async def _run(
    server: _Server,
    prompts: Sequence[PromptType | PairPrompt],
    params: PoolingParams,
    request_id: str,
    priority: int | None,
    add_special_tokens: bool,
) -> Outputs:
    """Run prompts at once; the first that fails ends the others."""

    async def one(index: int, prompt: PromptType | PairPrompt) -> PoolingRequestOutput[PoolingOutput]:
        found = server.engine.encode(
            prompt,
            params,
            request_id if len(prompts) == 1 else f"{request_id}-{index}",
            priority=priority or 0,
            tokenization_kwargs={"add_special_tokens": add_special_tokens},
        )
        async with aclosing(cast("AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]", found)) as answers:
            output = await anext(answers)
        if output.error is not None:
            raise RequestFailedError(output.error)
        return output

    tasks = [asyncio.ensure_future(one(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _encoded(values: np.ndarray, encoding_format: str | None) -> Any:
    """As JSON numbers, or as base64 of little-endian float32."""
    if encoding_format == "base64":
        return base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()
    return values.tolist()


def _cohere_vector(vector: np.ndarray, kind: str) -> Any:
    if kind in ("binary", "ubinary"):  # a bit a number: whether it is above 0, eight to a byte
        packed = np.packbits(vector > 0)
        return packed.tolist() if kind == "ubinary" else (packed.astype(np.int16) - 128).tolist()
    return _encoded(vector, kind)


def _usage(outputs: Outputs) -> PoolingUsage:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(num_tokens, num_tokens)


def _response_id(request: Request, body: PoolingBody, prefix: str) -> str:
    return f"{prefix}-{body.request_id or request.state.request_id}"


def _listed(
    request: Request, server: _Server, body: PoolingBody, prefix: str, data: list[Any], outputs: Outputs
) -> Json:
    return Json(
        PoolingList(
            id=_response_id(request, body, prefix),
            created=int(time.time()),
            model=served_name(body.model, server.model),
            data=data,
            usage=_usage(outputs),
        )
    )


ROUTES = [
    Route("/v1/embeddings", create_embeddings, methods=["POST"]),
    Route("/v2/embed", cohere_embed, methods=["POST"]),
    Route("/pooling", pool, methods=["POST"]),
    Route("/classify", classify, methods=["POST"]),
    *(Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")),
    *(Route(path, rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
]

Endpoint = Callable[[Request], Awaitable[Json]]


def refused(routes: Sequence[Route], reason: str) -> list[Route]:
    """The same routes, each of which answers that this model is not for it."""

    def refuse(path: str) -> Endpoint:
        async def answer(request: Request) -> Json:
            raise ClientError(f"{path} is not for this model: {reason}", param="model", code="unsupported_task")

        return answer

    return [Route(route.path, refuse(route.path), methods=["POST"]) for route in routes]
