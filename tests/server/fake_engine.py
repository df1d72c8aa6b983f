"""A scripted engine with the interface that the server uses: real tokenizer, no model.

Each answer is the script's text, one token an output; tests say when it waits, and when and how it fails.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from octavo.config.engine import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    TokenizerConfig,
)
from octavo.config.hf import HFConfig
from octavo.errors import ClientError, ConflictError, ContextLengthError, EngineAsleepError, EngineDeadError
from octavo.tokenizer.backends import RustBackend
from octavo.tokenizer.tokenizer import Tokenizer, TokenizerInfo
from octavo.types.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from octavo.types.prompts import PromptType
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from tests.fixtures.tokenizers import CHAT_TEMPLATE, IM_END, VOCAB_SIZE, byte_tokenizer

# The text of answer `index` to a prompt of these ids.
Script = Callable[[list[int], SamplingParams, int], str]


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    info = TokenizerInfo(
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        chat_templates={} if chat_template is None else {"default": chat_template},
        source="the test tokenizer",
    )
    return Tokenizer(RustBackend(byte_tokenizer()), info)


def make_config(**model_fields: object) -> EngineConfig:
    model = {
        "model": "org/tiny",
        "path": "/nowhere",
        "served_model_names": ["tiny", "alias"],
        "hf_config": HFConfig({}),
        "architecture": "LlamaForCausalLM",
        "model_impl": "octavo",
        "dtype": "float32",
        "max_model_len": 128,
        "seed": 0,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [IM_END],
        **model_fields,
    }
    return EngineConfig(
        model=ModelConfig(**model),  # type: ignore[arg-type]
        tokenizer=TokenizerConfig(path=None),
        load=LoadConfig("dummy"),
        cache=CacheConfig(block_size=16, kv_cache_dtype="float32", memory_utilization=0.5),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128),
        parallel=ParallelConfig(),
        device=DeviceConfig("cpu", "cpu"),
        compilation=CompilationConfig(),
        observability=ObservabilityConfig(),
    )


def say(text: str) -> Script:
    """Always this answer, then the end of turn."""
    return lambda prompt, params, index: text


@dataclass
class FakeEngine:
    """Set `hold_after` to make every answer wait for `release` after that many tokens (`reached` says when it does);
    `fail_after` with `failure` to raise there."""

    script: Script = field(default_factory=lambda: say("Hello there"))
    config: EngineConfig = field(default_factory=make_config)
    texts: Tokenizer | None = field(default_factory=make_tokenizer)
    hold_after: int | None = None
    fail_after: int | None = None
    failure: BaseException = field(default_factory=lambda: EngineDeadError("the engine core is gone."))
    scores_at: int = 0  # which output of a stream brings the prompt's scores
    ends: bool = True  # whether scripts end with the end of turn; else they repeat for ever

    def __post_init__(self) -> None:
        self.reached = asyncio.Event()
        self.release = asyncio.Event()
        self.idle = asyncio.Event()
        self.running: list[str] = []
        self.aborted: list[str] = []
        self.to_abort: set[str] = set()
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.salts: list[str | None] = []
        self.priorities: list[int] = []
        self.dead = False
        self.pauses: list[tuple[str, bool]] = []  # (mode, clear_cache) of each pause
        self.paused = False
        self.sleeps: list[tuple[int, str]] = []  # (level, mode) of each sleep
        self.asleep: list[str] = []
        self.profiling = False

    @property
    def errored(self) -> bool:
        return self.dead

    @property
    def tokenizer(self) -> Tokenizer:
        if self.texts is None:
            raise ClientError("this engine runs without a tokenizer.")
        return self.texts

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("the engine core is gone.")
        if self.asleep:
            raise EngineAsleepError("the engine sleeps.")

    async def abort(self, request_ids: list[str]) -> None:
        """They end with their next output."""
        self.to_abort.update(request_ids)
        self.release.set()

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode not in ("abort", "wait", "keep"):
            raise ClientError(f"mode={mode!r} is not known.", param="mode")
        self.pauses.append((mode, clear_cache))
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if level not in (0, 1, 2):
            raise ClientError(f"level={level} is not known.", param="level")
        self.sleeps.append((level, mode))
        self.asleep = ["weights", "kv_cache"]

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep = [part for part in self.asleep if tags is not None and part not in tags]

    async def is_sleeping(self) -> bool:
        return bool(self.asleep)

    async def start_profile(self) -> None:
        if self.profiling:
            raise ConflictError("a profile is being taken already.")
        self.profiling = True

    async def stop_profile(self) -> list[str]:
        if not self.profiling:
            raise ConflictError("no profile is being taken.")
        self.profiling = False
        return ["/traces/one.json"]

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        assert isinstance(prompt, dict) and "prompt_token_ids" in prompt
        token_ids = prompt["prompt_token_ids"]
        self._admit(token_ids, sampling_params)
        self.running.append(request_id)
        self.params.append(sampling_params)
        self.prompts.append(token_ids)
        self.salts.append(prompt.get("cache_salt"))
        self.priorities.append(priority)
        finished = False
        try:
            step = -1
            async for outputs in self._steps(token_ids, sampling_params):
                step += 1
                if request_id in self.to_abort:
                    ends = [CompletionOutput(i, "", [], finish_reason="abort") for i in range(sampling_params.n)]
                    yield self._output(request_id, prompt, sampling_params, ends)
                    return
                finished = all(output.finished() for output in outputs) if len(outputs) == sampling_params.n else False
                output = self._output(request_id, prompt, sampling_params, outputs)
                if step != self.scores_at and sampling_params.output_kind is RequestOutputKind.DELTA:
                    output.prompt_logprobs = None
                yield output
            finished = True
        finally:
            self.running.remove(request_id)
            if not finished:
                self.aborted.append(request_id)
            if not self.running:
                self.idle.set()

    def _admit(self, token_ids: list[int], params: SamplingParams) -> None:
        if self.dead:
            raise EngineDeadError("the engine core is gone.")
        if self.asleep:
            raise EngineAsleepError("the engine sleeps.")
        params.check_vocab(VOCAB_SIZE, self.config.model.max_logprobs)
        limit = self.config.model.max_model_len
        if len(token_ids) + (params.max_tokens != 0) > limit:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, which does not fit the context of {limit}.", param="prompt"
            )

    async def _steps(
        self, token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[list[CompletionOutput], None]:
        """One list of outputs a step (deltas), or one list at the end."""
        limit = self.config.model.max_model_len - len(token_ids)
        limit = min(limit, params.max_tokens) if params.max_tokens is not None else limit
        answers = [self._answer(token_ids, params, index, limit) for index in range(params.n)]
        pieces: list[list[CompletionOutput]] = [[] for _ in answers]
        for step in range(max(map(len, answers))):
            if step == self.fail_after:
                raise self.failure
            if step == self.hold_after:
                self.reached.set()
                await self.release.wait()
            await asyncio.sleep(0)
            outputs = [answer[step] for answer in answers if step < len(answer)]
            if params.output_kind is RequestOutputKind.DELTA:
                yield outputs
            for output in outputs:
                pieces[output.index].append(output)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield [_join(parts) for parts in pieces]

    def _answer(self, token_ids: list[int], params: SamplingParams, index: int, limit: int) -> list[CompletionOutput]:
        """The deltas of one answer."""
        tokenizer = self.texts or make_tokenizer()
        if limit == 0:
            return [CompletionOutput(index, "", [], finish_reason="length")]
        ids = tokenizer.encode(self.script(token_ids, params, index), add_special_tokens=False)
        ids = [*ids, IM_END] if self.ends else ids * (limit // len(ids) + 1)
        deltas = []
        for position, token_id in enumerate(ids[:limit]):
            text = "" if token_id == IM_END else tokenizer.token_text(token_id)
            delta = CompletionOutput(index, text, [token_id], logprobs=self._logprobs([token_id], params.logprobs))
            if token_id == IM_END:
                delta.finish_reason = "stop"
            elif params.stop and text in params.stop:
                delta.text, delta.finish_reason, delta.stop_reason = "", "stop", text
            elif position == limit - 1:
                delta.finish_reason = "length"
            deltas.append(delta)
            if delta.finish_reason is not None:
                break
        return deltas

    def _logprobs(self, token_ids: list[int], k: int | None) -> list[PositionLogprobs] | None:
        """The chosen token has -0.5, the k-1 after it in the vocabulary less and less, and the last minus infinity."""
        if k is None:
            return None
        tokenizer = self.texts or make_tokenizer()
        positions = []
        for token_id in token_ids:
            position = {token_id: Logprob(-0.5, 1, tokenizer.token_text(token_id))}
            for rank in range(2, k + 1):
                other = (token_id + rank) % VOCAB_SIZE
                value = float("-inf") if rank == k else -float(rank)
                position[other] = Logprob(value, rank, tokenizer.token_text(other))
            positions.append(position)
        return positions

    def _output(
        self, request_id: str, prompt: PromptType, params: SamplingParams, outputs: list[CompletionOutput]
    ) -> RequestOutput:
        assert isinstance(prompt, dict) and "prompt_token_ids" in prompt
        token_ids = prompt["prompt_token_ids"]
        scores = None
        if params.prompt_logprobs is not None:
            scores = [None, *(self._logprobs(token_ids[1:], params.prompt_logprobs) or [])]
        cached = (len(token_ids) - 1) // 16 * 16 if self.prompts.count(token_ids) > 1 else 0
        return RequestOutput(
            request_id,
            prompt.get("prompt"),
            token_ids,
            outputs,
            finished=all(output.finished() for output in outputs),
            prompt_logprobs=scores,
            num_cached_tokens=cached,
        )


def _join(parts: list[CompletionOutput]) -> CompletionOutput:
    logprobs = [entry for part in parts for entry in part.logprobs or []]
    return CompletionOutput(
        parts[0].index,
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        logprobs=logprobs if parts[0].logprobs is not None else None,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )
