"""Updates of a generation as the events of the Responses API, or the response that they fill.

One writer makes both: the response object fills while its events are told, so the whole answer is the stream's last word.
Each event is encoded as soon as it is made, since what it shows goes on changing.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from octavo.errors import RequestFailedError
from octavo.server.answers import sse
from octavo.server.errors import describe
from octavo.server.generation import ChoiceUpdate, Generation
from octavo.server.openai.responses import TokenLogprob
from octavo.server.responses.conversation import pack_reasoning
from octavo.server.responses.protocol import (
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    Usage,
)
from octavo.server.text_machine import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

Updates = AsyncGenerator[ChoiceUpdate, None]
Frames = Iterator[bytes]


class ResponseAnswer:
    """Fills `response`, once. `on_end` is called when it is complete, before its last event is told.

    `logprobs` gives the entries of an update's tokens, those of reasoning left out; None: none were asked for.
    """

    def __init__(
        self,
        response: Response,
        generation: Generation,
        *,
        logprobs: Callable[[ChoiceUpdate], list[TokenLogprob]] | None = None,
        packs_reasoning: bool,
        shows_cache: bool,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.response = response
        self.generation = generation
        self.logprobs = logprobs
        self.packs_reasoning = packs_reasoning
        self.shows_cache = shows_cache
        self.on_end = on_end
        self._sequence_number = 0
        self._open: Item | None = None
        self._pieces: list[str] = []  # of the open item's text, joined when it closes
        self._new_scores: list[TokenLogprob] = []  # for the next delta of text
        self._scores: list[TokenLogprob] = []  # of the open message
        self._blank = ""  # white space that may turn out to begin a message

    async def chunks(self, updates: Updates) -> AsyncGenerator[bytes, None]:
        """Server-sent events in the API's order, numbered from 0."""
        yield self._state("response.created")
        self.response.status = "in_progress"
        yield self._state("response.in_progress")
        async with aclosing(updates):
            async for update in updates:
                self._new_scores += self.logprobs(update) if self.logprobs is not None else []
                for event in update.events:
                    for frame in self._write(event):
                        yield frame
                if update.finish_reason is not None:
                    for frame in self._finish(update.finish_reason):
                        yield frame

    async def whole(self, updates: Updates) -> Response:
        """The response once every event has been told to nobody."""
        async with aclosing(self.chunks(updates)) as frames:
            async for _ in frames:
                pass
        return self.response

    def failed(self, error: BaseException) -> list[bytes]:
        """The last events of a response that failed on the way."""
        frames = self.cut("failed")
        self.response.error = ResponseError("server_error", describe(error).body.error.message)
        return [*frames, self._state("response.failed")]

    def cut(self, status: str) -> list[bytes]:
        """End before the model did; what was said until then stays."""
        frames = list(self._close("incomplete"))
        self.response.status = status
        self.response.usage = self._usage()
        return frames

    def _finish(self, reason: str) -> Frames:
        if reason not in ("stop", "length", "tool_calls"):
            raise RequestFailedError(f"the server ended the answer ({reason}); send the request again.")
        is_cut = reason == "length"
        self._scores += self._new_scores  # behind the last text: an end mark, or what completed a stop string
        yield from self._close("incomplete" if is_cut else "completed")
        response = self.response
        if is_cut:
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        else:
            response.status, response.completed_at = "completed", int(time.time())
        response.usage = self._usage()
        self.on_end()
        yield self._state(f"response.{response.status}")

    def _usage(self) -> Usage:
        counted = self.generation.usage
        return Usage(
            counted.prompt_tokens,
            InputTokensDetails(counted.cached_tokens if self.shows_cache else 0),
            counted.completion_tokens,
            OutputTokensDetails(counted.reasoning_tokens or 0),
            counted.prompt_tokens + counted.completion_tokens,
        )

    # One item at a time is open, the last of the output

    def _write(self, event: Event) -> Frames:
        match event:
            case ContentDelta(text):
                yield from self._write_text(text)
            case ReasoningDelta(text):
                yield from self._write_reasoning(text)
            case ToolCallStart(_, call_id, name):
                self._new_scores = []  # they are the call's
                yield from self._start(FunctionCall(self._item_id("fc"), call_id, name))
            case ToolCallArguments(_, text):
                self._pieces.append(text)
                yield self._event("response.function_call_arguments.delta", delta=text)
            case ToolCallEnd():
                yield from self._close("completed")

    def _write_text(self, text: str) -> Frames:
        if not isinstance(self._open, OutputMessage):
            text = self._blank + text
            if not text.strip():  # as models write it between reasoning and calls
                self._blank = text
                return
            yield from self._start(OutputMessage(self._item_id("msg")))
            yield self._event("response.content_part.added", content_index=0, part=OutputText())
        self._pieces.append(text)
        scores, self._new_scores = self._new_scores, []
        self._scores += scores
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=scores)

    def _write_reasoning(self, text: str) -> Frames:
        if not isinstance(self._open, ReasoningItem):
            yield from self._start(ReasoningItem(self._item_id("rs")))
            yield self._event("response.content_part.added", content_index=0, part=ReasoningText())
        self._pieces.append(text)
        yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _start(self, item: Item) -> Frames:
        yield from self._close("completed")
        self._open = item
        self.response.output.append(item)
        yield self._event("response.output_item.added", with_item_id=False, item=item)

    def _close(self, status: str) -> Frames:
        """End the open item, with all its text in it."""
        item, text = self._open, "".join(self._pieces)
        self._pieces, self._blank = [], ""
        match item:
            case None:
                return
            case OutputMessage():
                part = OutputText(text, logprobs=self._scores)
                self._scores = []
                item.content.append(part)
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=part.logprobs)
                yield self._event("response.content_part.done", content_index=0, part=part)
            case ReasoningItem():
                item.content.append(ReasoningText(text))
                if self.packs_reasoning:
                    item.encrypted_content = pack_reasoning(text)
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
                yield self._event("response.content_part.done", content_index=0, part=item.content[0])
            case FunctionCall():
                item.arguments = text
                self._new_scores = []
                yield self._event("response.function_call_arguments.done", name=item.name, arguments=text)
        item.status = status
        yield self._event("response.output_item.done", with_item_id=False, item=item)
        self._open = None

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.response.id.removeprefix('resp_')}_{len(self.response.output)}"

    # Events

    def _state(self, kind: str) -> bytes:
        return self._frame(kind, {"response": self.response})

    def _event(self, kind: str, *, with_item_id: bool = True, **fields: Any) -> bytes:
        """An event about the open item."""
        assert self._open is not None
        if with_item_id:
            fields["item_id"] = self._open.id
        return self._frame(kind, {"output_index": len(self.response.output) - 1, **fields})

    def _frame(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return sse(event, kind)
