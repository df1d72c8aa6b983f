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
from octavo.types.prompts import TokensPrompt
from octavo.types.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class BeamSearch:
    """One prompt's beams. Ask `beams` for what to extend, give `advance` the scores of each, until `beams` is empty."""

    def __init__(self, prompt_token_ids: list[int], params: BeamSearchParams, eos_token_ids: Sequence[int], room: int):
        """`room`: how many tokens fit behind the prompt."""
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._steps_left = min(params.max_tokens, room)
        self._done: list[BeamSearchSequence] = []
        self.beams = [BeamSearchSequence(list(prompt_token_ids), [])]

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
        self, prompt: TokensPrompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]: ...


async def generate_beams(
    engine: Generator, prompt: TokensPrompt, params: BeamSearchParams, request_id: str, *, priority: int = 0
) -> AsyncGenerator[RequestOutput, None]:
    """Search and yield one output, whose choices are the beams without the prompt, best first."""
    model = engine.config.model
    prompt_token_ids = list(prompt["prompt_token_ids"])
    step = step_params(params, model.max_logprobs)
    search = BeamSearch(prompt_token_ids, params, model.eos_token_ids, model.max_model_len - len(prompt_token_ids))
    num_cached_tokens, num_steps = 0, 0
    while search.beams:
        asked = [
            _ask(engine, prompt, beam.tokens, step, f"{request_id}-{num_steps}", priority) for beam in search.beams
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
    yield RequestOutput(
        request_id, prompt.get("prompt"), prompt_token_ids, choices, True, num_cached_tokens=num_cached_tokens
    )


async def _ask(
    engine: Generator,
    prompt: TokensPrompt,
    token_ids: list[int],
    params: SamplingParams,
    request_id: str,
    priority: int,
) -> RequestOutput:
    extended = cast(TokensPrompt, {**prompt, "prompt_token_ids": token_ids})
    generated = engine.generate(extended, params, request_id, priority=priority)
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
