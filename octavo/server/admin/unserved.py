"""Routes that clients of other servers know and this one does not have: each says so, and what serves instead."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server.errors import HttpError

_SCALE_OUT = "/inference/v1/generate and the render routes need --enable-scale-out"
_UNSERVED = {
    "/v1/chat/completions/batch": "send each conversation by itself, or use octavo run-batch",
    "/v1/chat/completions/derender": "read the tokens of /inference/v1/generate with output_mode text",
    "/v1/completions/derender": "read the tokens of /inference/v1/generate with output_mode text",
    "/v1/messages/render": "render the conversation by /v1/chat/completions/render",
    "/v1/responses/render": "render the conversation by /v1/chat/completions/render",
    "/v1/chat/completions/render": _SCALE_OUT,
    "/v1/completions/render": _SCALE_OUT,
    "/inference/v1/generate": _SCALE_OUT,
    "/inference/v1/abort_requests": "close the connection of a request to end it",
    "/abort_requests": "close the connection of a request to end it",
    "/cohere/v2/chat": "use /v1/chat/completions",
    "/cohere/v2/chat/render": "use /v1/chat/completions/render",
    "/generative_scoring": "use /v1/completions with max_tokens 1, allowed_token_ids and logprobs",
    "/v1/systemone": "use /v1/chat/completions with structured_outputs.choice and logprobs",
    "/tokenizer_info": "use /tokenize and /v1/models",
}


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise HttpError(501, f"this server has no {path}: {_UNSERVED[path]}.", code="route_not_served")


# Behind all others: those that an option mounts come first.
ROUTES = [Route(path, _refuse, methods=["GET", "POST"]) for path in _UNSERVED]
