"""One API call in the engine: from prompts to a merged stream of what each choice gained.

This is the only path. A whole answer is this stream folded, so it cannot differ from the streamed one; for it the
engine is merely asked for larger pieces (`RequestOutputKind.FINAL_ONLY`).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from octavo.engine.beam_search import generate_beams
from octavo.errors import RequestFailedError
from octavo.server.engine_client import EngineClient
from octavo.server.text_machine import ContentDelta, Event, Finish, Sections, TextMachine
from octavo.types.outputs import CompletionOutput, RequestOutput
from octavo.types.prompts import EmbedsPrompt, TokensPrompt
from octavo.types.sampling_params import BeamSearchParams, SamplingParams


@dataclass(slots=True)
class ChoiceUpdate:
    """What one output of the engine adds to one choice."""

    choice: int  # index in the answer: prompt × n + i
    is_first: bool  # nothing of this choice came before
    events: list[Event]
    completion: CompletionOutput
    request: RequestOutput
    is_reasoning: Sequence[bool] = ()  # of each of the completion's tokens; empty: none is

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, ContentDelta))

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended; None while it goes on."""
        last = self.events[-1] if self.events else None
        return last.reason if isinstance(last, Finish) else None


class UsageCounter:
    """Tokens of one call so far: each prompt once, however many choices it has."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}  # prompt index -> tokens
        self._cached_tokens: dict[int, int] = {}  # of these, found in the prefix cache
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None  # of these; None: the model's reasoning is not told apart

    def record(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompt_tokens[prompt_index] = output.num_prompt_tokens
        self._cached_tokens[prompt_index] = max(output.num_cached_tokens, self._cached_tokens.get(prompt_index, 0))
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens.values())


class Generation:
    """Prompts on their way through the engine. `params.n` choices a prompt, numbered prompt-major."""

    def __init__(
        self,
        engine: EngineClient,
        prompts: Sequence[TokensPrompt | EmbedsPrompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int,
        make_machine: Callable[[], TextMachine],
    ):
        self.engine = engine
        self.prompts = prompts
        self.params = params
        self.priority = priority
        self.usage = UsageCounter()
        self.request_id = request_id
        self.machines = [make_machine() for _ in range(len(prompts) * params.n)]
        self._begun = [False] * len(self.machines)
        self._ended = [False] * len(self.machines)
        if self.machines and self.machines[0].sections is not None:
            self.usage.reasoning_tokens = 0

    async def updates(self) -> AsyncGenerator[ChoiceUpdate, None]:
        """Everything the choices gain, in the order it comes. Closing this aborts what still runs.

        It ends early when every choice has ended: a machine may know that nothing further can matter.
        """
        async with aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                if output.error is not None:
                    raise RequestFailedError(output.error)
                self.usage.record(prompt_index, output)
                for completion in output.outputs:
                    choice = prompt_index * self.params.n + completion.index
                    if not self._ended[choice]:
                        yield self._update(choice, completion, output)
                if all(self._ended):
                    return

    def _update(self, choice: int, completion: CompletionOutput, output: RequestOutput) -> ChoiceUpdate:
        machine = self.machines[choice]
        events = machine.feed(completion.text, completion.token_ids)
        if completion.finish_reason is not None or machine.is_done:
            events = events + machine.finish(completion.finish_reason or "stop")
            self._ended[choice] = True
        flags: Sequence[bool] = ()
        if machine.sections is not None:
            completion, flags = self._tell_sections(machine.sections, completion)
        is_first, self._begun[choice] = not self._begun[choice], True
        return ChoiceUpdate(choice, is_first, events, completion, output, flags)

    def _tell_sections(
        self, sections: Sections, completion: CompletionOutput
    ) -> tuple[CompletionOutput, Sequence[bool]]:
        """Count the tokens of reasoning, and take them out where they are hidden; which of those left are reasoning."""
        flags = sections.of(completion.token_ids)
        self.usage.reasoning_tokens = (self.usage.reasoning_tokens or 0) + sum(flags)
        if not sections.is_hidden or not any(flags):
            return completion, flags
        shown = [index for index, is_reasoning in enumerate(flags) if not is_reasoning]
        shown_completion = replace(
            completion,
            token_ids=[completion.token_ids[index] for index in shown],
            logprobs=None if completion.logprobs is None else [completion.logprobs[index] for index in shown],
        )
        return shown_completion, ()

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of every prompt, tagged with its index, as they come."""
        if len(self.prompts) == 1:
            async with aclosing(self._submit(0)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        # Bounded, so that a slow client slows the pumps and the engine merges what piles up.
        merged: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(len(self.prompts))
        pumps = [asyncio.create_task(self._pump(index, merged)) for index in range(len(self.prompts))]
        running = len(pumps)
        try:
            while running:
                item = await merged.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, index: int, merged: "asyncio.Queue[tuple[int, RequestOutput] | BaseException | None]"
    ) -> None:
        try:
            async with aclosing(self._submit(index)) as outputs:
                async for output in outputs:
                    await merged.put((index, output))
        except Exception as error:
            await merged.put(error)
        else:
            await merged.put(None)

    def _generate(
        self, prompt: TokensPrompt | EmbedsPrompt, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        return self.engine.generate(prompt, params, request_id, priority=self.priority)

    def _submit(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        params, request_id = self.params, self.request_id
        if len(self.prompts) > 1:
            params, request_id = params.clone(), f"{request_id}-{index}"
        generated = self._generate(self.prompts[index], params, request_id)
        outputs = cast("AsyncGenerator[RequestOutput, None]", generated)
        return outputs if params.prompt_logprobs is None else _with_scores(outputs)


class BeamGeneration(Generation):
    """A generation whose choices are the beams of a search; `params` has their number, `beam_params` the rest."""

    def __init__(
        self,
        engine: EngineClient,
        prompts: Sequence[TokensPrompt | EmbedsPrompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int,
        make_machine: Callable[[], TextMachine],
        beam_params: BeamSearchParams,
    ):
        super().__init__(engine, prompts, params, request_id=request_id, priority=priority, make_machine=make_machine)
        self.beam_params = beam_params

    def _generate(
        self, prompt: TokensPrompt | EmbedsPrompt, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        return generate_beams(
            self.engine, cast(TokensPrompt, prompt), self.beam_params, request_id, priority=self.priority
        )


async def _with_scores(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """Put the prompt's scores on every output.

    The engine tells them once, with whichever output is next when they are complete; each of n choices begins with them.
    What comes before them waits here.
    """
    scores = None
    held: list[RequestOutput] = []
    async with aclosing(outputs):
        async for output in outputs:
            scores = output.prompt_logprobs or scores
            held.append(output)
            if scores is None and not output.finished:
                continue
            for ready in held:
                ready.prompt_logprobs = scores
                yield ready
            held = []
