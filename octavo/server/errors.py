"""Every error an HTTP client can see, made in one place: exception in, status and OpenAI-shaped body out.

Routes raise; nobody else builds an error body. A `ClientError` keeps its own status, a dead engine is 503, everything
else is 500. An exception Octavo did not raise on purpose is logged with its trace and reaches the client without its
words, which may hold paths or addresses.
"""

import http
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException

from octavo.errors import ClientError, EngineAsleepError, EngineDeadError, EngineRestartingError, ServerError
from octavo.logger import get_logger

logger = get_logger(__name__)

MAX_MESSAGE = 2000  # characters of an error
RETRY_SECONDS = "1"  # what a refused client should wait: a queue that is full now is shorter in a second

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class HttpError(ClientError):
    """A mistake of the HTTP exchange itself (method, content type, size, key) rather than of a field."""

    def __init__(self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message, code=code)
        self.status = status
        self.headers = dict(headers or {})


class ShuttingDownError(ServerError):
    """The server is going away: it takes no new work, and what outlived the grace time ends."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class Problem(msgspec.Struct):
    """An error as it goes over the wire."""

    status: int
    body: ErrorBody
    headers: dict[str, str] = {}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body)


def problem(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Problem:
    """Build the error body of `status`; `code` equal to the type says nothing and is left null."""
    if len(message) > MAX_MESSAGE:  # it repeats what a client sent
        message = f"{message[:MAX_MESSAGE]}…"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return Problem(status, ErrorBody(ErrorDetail(message, kind, param, None if code == kind else code)))


def describe(error: BaseException) -> Problem:
    """What the client is told about `error`; unforeseen ones are logged here with their trace."""
    if isinstance(error, ClientError):
        found = problem(error.status, str(error), param=error.param, code=error.code)
        found.headers = dict(getattr(error, "headers", {}))
        if error.status == 429:
            found.headers.setdefault("retry-after", RETRY_SECONDS)
        return found
    if isinstance(error, HTTPException):
        found = problem(error.status_code, _http_message(error))
        found.headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        return found
    if isinstance(error, ShuttingDownError):
        found = problem(503, str(error), code="shutting_down")
        found.headers = {"retry-after": RETRY_SECONDS, "connection": "close"}
        return found
    if isinstance(error, EngineRestartingError):
        found = problem(503, str(error), code="engine_restarting")
        found.headers = {"retry-after": RETRY_SECONDS}
        return found
    if isinstance(error, EngineAsleepError):
        return problem(503, str(error), code="engine_asleep")
    if isinstance(error, EngineDeadError):
        return problem(503, str(error) or "the engine is not running.", code="engine_dead")
    if isinstance(error, ServerError):
        logger.error("request failed: %s", error)
        return problem(500, str(error), code="request_failed")
    logger.error("unexpected error while answering a request", exc_info=error)
    return problem(500, "internal server error; the server's log has the details.", code="internal_error")


def _http_message(error: HTTPException) -> str:
    if error.status_code == 404:
        return "there is no such route; GET /openapi.json lists the routes."
    if error.status_code == 405:
        return f"this route does not take that method; it takes {(error.headers or {}).get('Allow', 'another')}."
    return error.detail or http.HTTPStatus(error.status_code).phrase
