"""An executor without a model, for everything above the worker: scripted answers, faults on request, no torch.

`FakeExecutor` keeps rows as the worker does and finds the next token from a row's tokens alone, so answers do not change
with batching, chunking, preemption, overlap or a restart. It is chosen by name (`executor="tests.engine.fakes:FakeExecutor"`)
and told what to do by the configuration, so that it works in a core process too:

    make_config(scripts={(5, 6): [7, 8, 9]}, tokenizer=folder)

Without a script a token follows from all tokens before it and, when sampling, from the seed. What goes wrong is asked for
by token ids in the prompt: `RAISE`, `FAIL_ROW`, `DIE`, `DIE_LATER`, `HANG`.
"""

import os
import signal
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    SupervisionConfig,
    TokenizerConfig,
)
from octavo.config.hf import HFConfig
from octavo.engine.executor import Executor, StartUp
from octavo.errors import ConfigError, LoadError
from octavo.types.kv_spec import FullAttentionSpec, KVCacheConfig, KVGroup
from octavo.types.outputs import TokenLogprobs
from octavo.types.step import ModelRunnerOutput, NewRow, SchedulerOutput, TokenMasks

VOCAB_SIZE = 512
EOS = 2
BLOCK_SIZE = 16

# A prompt that holds one of these makes the step it is in …
RAISE = 501  # raise from `execute`
FAIL_ROW = 502  # report an error for this row alone
DIE = 503  # kill the process, like the kernel's out-of-memory killer
HANG = 504  # never end
DIE_LATER = 505  # kill the process once the row has 5 tokens of an answer

EXECUTOR = "tests.engine.fakes:FakeExecutor"


def make_config(
    *,
    scripts: Mapping[Sequence[int], Sequence[int]] | None = None,
    tokenizer: Path | None = None,
    start_error: str | None = None,
    max_model_len: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    num_blocks: int = 200,
    async_scheduling: bool = False,
    model: dict[str, Any] | None = None,
    max_restarts: int = 5,
    stall_seconds: float = 60.0,
    **scheduler: Any,
) -> EngineConfig:
    """A configuration whose executor is `FakeExecutor`; `model` and further keywords replace fields of its parts."""
    fake = {
        "scripts": {_key(prompt): list(answer) for prompt, answer in (scripts or {}).items()},
        "start_error": start_error,
    }
    config = EngineConfig(
        model=ModelConfig(
            model="fake",
            path="fake",
            served_model_names=["fake"],
            hf_config=HFConfig({"architectures": ["FakeForCausalLM"], "fake": fake}),
            architecture="FakeForCausalLM",
            model_impl="octavo",
            dtype="float32",
            max_model_len=max_model_len,
            seed=0,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
        ),
        tokenizer=TokenizerConfig(path=None if tokenizer is None else str(tokenizer)),
        load=LoadConfig(load_format="dummy"),
        cache=CacheConfig(
            block_size=BLOCK_SIZE, kv_cache_dtype="float32", memory_utilization=0.5, num_blocks_override=num_blocks
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            async_scheduling=async_scheduling,
            **scheduler,
        ),
        parallel=ParallelConfig(executor=EXECUTOR),
        device=DeviceConfig(platform="cpu", device="cpu"),
        compilation=CompilationConfig(),
        observability=ObservabilityConfig(),
        supervision=SupervisionConfig(max_restarts, stall_seconds),
    )
    return replace(config, model=replace(config.model, **(model or {})))


class FakeHandle:
    """A step's result, available once `gate` is open."""

    def __init__(self, result: ModelRunnerOutput, gate: threading.Event):
        self._result = result
        self._gate = gate

    def done(self) -> bool:
        return self._gate.is_set()

    def result(self) -> ModelRunnerOutput:
        self._gate.wait()
        return self._result


