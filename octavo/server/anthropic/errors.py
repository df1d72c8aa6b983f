"""Errors in Anthropic's shape, for every error of its routes, wherever it was raised."""

import msgspec

from octavo.server.errors import Problem

PREFIX = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorDetail(msgspec.Struct):
    type: str
    message: str


class ErrorBody(msgspec.Struct, tag="error", tag_field="type"):
    error: ErrorDetail


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def encode_problem(found: Problem, path: str) -> bytes:
    """The body of an error in the shape of the API that `path` belongs to."""
    if not is_anthropic(path):
        return found.encode()
    kind = _TYPES.get(found.status, "invalid_request_error" if found.status < 500 else "api_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(kind, found.body.error.message)))
