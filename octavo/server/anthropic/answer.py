"""Updates of a generation as Anthropic's stream of events, or the message that these events add up to."""

import base64
import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json

from octavo.errors import RequestFailedError
from octavo.server.answers import sse
from octavo.server.anthropic.protocol import (
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Delta,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopDelta,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from octavo.server.generation import ChoiceUpdate, Generation
from octavo.server.text_machine import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

Updates = AsyncGenerator[ChoiceUpdate, None]


class MessagesAnswer:
    """Writes one call. `show_cache` tells apart the input tokens that the prefix cache held."""

    def __init__(self, message_id: str, model: str, body: MessagesRequest, generation: Generation, show_cache: bool):
        self.message_id = message_id
        self.model = model
        self.body = body
        self.generation = generation
        self.show_cache = show_cache
        hides = body.thinking is not None and body.thinking.display == "omitted"
        self._blocks = _BlockWriter(hides)

    async def chunks(self, updates: Updates) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each named by its type; a ping follows the start of the first block."""
        pinged = False
        async with aclosing(self._events(updates)) as events:
            async for event in events:
                yield _frame(event)
                if isinstance(event, ContentBlockStart) and not pinged:
                    pinged = True
                    yield _frame(Ping())

    async def whole(self, updates: Updates) -> Message:
        """The same events, added up as a client adds them."""
        message = Message(id=self.message_id, content=[], model=self.model, usage=self._usage())
        block: Block = TextBlock()
        pieces: list[str] = []
        async with aclosing(self._events(updates)) as events:
            async for event in events:
                match event:
                    case ContentBlockStart(content_block=block):
                        message.content.append(block)
                        pieces = []
                    case ContentBlockDelta(delta=SignatureDelta(signature)) if isinstance(block, ThinkingBlock):
                        block.signature = signature
                    case ContentBlockDelta(delta=delta):
                        pieces.append(_delta_text(delta))
                    case ContentBlockStop():
                        _fill(block, "".join(pieces))
                    case MessageDelta(StopDelta(reason, sequence), usage):
                        message.stop_reason, message.stop_sequence, message.usage = reason, sequence, usage
        return message

    async def _events(self, updates: Updates) -> AsyncGenerator[StreamEvent, None]:
        async with aclosing(updates):
            async for update in updates:
                if update.is_first:
                    yield MessageStart(Message(id=self.message_id, content=[], model=self.model, usage=self._usage()))
                for found in update.events:
                    for event in self._blocks.write(found):
                        yield event
                if update.finish_reason is not None:
                    for event in self._blocks.close():
                        yield event
                    yield MessageDelta(self._stop(update), self._usage())
        yield MessageStop()

    def _usage(self) -> Usage:
        counted = self.generation.usage
        cached = counted.cached_tokens if self.show_cache else 0
        usage = Usage(counted.prompt_tokens - cached, counted.completion_tokens, cache_read_input_tokens=cached)
        if counted.reasoning_tokens is not None:
            usage.output_tokens_details = OutputTokensDetails(counted.reasoning_tokens)
        return usage

    def _stop(self, update: ChoiceUpdate) -> StopDelta:
        """Why the message ended, in Anthropic's words."""
        reason, stopped_by = update.finish_reason, update.completion.stop_reason
        if reason == "length":
            is_full = self.generation.usage.completion_tokens < self.body.max_tokens
            return StopDelta("model_context_window_exceeded" if is_full else "max_tokens", None)
        if isinstance(stopped_by, str) and stopped_by in (self.body.stop_sequences or ()):
            return StopDelta("stop_sequence", stopped_by)
        if reason in ("stop", "tool_calls"):
            return StopDelta("tool_use" if self._blocks.has_tool_use else "end_turn", None)
        raise RequestFailedError(f"the server ended the answer ({reason}); send the request again.")


class _BlockWriter:
    """Events of the text machine as content blocks: one open at a time, with rising indices.

    Text that is nothing but white space, as models write it between thinking and tool calls, opens no block.
    `hides_thinking`: a thinking block has its signature only.
    """

    def __init__(self, hides_thinking: bool) -> None:
        self.hides_thinking = hides_thinking
        self.has_tool_use = False
        self._index = -1
        self._open: Block | None = None
        self._blank = ""  # white space that may turn out to begin a text
        self._thoughts = hashlib.sha256()

    def write(self, event: Event) -> Iterator[ContentBlockStart | ContentBlockDelta | ContentBlockStop]:
        match event:
            case ContentDelta(text):
                if not isinstance(self._open, TextBlock):
                    text = self._blank + text
                    if not text.strip():
                        self._blank = text
                        return
                    yield from self._start(TextBlock())
                yield self._delta(TextDelta(text))
            case ReasoningDelta(text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._start(ThinkingBlock())
                    self._thoughts = hashlib.sha256()
                self._thoughts.update(text.encode("utf-8", "surrogatepass"))
                if not self.hides_thinking:
                    yield self._delta(ThinkingDelta(text))
            case ToolCallStart(_, call_id, name):
                self.has_tool_use = True
                yield from self._start(ToolUseBlock(call_id, name))
            case ToolCallArguments(_, text):
                yield self._delta(InputJsonDelta(text))
            case ToolCallEnd():
                yield from self.close()

    def close(self) -> Iterator[ContentBlockDelta | ContentBlockStop]:
        """End the open block. A thinking block is signed with a digest: clients keep no thinking without a signature."""
        self._blank = ""
        if isinstance(self._open, ThinkingBlock):
            yield self._delta(SignatureDelta(base64.b64encode(self._thoughts.digest()).decode()))
        if self._open is not None:
            yield ContentBlockStop(self._index)
        self._open = None

    def _start(self, block: Block) -> Iterator[ContentBlockStart | ContentBlockDelta | ContentBlockStop]:
        yield from self.close()
        self._index += 1
        self._open = block
        yield ContentBlockStart(self._index, block)

    def _delta(self, delta: Delta) -> ContentBlockDelta:
        return ContentBlockDelta(self._index, delta)


def _frame(event: StreamEvent | Ping) -> bytes:
    return sse(event, str(event.__struct_config__.tag))


def _delta_text(delta: Delta) -> str:
    match delta:
        case TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text):
            return text
    return ""


def _fill(block: Block, text: str) -> None:
    """Put what the deltas brought into their block."""
    match block:
        case TextBlock():
            block.text = text
        case ThinkingBlock():
            block.thinking = text
        case ToolUseBlock():
            block.input = _tool_input(text)


def _tool_input(arguments: str) -> dict[str, Any]:
    """The object in `arguments`; of one that was cut short as much as is complete, as stream readers take it."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
