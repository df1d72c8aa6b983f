"""POST /v1/chat/completions: updates of a generation as chunks, or folded into one answer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from octavo.server.answers import sse
from octavo.server.generation import ChoiceUpdate, Generation
from octavo.server.openai.call import Call
from octavo.server.openai.logprobs import LogprobWriter, prompt_logprobs
from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    FunctionCall,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
    Usage,
    usage_of,
)
from octavo.server.text_machine import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """One choice while the stream is folded."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)  # of each call
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None


class ChatAnswer:
    """Writes one chat call. `prefix` is text put in front of every choice (`echo`)."""

    def __init__(
        self,
        call: Call,
        request: ChatCompletionRequest,
        generation: Generation,
        tokenizer: Tokenizer | None,
        role: str,
        prefix: str,
    ):
        self.call = call
        self.request = request
        self.generation = generation
        self.role = role
        self.prefix = prefix
        self._writer = LogprobWriter(tokenizer, call.tokens_as_ids)

    async def chunks(self, updates: AsyncGenerator[ChoiceUpdate, None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events: per choice its role, what it says, its end; then the usage when asked for."""
        async with aclosing(updates):
            async for update in updates:
                for choice in self._chunk_choices(update):
                    chunk = self._chunk([choice], self._usage() if self.call.continuous_usage else UNSET)
                    if update.is_first and self.request.return_token_ids and choice.delta.role is not UNSET:
                        chunk.prompt_token_ids = update.request.prompt_token_ids
                    yield sse(chunk)
        if self.call.include_usage:
            yield sse(self._chunk([], self._usage()))

    async def whole(self, updates: AsyncGenerator[ChoiceUpdate, None]) -> ChatCompletion:
        """The same updates, joined."""
        choices = [_Choice() for _ in self.generation.machines]
        answer = ChatCompletion(self.call.response_id, self.call.created, self.call.model, [], Usage())
        async with aclosing(updates):
            async for update in updates:
                self._fold(choices[update.choice], update)
                if self.request.return_token_ids:
                    answer.prompt_token_ids = update.request.prompt_token_ids
                if self.request.prompt_logprobs is not None and update.request.prompt_logprobs:
                    answer.prompt_logprobs = prompt_logprobs(update.request.prompt_logprobs)
        answer.choices = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer.usage = self._usage()
        return answer

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType) -> ChatChunk:
        return ChatChunk(self.call.response_id, self.call.created, self.call.model, choices, usage=usage)

    def _usage(self) -> Usage:
        return usage_of(self.generation.usage, self.call.usage_details)

    def _chunk_choices(self, update: ChoiceUpdate) -> list[ChatChunkChoice]:
        found = []
        if update.is_first:
            found.append(ChatChunkChoice(update.choice, Delta(role=self.role, content="")))
            if self.prefix:
                found.append(ChatChunkChoice(update.choice, Delta(content=self.prefix)))
        deltas = [delta for event in update.events if (delta := _delta(event)) is not None]
        logprobs = self._logprobs(update)
        wants_ids = self.request.return_token_ids and bool(update.completion.token_ids)
        if not deltas and (logprobs or wants_ids):
            deltas.append(Delta(content=""))
        said = [ChatChunkChoice(update.choice, delta) for delta in deltas]
        if said and logprobs:
            said[0].logprobs = ChatLogprobs(logprobs)
        if said and wants_ids:
            said[0].token_ids = update.completion.token_ids
        found += said
        if update.finish_reason is not None:
            end = ChatChunkChoice(update.choice, Delta(), finish_reason=update.finish_reason)
            end.stop_reason = update.completion.stop_reason
            found.append(end)
        return found

    def _logprobs(self, update: ChoiceUpdate) -> list[TokenLogprob]:
        completion = update.completion
        if not self.request.logprobs or not completion.logprobs:
            return []
        return self._writer.chat(completion.token_ids, completion.logprobs, self.request.top_logprobs or 0)

    def _fold(self, choice: _Choice, update: ChoiceUpdate) -> None:
        for event in update.events:
            match event:
                case ContentDelta(text):
                    choice.content.append(text)
                case ReasoningDelta(text):
                    choice.reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    choice.calls.append(ToolCall(call_id, FunctionCall(name, "")))
                    choice.arguments.append([])
                case ToolCallArguments(index, text):
                    choice.arguments[index].append(text)
        choice.token_ids += update.completion.token_ids
        choice.logprobs += self._logprobs(update)
        if update.finish_reason is not None:
            choice.finish_reason = update.finish_reason
            choice.stop_reason = update.completion.stop_reason

    def _choice(self, index: int, choice: _Choice) -> ChatChoice:
        return ChatChoice(
            index,
            self._message(choice),
            ChatLogprobs(choice.logprobs) if self.request.logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
            token_ids=choice.token_ids if self.request.return_token_ids else UNSET,
        )

    def _message(self, choice: _Choice) -> ChatMessage:
        content = self.prefix + "".join(choice.content)
        message = ChatMessage(self.role, content)
        if choice.reasoning:
            message.reasoning = message.reasoning_content = "".join(choice.reasoning)
        for call, arguments in zip(choice.calls, choice.arguments, strict=True):
            call.function.arguments = "".join(arguments)
        if choice.calls:
            message.tool_calls = choice.calls
        if not content and (choice.calls or choice.reasoning):
            message.content = None
        return message


def _delta(event: Event) -> Delta | None:
    """An event as a piece of a message."""
    match event:
        case ContentDelta(text):
            return Delta(content=text)
        case ReasoningDelta(text):
            return Delta(reasoning=text, reasoning_content=text)
        case ToolCallStart(index, call_id, name):
            return Delta(tool_calls=[ToolCallPiece(index, FunctionCall(name, ""), call_id, "function")])
        case ToolCallArguments(index, text):
            return Delta(tool_calls=[ToolCallPiece(index, FunctionCall(UNSET, text))])
    return None
