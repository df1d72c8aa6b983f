"""One request to an OpenAI-compatible server, with the time of each piece of its answer.

A backend says which route a request goes to, how its body looks and where an answer's text stands. Times are
`time.perf_counter()` at the moment the bytes were read.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.bench.datasets import Sample
from octavo.bench.http_client import HttpClient, HttpError, server_sent_events

REQUEST_SECONDS = 6 * 3600.0  # nothing a benchmark waits for takes longer
MAX_ERROR_CHARACTERS = 500


@dataclass(slots=True)
class RequestResult:
    """What one request brought. Times in seconds; `start` is on the `perf_counter` clock."""

    prompt_len: int
    start: float = 0.0
    success: bool = False
    latency: float | None = None  # to the last piece of the answer
    ttft: float | None = None  # to the first; None when the answer came in one
    itls: list[float] = field(default_factory=list)  # between neighbouring pieces
    output_len: int = 0
    text: str = ""
    error: str = ""


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def all_text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None

    def all_text(self) -> str:
        for message in (self.delta, self.message):
            if message is not None:
                return message.all_text()
        return self.text or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_read_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True)
class Backend:
    """An API to speak."""

    endpoint: str
    is_chat: bool

    def body(self, sample: Sample, model: str, stream: bool, options: Mapping[str, Any]) -> dict[str, Any]:
        """The request's JSON. `options` are laid over everything else."""
        body: dict[str, Any] = {"model": model}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
            body["max_completion_tokens"] = sample.output_len
        else:
            body["prompt"] = sample.prompt
            body["max_tokens"] = sample.output_len
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | dict(options)


_COMPLETIONS = Backend("/v1/completions", is_chat=False)
BACKENDS = {
    "openai": _COMPLETIONS,
    "vllm": _COMPLETIONS,
    "octavo": _COMPLETIONS,
    "openai-chat": Backend("/v1/chat/completions", is_chat=True),
}


async def send_request(
    client: HttpClient, path: str, body: Mapping[str, Any], prompt_len: int, headers: Mapping[str, str] | None = None
) -> RequestResult:
    """Send one request and follow its answer. Whatever goes wrong with it is in the result, not raised."""
    result = RequestResult(prompt_len)
    data = msgspec.json.encode(body)
    answer = _Answer(result)
    result.start = time.perf_counter()
    try:
        async with asyncio.timeout(REQUEST_SECONDS), client.request("POST", path, data, headers) as response:
            if response.status != 200:
                result.error = f"status {response.status}: {_message(await response.read())}"
            elif response.headers.get("content-type", "").startswith("text/event-stream"):
                await answer.follow_stream(response.pieces())
            else:
                answer.take_whole(await response.read())
    except TimeoutError:
        result.error = f"no end within {REQUEST_SECONDS:.0f} s"
    except (HttpError, OSError, msgspec.MsgspecError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.success = not result.error
    return result


class _Answer:
    """Fills a result from what arrives."""

    def __init__(self, result: RequestResult):
        self.result = result
        self._texts: list[str] = []
        self._last_piece: float | None = None  # when the last text came
        self._num_pieces = 0
        self._is_finished = False

    async def follow_stream(self, pieces: Any) -> None:
        """Read server-sent events until `[DONE]`."""
        async for data in server_sent_events(pieces):
            now = time.perf_counter()
            if data == b"[DONE]":
                self._is_finished = True
                continue  # the body is read to its end, so that the connection can be used again
            chunk = _read_chunk(data)
            if chunk.error is not None:
                self.result.error = f"in the stream: {_message(data)}"
                return
            self._note_usage(chunk.usage)
            for choice in chunk.choices or ():
                self._note_choice(choice, now)
        if not self._is_finished:
            self.result.error = "the stream ended before the answer did"
        elif self.result.latency is None:
            self.result.error = "the stream held no choice"
        self._close()

    def take_whole(self, data: bytes) -> None:
        """Read an answer that was not streamed: its first token's time is not known."""
        self.result.latency = time.perf_counter() - self.result.start
        chunk = _read_chunk(data)
        if chunk.error is not None or not chunk.choices:
            self.result.error = f"no choice in the answer: {_message(data)}"
            return
        self._note_usage(chunk.usage)
        self._texts += [choice.all_text() for choice in chunk.choices]
        self._close()

    def _note_choice(self, choice: _Choice, now: float) -> None:
        result = self.result
        text = choice.all_text()
        if text:  # a chat stream opens with the role and may close with a reason: no tokens in either
            self._num_pieces += 1
            self._texts.append(text)
            if self._last_piece is None:
                result.ttft = now - result.start
            else:
                result.itls.append(now - self._last_piece)
            self._last_piece = now
            result.latency = now - result.start
        elif choice.finish_reason is not None:
            # The end may tell of tokens without text (the end token); it is part of the answer's time.
            result.latency = now - result.start
            if result.ttft is None:
                result.ttft = result.latency

    def _note_usage(self, usage: _Usage | None) -> None:
        if usage is None:
            return
        self.result.output_len = usage.completion_tokens or self.result.output_len
        self.result.prompt_len = usage.prompt_tokens or self.result.prompt_len

    def _close(self) -> None:
        self.result.text = "".join(self._texts)
        # Without a usage from the server, one piece is taken for one token.
        self.result.output_len = self.result.output_len or self._num_pieces


def _message(data: bytes) -> str:
    """The server's own words out of an error body."""
    try:
        content = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:MAX_ERROR_CHARACTERS].decode(errors="replace")
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_ERROR_CHARACTERS]
