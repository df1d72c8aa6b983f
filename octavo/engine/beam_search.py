"""Beam search over ordinary requests: one token at a time, each beam a request for the likeliest next tokens.

`BeamSearch` is one prompt's search and runs nothing; `LLM.beam_search` and `generate_beams` drive it. That a beam's cache is
found again at its next token is the prefix cache's doing.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

from octavo.errors import ClientError, RequestFailedError
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.outputs import (
    BeamSearchSequence,
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
)
from octavo.types.prompts import PromptType, TokensPrompt
from octavo.types.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class BeamSearch:
    """One prompt's beams. Ask `beams` for what to extend, give `advance` the scores of each, until `beams` is empty."""

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        eos_token_ids: Sequence[int],
        room: int,
        encoder_prompt: TokensPrompt | None = None,
    ):
        """`room`: how many tokens fit behind the prompt. `encoder_prompt`: what every beam's encoder reads, if it has one."""
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self._encoder_prompt = encoder_prompt
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._steps_left = min(params.max_tokens, room)
        self._done: list[BeamSearchSequence] = []
        self.beams = [BeamSearchSequence(list(prompt_token_ids), [])]

    def prompt_of(self, beam: BeamSearchSequence) -> PromptType:
        """What the request that extends a beam is about."""
        if self._encoder_prompt is None:
            return beam.tokens
        return {"encoder_prompt": self._encoder_prompt, "decoder_prompt": beam.tokens}

    def advance(self, scores: Sequence[PositionLogprobs]) -> None:
        """Keep the best continuations of `beams`, whose next tokens score `scores`."""
        going_on: list[BeamSearchSequence] = []
        for beam, position in zip(self.beams, scores, strict=True):
            for token_id, entry in position.items():
                total = beam.cum_logprob + entry.logprob
                if token_id in self._eos_token_ids:
                    self._done.append(self._ended(beam, token_id, position, total))
                else:
                    going_on.append(BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, position], total))
        self._steps_left -= 1
        self.beams = self._best(going_on)
        if self._steps_left == 0:
            for beam in self.beams:
                beam.finish_reason = str(FinishReason.LENGTH)
            self._done += self.beams
            self.beams = []

    def result(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True) -> list[BeamSearchSequence]:
        """The beams, best first, as text too."""
        best = self._best(self._done)
        if tokenizer is not None:
            for beam in best:
                beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=skip_special_tokens)
        return best

    def _ended(
        self, beam: BeamSearchSequence, token_id: int, position: PositionLogprobs, total: float
    ) -> BeamSearchSequence:
        keeps_eos = self.params.include_stop_str_in_output
        tokens = [*beam.tokens, token_id] if keeps_eos else list(beam.tokens)
        logprobs = [*beam.logprobs, position] if keeps_eos else list(beam.logprobs)
        return BeamSearchSequence(tokens, logprobs, total, finish_reason=str(FinishReason.STOP))

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        """Log probability over length ** penalty. The prompt counts as length (so it does in vLLM), EOS does not."""
        has_eos = bool(self._eos_token_ids) and beam.tokens[-1] in self._eos_token_ids
        length = max(len(beam.tokens) - has_eos, 1)
        return beam.cum_logprob / length**self.params.length_penalty


def step_params(params: BeamSearchParams, max_logprobs: int) -> SamplingParams:
    """What each beam asks the engine at each token."""
    wanted = 2 * params.beam_width
    if 0 <= max_logprobs < wanted:
        raise ClientError(
            f"beam_width={params.beam_width} needs {wanted} log probabilities at each token, more than "
            f"max_logprobs={max_logprobs}; use a beam_width of at most {max_logprobs // 2}, or start the engine with a "
            "larger --max-logprobs.",
            param="beam_width",
        )
    return SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=wanted,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scores_of(output: RequestOutput) -> PositionLogprobs:
    """The scores of the one token that a beam's request made."""
    if output.error is not None:
        raise RequestFailedError(output.error)
    (choice,) = output.outputs
    if not choice.logprobs:
        raise RequestFailedError(f"the request of a beam ended with {choice.finish_reason!r} and without a token.")
    return choice.logprobs[0]


class Generator(Protocol):
    """The part of `AsyncLLM` that a search needs."""

    @property
    def config(self) -> Any: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]: ...


async def generate_beams(
    engine: Generator, prompt: TokensPrompt, params: BeamSearchParams, request_id: str, *, priority: int = 0
) -> AsyncGenerator[RequestOutput, None]:
    """Search and yield one output, whose choices are the beams without the prompt, best first."""
    model = engine.config.model
    if model.encoder_decoder is None:
        prompt_token_ids, encoder_prompt = list(prompt["prompt_token_ids"]), None
    else:
        prompt_token_ids, encoder_prompt = model.encoder_decoder.decoder_begin, prompt
    step = step_params(params, model.max_logprobs)
    room = model.max_model_len - len(prompt_token_ids)
    search = BeamSearch(prompt_token_ids, params, model.eos_token_ids, room, encoder_prompt)
    num_cached_tokens, num_steps = 0, 0
    while search.beams:
        asked = [
            _ask(engine, _with_options(prompt, search.prompt_of(beam)), step, f"{request_id}-{num_steps}", priority)
            for beam in search.beams
        ]
        outputs = await _all_or_none(asked)
        if num_steps == 0:
            num_cached_tokens = outputs[0].num_cached_tokens
        search.advance([scores_of(output) for output in outputs])
        num_steps += 1
    num_prompt = len(prompt_token_ids)
    choices = []
    for index, beam in enumerate(search.result(None)):
        token_ids = beam.tokens[num_prompt:]
        choices.append(
            CompletionOutput(
                index,
                engine.tokenizer.decode(token_ids, skip_special_tokens=True),
                token_ids,
                beam.cum_logprob,
                beam.logprobs,
                beam.finish_reason,
            )
        )
    output = RequestOutput(
        request_id, prompt.get("prompt"), prompt_token_ids, choices, True, num_cached_tokens=num_cached_tokens
    )
    if encoder_prompt is not None:
        output.prompt, output.encoder_prompt = None, prompt.get("prompt")
        output.encoder_prompt_token_ids = prompt["prompt_token_ids"]
    yield output


def _with_options(given: TokensPrompt, extended: PromptType) -> PromptType:
    """What a beam's request is about, with the options of the caller's prompt; they are the encoder's where there is one."""
    return cast(PromptType, {**given, "prompt_token_ids": extended}) if isinstance(extended, list) else extended


async def _ask(
    engine: Generator, prompt: PromptType, params: SamplingParams, request_id: str, priority: int
) -> RequestOutput:
    generated = engine.generate(prompt, params, request_id, priority=priority)
    async with aclosing(cast("AsyncGenerator[RequestOutput, None]", generated)) as outputs:
        async for output in outputs:
            if output.finished:
                return output
    raise RequestFailedError("the request of a beam ended without an output.")


async def _all_or_none(asked: Sequence[Any]) -> list[RequestOutput]:
    """Await all; when one fails or the caller is cancelled, none goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
