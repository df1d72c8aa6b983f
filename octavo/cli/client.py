"""What `octavo chat` and `octavo complete` share: a small HTTP client of the OpenAI API, standard library only."""

import json
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from octavo import envs
from octavo.config.options import check_options, option
from octavo.errors import ClientError, OctavoError

_GROUP = "Client"
TIMEOUT_SECONDS = 600.0


class ServerUnreachableError(OctavoError):
    """The server at the URL does not answer, or not as one of ours would."""


@dataclass(kw_only=True)
class ClientArgs:
    """Options of both clients."""

    url: str = option("http://localhost:8000/v1", "The server's address, up to and with /v1.", group=_GROUP)
    model_name: str | None = option(None, "Model to ask. Default: the first one served.", group=_GROUP)
    api_key: str | None = option(None, "Key to send. Default: OCTAVO_API_KEY.", group=_GROUP)
    quick: str | None = option(None, "Send this one text, print the answer and end.", group=_GROUP, short="-q")
    max_tokens: int | None = option(None, "Most tokens of an answer. Default: the server's.", group=_GROUP, low=1)
    temperature: float | None = option(
        None, "Sampling temperature; 0 is greedy. Default: the server's.", group=_GROUP, low=0, high=2
    )
    stats: bool = option(False, "Tell tokens and speed after each answer.", group=_GROUP)

    def __post_init__(self) -> None:
        check_options(self)

    def sampling(self) -> dict[str, Any]:
        """The sampling fields of a request body, those that were given."""
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {key: value for key, value in given.items() if value is not None}


@dataclass
class Answer:
    """One streamed answer, filled as it arrives."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_to_first: float | None = None

    def summary(self) -> str:
        """Tokens and speed in one line."""
        tokens = self.usage.get("completion_tokens", 0)
        first = self.seconds_to_first or 0.0
        decode = self.seconds - first
        speed = f", {(tokens - 1) / decode:.1f} tokens/s" if tokens > 1 and decode > 0 else ""
        prompt = self.usage.get("prompt_tokens", 0)
        return f"[{prompt} prompt tokens, {tokens} generated, first after {first:.2f} s{speed}]"


class Client:
    """Speaks to one server. Errors the server reports are raised with its own words."""

    def __init__(self, args: ClientArgs):
        parts = urlsplit(args.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"--url {args.url} is not an http or https address.", param="url")
        self._url = args.url
        self._parts = parts
        key = args.api_key or envs.OCTAVO_API_KEY
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.model = args.model_name or self._first_model()

    def stream(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post `body` and yield the chunks of the event stream until its end."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}} | body
        response = self._request("POST", route, json.dumps(body).encode())
        try:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerUnreachableError(f"the server broke off: {_message(chunk)}")
                yield chunk
        except (OSError, HTTPException, ValueError) as error:
            raise ServerUnreachableError(f"the connection to {self._url} broke: {error!r}") from None
        finally:
            response.close()
        raise ServerUnreachableError(f"{self._url} ended the stream before the answer was complete.")

    def print_stream(self, route: str, body: dict[str, Any], pick: Any) -> Answer:
        """Stream an answer to standard output; `pick(choice)` is the new text of a chunk's choice."""
        answer, started = Answer(), time.monotonic()
        for chunk in self.stream(route, body):
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk.get("choices", ()):
                text = pick(choice)
                if text:
                    if answer.seconds_to_first is None:
                        answer.seconds_to_first = time.monotonic() - started
                    answer.text += text
                    print(text, end="", flush=True)
        answer.seconds = time.monotonic() - started
        print()
        return answer

    def _first_model(self) -> str:
        models = json.loads(self._request("GET", "/models").read()).get("data") or []
        if not models:
            raise ServerUnreachableError(f"{self._url} serves no model.")
        return str(models[0]["id"])

    def _request(self, method: str, route: str, body: bytes | None = None) -> HTTPResponse:
        connection = self._connect()
        try:
            connection.request(method, self._parts.path.rstrip("/") + route, body, self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise ServerUnreachableError(
                f"no server answers at {self._url} ({error}); start one with `octavo serve`, or give --url."
            ) from None
        if response.status != 200:
            text = response.read()
            try:
                message = _message(json.loads(text))
            except ValueError:
                message = text.decode(errors="replace")[:200]
            raise ServerUnreachableError(f"{self._url}{route} answers {response.status}: {message}")
        return response

    def _connect(self) -> HTTPConnection:
        host = self._parts.hostname or ""
        if self._parts.scheme == "https":
            return HTTPSConnection(
                host, self._parts.port, timeout=TIMEOUT_SECONDS, context=ssl.create_default_context()
            )
        return HTTPConnection(host, self._parts.port, timeout=TIMEOUT_SECONDS)


def _message(content: Any) -> str:
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)


def read_lines(prompt: str) -> Iterator[str]:
    """Lines a user types, until end of file; with a prompt on a terminal only."""
    while True:
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
