"""POST /v1/completions: updates of a generation as chunks, or folded into one answer.

A choice is a run of pieces: with `echo` the prompt is the first one. A chunk of the stream is one piece; the whole
answer joins them. Offsets into the text run on from piece to piece.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET

from octavo.server.answers import sse
from octavo.server.generation import ChoiceUpdate, Generation
from octavo.server.openai.call import Call
from octavo.server.openai.logprobs import LogprobWriter, TextOffset, prompt_logprobs
from octavo.server.openai.protocol import CompletionRequest
from octavo.server.openai.responses import Completion, CompletionChoice, CompletionLogprobs, Usage, usage_of
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.outputs import RequestOutput


class CompletionAnswer:
    """Writes one completions call."""

    def __init__(self, call: Call, request: CompletionRequest, generation: Generation, tokenizer: Tokenizer | None):
        self.call = call
        self.request = request
        self.generation = generation
        self.tokenizer = tokenizer
        self._writer = LogprobWriter(tokenizer, call.tokens_as_ids)
        self._offsets = [TextOffset() for _ in generation.machines]

    async def chunks(self, updates: AsyncGenerator[ChoiceUpdate, None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events: the pieces of the choices as they come; then the usage when asked for."""
        async with aclosing(updates):
            async for update in updates:
                for piece in self._pieces(update):
                    chunk = Completion(self.call.response_id, self.call.created, self.call.model, [piece])
                    if self.call.continuous_usage:
                        chunk.usage = self._usage()
                    yield sse(chunk)
        if self.call.include_usage:
            yield sse(Completion(self.call.response_id, self.call.created, self.call.model, [], usage=self._usage()))

    async def whole(self, updates: AsyncGenerator[ChoiceUpdate, None]) -> Completion:
        """The same pieces, joined."""
        pieces: list[list[CompletionChoice]] = [[] for _ in self.generation.machines]
        async with aclosing(updates):
            async for update in updates:
                pieces[update.choice] += self._pieces(update)
        choices = [_join(index, parts) for index, parts in enumerate(pieces)]
        return Completion(self.call.response_id, self.call.created, self.call.model, choices, usage=self._usage())

    def _usage(self) -> Usage:
        return usage_of(self.generation.usage, self.call.usage_details)

    def _pieces(self, update: ChoiceUpdate) -> list[CompletionChoice]:
        found = []
        if update.is_first and (self.request.echo or self._wants_prompt):
            found.append(self._prompt_piece(update))
        completion = update.completion
        piece = CompletionChoice(update.choice, update.text, None, update.finish_reason, completion.stop_reason)
        if self.request.logprobs is not None and completion.logprobs:
            piece.logprobs = self._writer.completion(
                completion.token_ids, completion.logprobs, self._offsets[update.choice]
            )
        if self.request.return_token_ids:
            piece.token_ids = completion.token_ids
        if piece.text or piece.logprobs or piece.token_ids or piece.finish_reason is not None:
            found.append(piece)
        return found

    @property
    def _wants_prompt(self) -> bool:
        return bool(self.request.return_token_ids) or self.request.prompt_logprobs is not None

    def _prompt_piece(self, update: ChoiceUpdate) -> CompletionChoice:
        """What is said about the prompt itself: its text and scores with `echo`, its ids and scores when asked for."""
        request = update.request
        piece = CompletionChoice(update.choice, "", None, None, None)
        if self.request.echo:
            piece.text = self._prompt_text(request)
            if self.request.logprobs is not None and request.prompt_logprobs:
                first = self._writer.bytes_of(request.prompt_token_ids[0]).decode("utf-8", "ignore")
                piece.logprobs = self._writer.completion(
                    request.prompt_token_ids,
                    request.prompt_logprobs,
                    self._offsets[update.choice],
                    hidden=0 if piece.text.startswith(first) else 1,
                )
            self._offsets[update.choice].characters = len(piece.text)
        if self.request.return_token_ids:
            piece.prompt_token_ids = request.prompt_token_ids
            piece.token_ids = []
        if self.request.prompt_logprobs is not None and request.prompt_logprobs:
            piece.prompt_logprobs = prompt_logprobs(request.prompt_logprobs)
        return piece

    def _prompt_text(self, request: RequestOutput) -> str:
        if request.prompt is not None and self.request.truncate_prompt_tokens is None:
            return request.prompt
        return (
            "" if self.tokenizer is None else self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        )


def _join(index: int, pieces: list[CompletionChoice]) -> CompletionChoice:
    """Put one choice together again."""
    whole = CompletionChoice(index, "".join(piece.text for piece in pieces), None, None, None)
    for piece in pieces:
        if piece.logprobs is not None:
            whole.logprobs = _extend(whole.logprobs, piece.logprobs)
        if piece.token_ids is not UNSET:
            whole.token_ids = piece.token_ids if whole.token_ids is UNSET else whole.token_ids + piece.token_ids
        if piece.prompt_token_ids is not UNSET:
            whole.prompt_token_ids = piece.prompt_token_ids
        if piece.prompt_logprobs is not UNSET:
            whole.prompt_logprobs = piece.prompt_logprobs
        if piece.finish_reason is not None:
            whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
    return whole


def _extend(known: CompletionLogprobs | None, more: CompletionLogprobs) -> CompletionLogprobs:
    if known is None:
        return more
    return CompletionLogprobs(
        known.tokens + more.tokens,
        known.token_logprobs + more.token_logprobs,
        known.top_logprobs + more.top_logprobs,
        known.text_offset + more.text_offset,
    )