class FakeExecutor(Executor):
    """Computes a step at once; its result can be held back with `gate`."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        fake = config.model.hf_config.data["fake"]
        self.scripts: dict[str, list[int]] = fake["scripts"]
        self.start_error: str | None = fake["start_error"]
        self.rows: dict[int, _Row] = {}
        self.steps: list[SchedulerOutput] = []
        self.num_in_flight = self.max_in_flight = 0
        self.gate = threading.Event()
        self.gate.set()
        self.is_shut_down = False
        self.asleep: list[str] = []
        self.sleep_error: str | None = None  # what freeing and restoring weights fails with

    def initialize(self) -> StartUp:
        if self.start_error is not None:
            kind, _, message = self.start_error.partition(": ")
            raise {"LoadError": LoadError, "ConfigError": ConfigError}.get(kind, RuntimeError)(message)
        spec = FullAttentionSpec(num_kv_heads=1, head_dim=4, dtype="float32", block_size=BLOCK_SIZE)
        assert self.config.cache.num_blocks_override is not None
        kv_cache_config = KVCacheConfig(self.config.cache.num_blocks_override, [KVGroup(["layers.0.attn"], spec)])
        return StartUp(kv_cache_config, "no memory at all", {"load": 0.0})

    def execute(self, step: SchedulerOutput) -> FakeHandle:
        self.steps.append(step)
        for row in step.freed_rows:
            self.rows.pop(row, None)
        for new in step.new_rows:
            assert new.row not in self.rows, f"row {new.row} is taken"
            self.rows[new.row] = _Row(new)
        rows = [self.rows[row] for row in step.rows]
        self._misbehave(rows)
        result = ModelRunnerOutput(step.step_id, [], logprobs={}, prompt_logprobs={}, errors={})
        for index, (row, num_tokens, samples) in enumerate(
            zip(rows, step.num_scheduled_tokens, step.samples, strict=True)
        ):
            self._compute(result, index, row, num_tokens, samples)
        return FakeHandle(result, self.gate)

    def sample(self, masks: TokenMasks) -> None:
        raise NotImplementedError("the fake follows no grammar")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        call = getattr(self, f"rpc_{method}") if isinstance(method, str) else lambda *a, **k: method(self, *a, **k)
        return [call(*args, **(kwargs or {}))]

    def rpc_echo(self, *args: Any, **kwargs: Any) -> Any:
        """Give back the arguments."""
        return [list(args), kwargs]

    def rpc_raise(self, message: str) -> None:
        raise ValueError(message)

    def rpc_num_rows(self) -> int:
        """Rows in use, as far as the scheduler has told."""
        return len(self.rows)

    def rpc_free_cache(self) -> None:
        """The rows go with the cache: whoever goes on must come back as new."""
        self.rows.clear()
        self.asleep.append("kv_cache")

    def rpc_restore_cache(self) -> None:
        self.asleep.remove("kv_cache")

    def rpc_free_weights(self, level: int) -> None:
        if self.sleep_error is not None:
            raise RuntimeError(self.sleep_error)
        self.asleep.append(f"weights at level {level}")

    def rpc_restore_weights(self) -> None:
        if self.sleep_error is not None:
            raise RuntimeError(self.sleep_error)
        self.asleep = [part for part in self.asleep if not part.startswith("weights")]

    def rpc_asleep(self) -> list[str]:
        return self.asleep

    def rpc_apply_model(self, func: Callable[[Any], Any]) -> Any:
        return func("the model")

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _misbehave(self, rows: "list[_Row]") -> None:
        prompts = {token_id for row in rows for token_id in row.prompt}
        if DIE in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if any(DIE_LATER in row.prompt and len(row.token_ids) >= len(row.prompt) + 5 for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in prompts:
            threading.Event().wait()
        if RAISE in prompts:
            raise RuntimeError("the step was told to fail")

    def _compute(self, result: ModelRunnerOutput, index: int, row: "_Row", num_tokens: int, samples: bool) -> None:
        assert result.logprobs is not None and result.prompt_logprobs is not None and result.errors is not None
        if FAIL_ROW in row.prompt:
            result.errors[index] = "the row was told to fail"
            result.sampled_token_ids.append([])
            return
        start, end = row.num_computed, row.num_computed + num_tokens
        assert end <= len(row.token_ids), "tokens were scheduled that nobody knows"
        row.num_computed = end
        if row.params.prompt_logprobs is not None:
            scored = row.token_ids[start + 1 : min(end + 1, len(row.prompt))]
            result.prompt_logprobs[index] = [score(token_id, row.params.prompt_logprobs) for token_id in scored]
        if not samples:
            result.sampled_token_ids.append([])
            return
        assert end == len(row.token_ids), "a token is sampled before the ones in front of it are computed"
        token_id = self._next_token(row)
        row.token_ids.append(token_id)
        result.sampled_token_ids.append([token_id])
        if row.params.logprobs is not None:
            result.logprobs[index] = [score(token_id, row.params.logprobs)]

    def _next_token(self, row: "_Row") -> int:
        num_generated = len(row.token_ids) - len(row.prompt)
        script = self.scripts.get(_key(row.prompt))
        if script is not None and num_generated < len(script):
            token_id = script[num_generated]
        else:
            salt = 0 if row.params.is_greedy else row.params.seed
            # Plain text: no special token by accident.
            token_id = 3 + zlib.crc32(repr((row.token_ids, salt)).encode()) % (VOCAB_SIZE - 3)
        while num_generated < row.params.min_tokens and token_id in row.stop_token_ids:
            token_id += 1
        return token_id


class _Row:
    """One request, as a worker sees it."""

    def __init__(self, new: NewRow):
        self.prompt = new.token_ids[: new.num_prompt_tokens]
        self.token_ids = new.token_ids.copy()
        self.num_computed = new.num_computed_tokens
        self.params = new.sampling_params
        self.stop_token_ids = new.stop_token_ids


def score(token_id: int, k: int) -> TokenLogprobs:
    """What the fake says about one position: the chosen token is the second best."""
    best = [(token_id + 1 - i) % VOCAB_SIZE for i in range(k)]  # token_id + 1, token_id, token_id - 1, …
    return TokenLogprobs([token_id, *best], [-0.75, *(-0.5 - 0.25 * i for i in range(k))], 2)


def _key(prompt: Sequence[int]) -> str:
    return ",".join(map(str, prompt))
