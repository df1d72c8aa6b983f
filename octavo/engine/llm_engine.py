"""`LLMEngine`: the engine as a synchronous library, all of it in this process. `LLM` stands on it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.engine import EngineConfig, ModelConfig
from octavo.engine.client import InProcessClient
from octavo.engine.configure import create_engine_config
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.output_processor import OutputProcessor, Processed
from octavo.engine.protocol import StartReport
from octavo.engine.sleep import FrontSleep
from octavo.engine.stats import IterationStats, StatLogger
from octavo.tokenizer import get_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.outputs import RequestOutput
from octavo.types.pooling_outputs import PoolingOutput, PoolingRequestOutput
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PairPrompt, PromptType
from octavo.types.request import EngineRequest
from octavo.types.sampling_params import SamplingParams
from octavo.types.stats import SchedulerStats


@dataclass(frozen=True)
class PreparedRequest:
    """A request that has passed every check and has not been sent."""

    request_id: str
    prompt: Prompt
    engine_requests: list[EngineRequest]


class LLMEngine:
    """Requests in with `add_request`, outputs out with `step`. Not thread-safe."""

    def __init__(self, config: EngineConfig, *, stat_loggers: Sequence[StatLogger] = ()):
        self.config = config
        self.stat_loggers = list(stat_loggers)
        self._tokenizer = None if config.tokenizer.path is None else get_tokenizer(config.tokenizer)
        self._client = InProcessClient(config)
        self._sleep = FrontSleep(config.model)
        self._inputs = InputProcessor(config.model, config.scheduler, self._tokenizer, config.pooling)
        self._outputs = OutputProcessor(self._tokenizer, config.scheduler.stream_interval)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, stat_loggers: Sequence[StatLogger] = ()) -> "LLMEngine":
        """Start an engine from what a user types."""
        return cls(create_engine_config(engine_args, usage="llm"), stat_loggers=stat_loggers)

    @property
    def report(self) -> StartReport:
        return self._client.report

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; ClientError when the engine runs without one."""
        return self._inputs.tokenizer

    def read_prompt(self, prompt: PromptType) -> Prompt:
        """The tokens of a prompt in any spelling; ClientError when it has none."""
        return self._inputs.read_prompt(prompt)

    def prepare(
        self,
        request_id: str,
        prompt: PromptType | PairPrompt,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> PreparedRequest:
        """Check a request and read its prompt; nothing runs yet. Raises ClientError when it is wrong."""
        self._sleep.check_awake()
        read, engine_requests = self._inputs.process(
            request_id, prompt, params, priority=priority, tokenization_kwargs=tokenization_kwargs
        )
        if self.model_config.logits_processors:  # the core would refuse it too, but after others have begun
            self.collective_rpc("validate_params", args=(params,))
        return PreparedRequest(request_id, read, engine_requests)

    def submit(self, request: PreparedRequest) -> None:
        """Queue a prepared request."""
        self._client.add_requests(request.engine_requests)
        prompt = request.prompt
        self._outputs.add(request.request_id, prompt.text, request.engine_requests, prompt.encoder_text)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | PairPrompt,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check and queue a request."""
        self.submit(
            self.prepare(request_id, prompt, params, priority=priority, tokenization_kwargs=tokenization_kwargs)
        )

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """End requests by id. They give no further output."""
        self._after(self._outputs.abort(request_ids))

    def abort_all(self) -> None:
        """End every request and let the core come to rest."""
        self._after(self._outputs.abort_all())
        while self._client.has_work:
            self.step()

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """Run one step; the outputs of the requests that have something new to show.

        A request that failed has an output with `error` and finish reason `error`; the others go on. EngineDeadError
        when the core itself failed.
        """
        outputs = self._client.step()
        if outputs is None:
            return []
        processed = self._outputs.process(outputs)
        self._after(processed, outputs.stats)
        return [request.take() for request in processed.updated]

    def has_unfinished_requests(self) -> bool:
        return self._outputs.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        return self._outputs.num_unfinished

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False when requests are running, and nothing was forgotten."""
        return bool(self._client.call("reset_prefix_cache"))

    def may_sleep(self, level: int) -> bool:
        """False when it sleeps already; ClientError when it cannot sleep like that."""
        return self._sleep.may_begin(level)

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: `engine/sleep.py` tells the levels. Open requests wait in the core."""
        if self.may_sleep(level):
            self._client.call("sleep", level)
            self._sleep.level = level
            self._record(SchedulerStats(sleep_level=level), None)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again that `tags` name, by default all; the engine serves once nothing sleeps."""
        if self._sleep.may_end(tags) and not self._client.call("wake_up", tags):
            self._sleep.level = None
            self._record(SchedulerStats(), None)

    @property
    def is_sleeping(self) -> bool:
        return self._sleep.level is not None

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or `method(worker, ...)`, on every rank."""
        results: list[Any] = self._client.call("collective_rpc", method, args, kwargs, timeout)
        return results

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Begin a profile in every worker; needs `profiler_config`."""
        self.collective_rpc("start_profile", args=(profile_prefix, delay_iterations, max_iterations))

    def stop_profile(self) -> list[str]:
        """End it; the files written."""
        return [file for file in self.collective_rpc("stop_profile") if file is not None]

    def do_log_stats(self) -> None:
        """Have every stat logger say what there is to say."""
        for stat_logger in self.stat_loggers:
            stat_logger.log()

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._client.shutdown()

    def _after(self, processed: Processed, scheduler_stats: SchedulerStats | None = None) -> None:
        if processed.aborts:
            self._client.abort_requests(processed.aborts)
        if scheduler_stats is not None or processed.finished:
            self._record(scheduler_stats, processed.stats)

    def _record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        for stat_logger in self.stat_loggers:
            stat_logger.record(scheduler_stats, iteration_stats)
