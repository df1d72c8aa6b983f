"""GET /openapi.json and GET /docs: the routes and their bodies, from the very types that check and write them.

The page is one self-contained file: it loads nothing from elsewhere.
"""

from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from octavo import __version__
from octavo.server.answers import Json
from octavo.server.anthropic import protocol as messages
from octavo.server.openai import protocol, responses
from octavo.server.pooling import protocol as pooling
from octavo.server.responses import protocol as items

# (method, path, sentence, request body, answer)
_ROUTES: tuple[tuple[str, str, str, type | None, type | None], ...] = (
    (
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        protocol.ChatCompletionRequest,
        responses.ChatCompletion,
    ),
    ("post", "/v1/completions", "Continue a text.", protocol.CompletionRequest, responses.Completion),
    ("post", "/v1/responses", "Answer a conversation of items.", items.ResponsesRequest, items.Response),
    ("post", "/v1/messages", "Answer a conversation (Anthropic).", messages.MessagesRequest, messages.Message),
    (
        "post",
        "/v1/messages/count_tokens",
        "Count a conversation's tokens.",
        messages.CountTokensRequest,
        messages.TokenCount,
    ),
    ("post", "/v1/embeddings", "Vectors of texts.", pooling.EmbeddingRequest, pooling.PoolingList[pooling.Embedding]),
    ("post", "/v2/embed", "Vectors of texts (Cohere).", pooling.CohereEmbedRequest, pooling.CohereEmbedResponse),
    (
        "post",
        "/pooling",
        "Rows of numbers.",
        pooling.PoolingRequest,
        pooling.PoolingList[pooling.PoolingItem],
    ),
    ("post", "/classify", "Classes of texts.", pooling.ClassifyRequest, pooling.PoolingList[pooling.Classification]),
    ("post", "/v1/score", "How well two texts go together.", pooling.ScoreRequest, pooling.PoolingList[pooling.Score]),
    ("post", "/v1/rerank", "Documents by how well they answer.", pooling.RerankRequest, pooling.RerankResponse),
    ("get", "/v1/models", "Names of the model.", None, responses.ModelList),
    ("post", "/tokenize", "Text or conversation to token ids.", protocol.TokenizeRequest, responses.TokenizeResponse),
    ("post", "/detokenize", "Token ids to text.", protocol.DetokenizeRequest, responses.DetokenizeResponse),
    ("get", "/health", "200 while the engine computes, 503 while it is restarted, sleeps or is gone.", None, None),
    ("get", "/health/live", "200 unless the engine is gone for good.", None, None),
    ("get", "/health/ready", "The same as /health.", None, None),
    ("get", "/version", "Version of the server.", None, responses.VersionResponse),
    ("get", "/metrics", "Prometheus metrics.", None, None),
)


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 description."""
    bodies = [kind for row in _ROUTES for kind in row[3:] if kind is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Any] = {}
    for method, path, sentence, request, answer in _ROUTES:
        operation: dict[str, Any] = {"summary": sentence, "responses": {"200": {"description": "Success"}}}
        if request is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": by_type[request]}}}
        if answer is not None:
            operation["responses"]["200"]["content"] = {"application/json": {"schema": by_type[answer]}}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


async def openapi_json(request: Request) -> Json:
    """GET /openapi.json"""
    return Json(openapi())


async def docs_page(request: Request) -> HTMLResponse:
    """GET /docs"""
    sections = []
    for method, path, sentence, body, _ in _ROUTES:
        fields = (
            ", ".join(f"<code>{escape(f.encode_name)}</code>" for f in msgspec.structs.fields(body)) if body else "–"
        )
        sections.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(sentence)}</p><p>Fields: {fields}</p>")
    style = "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    return HTMLResponse(
        f"<!doctype html><title>Octavo</title><style>{style}</style><h1>Octavo {__version__}</h1>"
        f"<p>Machine-readable: <a href='openapi.json'>openapi.json</a></p>{''.join(sections)}"
    )


def docs_routes() -> list[Route]:
    return [Route("/openapi.json", openapi_json, methods=["GET"]), Route("/docs", docs_page, methods=["GET"])]
