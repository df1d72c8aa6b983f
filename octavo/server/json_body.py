"""JSON bodies, both ways: bounded and strict in, finite and compact out.

In: `application/json` only (a web page can post any other type to a loopback server without asking), at most
`max_bytes`, at most `MAX_DEPTH` levels deep, an object at the top, no NaN or Infinity, types as declared (2.5 and
true are not integers). Out: msgspec, which writes no NaN either.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.errors import ClientError
from octavo.logger import get_logger
from octavo.server.errors import HttpError

logger = get_logger(__name__)

MAX_DEPTH = 64

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
encode: Callable[[Any], bytes] = _encoder.encode

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read the body of `request` as a JSON object, or raise the 4xx that says what is wrong with it.

    The same again when it was read before: one route may hand a request on to another.
    """
    if hasattr(request.state, "fields"):
        return request.state.fields
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpError(415, f"the body must be sent with Content-Type: application/json, not {content_type!r}.")
    body = await _read(request, max_bytes)
    _check_depth(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _decode_error(body, error) from None
    if not isinstance(value, dict):
        raise ClientError('the body must be a JSON object, such as {"model": …}.')
    request.state.fields = value
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = HttpError(413, f"the body is larger than {max_bytes} bytes.", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientError("the body ended early.") from None
    return b"".join(chunks)


def _check_depth(body: bytes) -> None:
    """Refuse nesting that a recursive reader (ours, a template's, another process's) could not follow."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise ClientError(f"the body is nested more than {MAX_DEPTH} levels deep.")
        elif token in (b"]", b"}"):
            depth -= 1


def _decode_error(body: bytes, error: Exception) -> ClientError:
    """Name the field that holds NaN, Infinity or 1e400; everything else is plain bad JSON."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if isinstance(value, dict):
        for name, field in value.items():
            if isinstance(field, float) and not math.isfinite(field):
                return ClientError(f"{name} must be a finite number; JSON has no NaN and no Infinity.", param=name)
    return ClientError(f"the body is not valid JSON: {error}.")


def convert(fields: Mapping[str, Any], kind: type[T]) -> T:
    """Make the schema object `kind` from decoded fields; names the wrong field, logs unknown ones at debug level."""
    try:
        made = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    unknown = fields.keys() - {field.encode_name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    if unknown:
        logger.debug("ignoring unknown fields %s", sorted(unknown))
    return made


def _field_error(message: str) -> ClientError:
    missing = re.fullmatch(r"Object missing required field `(.+?)`(?: - at `\$\.?(.*)`)?", message, re.DOTALL)
    if missing:
        place = f"{missing[2]}.{missing[1]}" if missing[2] else missing[1]
        return ClientError(f"{place} is required.", param=place)
    place_match = _PLACE.search(message)
    if place_match is None or not place_match[1]:
        return ClientError(message + ".")
    what = message[: place_match.start()]
    place = place_match[1].replace("[...]", "")
    return ClientError(f"{place}: {what[0].lower()}{what[1:]}.", param=place)
