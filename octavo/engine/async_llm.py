"""`AsyncLLM`: the engine as an asynchronous library, with the core in a process of its own. The server stands on it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from octavo.config.args import EngineArgs
from octavo.config.engine import EngineConfig, ModelConfig
from octavo.engine.client import ProcessClient
from octavo.engine.configure import create_engine_config
from octavo.engine.input_processor import InputProcessor
from octavo.engine.open_request import OpenRequest
from octavo.engine.output_processor import OutputProcessor, Processed
from octavo.engine.protocol import StartReport
from octavo.engine.sleep import FrontSleep, PauseMode, check_pause_mode
from octavo.engine.spawn import SpawnedCore
from octavo.engine.stats import IterationStats, StatLogger
from octavo.engine.supervisor import Supervisor
from octavo.errors import ClientError, EngineDeadError, RequestFailedError
from octavo.loader.gguf_file import forget_gguf
from octavo.logger import get_logger
from octavo.tokenizer import get_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.outputs import EngineOutputs, RequestOutput
from octavo.types.pooling_outputs import PoolingOutput, PoolingRequestOutput
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PairPrompt, PromptType
from octavo.types.request import EngineRequest
from octavo.types.sampling_params import SamplingParams
from octavo.types.stats import SchedulerStats

logger = get_logger(__name__)

# A text longer than this is tokenised on a thread, so that the streams of others go on meanwhile.
LONG_TEXT = 16_384


class AsyncLLM:
    """Runs many requests at once; each is an asynchronous iterator of `RequestOutput`.

    All methods belong to one event loop. A request that is closed or cancelled is aborted in the core.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        client: ProcessClient | None = None,
        stat_loggers: Sequence[StatLogger] = (),
    ):
        """Start the engine and return when it serves. `client` is a core process that has no configuration yet."""
        self.config = config
        self.stat_loggers = list(stat_loggers)
        client = client or ProcessClient(SpawnedCore(config.parallel.executor))
        started = time.monotonic()
        try:
            client.configure(config)
            # The core loads its weights meanwhile.
            self._tokenizer = None if config.tokenizer.path is None else get_tokenizer(config.tokenizer)
            forget_gguf()  # the core has read it for itself
            self.report: StartReport = client.wait_ready()
        except BaseException:
            client.shutdown()
            raise
        self._core = Supervisor(client, config, self.report, self, start_seconds=time.monotonic() - started)
        self._sleep = FrontSleep(config.model)
        self._inputs = InputProcessor(config.model, config.scheduler, self._tokenizer, config.pooling)
        self._outputs = OutputProcessor(self._tokenizer, config.scheduler.stream_interval)
        self._dead_error: EngineDeadError | None = None
        self._is_shut_down = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._is_core_paused = False
        self._log_task: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, stat_loggers: Sequence[StatLogger] = (), core: SpawnedCore | None = None
    ) -> "AsyncLLM":
        """Start an engine from what a user types, in `core` where that was spawned already.

        The core's process comes up while the configuration is worked out.
        """
        client = ProcessClient(core or SpawnedCore(engine_args.distributed_executor_backend or "uni"))
        try:
            config = create_engine_config(engine_args)
        except BaseException:
            client.shutdown()
            raise
        return cls(config, client=client, stat_loggers=stat_loggers)

    # Requests

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answers to one prompt as they grow; `sampling_params.output_kind` says what each item holds.

        Raises ClientError before anything runs when the request is wrong, RequestFailedError when it failed inside the
        engine, EngineDeadError when the engine is gone for good: while a lost core is restarted, its requests wait and
        then go on. Leaving the iterator early aborts the request.
        """
        request = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            prompt_text=prompt_text,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        try:
            finished = False
            while not finished:
                await request.wait()
                output = request.take()
                finished = output.finished
                yield output
        finally:
            self._after(self._outputs.abort_request(request))

    async def encode(
        self,
        prompt: PromptType | PairPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the one answer of a pooling request; errors as in `generate`."""
        request = await self.add_request(
            request_id,
            prompt,
            pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        try:
            await request.wait()
            yield cast("PoolingRequestOutput[PoolingOutput]", request.take())
        finally:
            self._after(self._outputs.abort_request(request))

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType | PairPrompt,
        params: SamplingParams | PoolingParams,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> OpenRequest:
        """Send a request to the core. Its caller reads it with `wait` and `take`, and aborts it when it stops reading."""
        _refuse_unsupported(
            lora_request=lora_request, trace_headers=trace_headers, data_parallel_rank=data_parallel_rank or None
        )
        self._sleep.check_awake()
        self._listen()
        await self._resumed.wait()
        options = {"priority": priority, "tokenization_kwargs": tokenization_kwargs}
        if _text_length(prompt) > LONG_TEXT or (isinstance(prompt, Mapping) and "prompt_embeds" in prompt):
            read, engine_requests = await asyncio.to_thread(
                self._inputs.process,
                request_id,
                prompt,
                params,
                **options,  # type: ignore[arg-type]
            )
        else:
            read, engine_requests = self._inputs.process(request_id, prompt, params, **options)  # type: ignore[arg-type]
        if self.config.observability.enable_log_requests:
            given = read.encoder or read
            self._log_request(request_id, given.text, len(given.token_ids), params)
        self._core.add_requests(engine_requests)
        self._drained.clear()
        return self._outputs.add(request_id, prompt_text or read.text, engine_requests, read.encoder_text)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by id: their readers get a last output with finish reason `abort`."""
        self._after(self._outputs.abort([request_id] if isinstance(request_id, str) else request_id))

    # State

    @property
    def is_running(self) -> bool:
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        return self._is_shut_down or self.errored

    @property
    def errored(self) -> bool:
        return self._dead_error is not None

    @property
    def core_pid(self) -> int | None:
        """Process id of the core; None while there is none."""
        return self._core.pid

    @property
    def dead_error(self) -> BaseException:
        """Why the engine is dead."""
        return self._dead_error or EngineDeadError(
            "the engine was shut down." if self._is_shut_down else "it is alive."
        )

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ClientError when the engine runs without one."""
        return self._inputs.tokenizer

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine is gone, EngineRestartingError while its core is being restarted,
        EngineAsleepError while it sleeps."""
        if self._is_shut_down or self._dead_error is not None:
            raise self.dead_error
        self._listen()
        await asyncio.sleep(0)  # let what has arrived be read first
        self._core.check_health()
        self._sleep.check_awake()

    async def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    async def get_model_config(self) -> ModelConfig:
        return self.config.model

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",) if self.config.pooling is None else tuple(self.config.pooling.tasks)

    def get_num_unfinished_requests(self) -> int:
        return self._outputs.num_unfinished

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Return when no request is open; TimeoutError after `drain_timeout` seconds."""
        await asyncio.wait_for(self._drained.wait(), drain_timeout)

    async def do_log_stats(self) -> None:
        """Have every stat logger say what there is to say."""
        for stat_logger in self.stat_loggers:
            stat_logger.log()

    # Pausing

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Start nothing new, and return when nothing runs. Requests that come meanwhile wait for `resume_generation`.

        mode: what becomes of open requests: `abort` ends them, `wait` lets them finish, `keep` freezes them where they
        are. `clear_cache` forgets cached prefixes (frozen requests keep theirs), for when the weights are about to
        change.
        """
        check_pause_mode(mode)
        self._resumed.clear()
        if mode == "keep":
            self._is_core_paused = True
            await self._call("set_paused", True)
            return
        if mode == "abort":
            self._after(self._outputs.abort_all())
        await self._drained.wait()
        if clear_cache:
            # An aborted request gives its blocks back after the steps that are in flight.
            while not self._resumed.is_set() and not await self._call("reset_prefix_cache"):
                await asyncio.sleep(0.01)

    async def resume_generation(self) -> None:
        """Undo `pause_generation`."""
        if self._is_core_paused:
            self._is_core_paused = False
            await self._call("set_paused", False)
        self._resumed.set()

    async def is_paused(self) -> bool:
        return not self._resumed.is_set()

    # Sleeping

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give memory back until `wake_up`, and refuse requests meanwhile: `engine/sleep.py` tells the levels.

        `mode` says what becomes of open requests, as in `pause_generation`; kept ones go on after waking.
        """
        check_pause_mode(mode)
        if self._sleep.may_begin(level):
            # Shielded: an engine half asleep because somebody stopped waiting would be of no use to anybody.
            await asyncio.shield(self._fall_asleep(level, mode))

    async def _fall_asleep(self, level: int, mode: PauseMode) -> None:
        self._sleep.level = level  # at once: what comes from now on is refused
        try:
            await self.pause_generation(mode, clear_cache=False)
            await self._call("sleep", level)
        except BaseException:
            self._sleep.level = None
            await self.resume_generation()
            raise
        self._record(SchedulerStats(), None)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again that `tags` name, by default all; the engine serves once nothing sleeps."""
        if self._sleep.may_end(tags):
            await asyncio.shield(self._awake(tags))

    async def _awake(self, tags: Sequence[str] | None) -> None:
        if not await self._call("wake_up", tags):
            self._sleep.level = None
            self._record(SchedulerStats(), None)
            await self.resume_generation()

    async def is_sleeping(self) -> bool:
        return self._sleep.level is not None

    # Utilities

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; False when requests are running, and nothing was forgotten."""
        _refuse_unsupported(
            reset_running_requests=reset_running_requests or None, reset_connector=reset_connector or None
        )
        return bool(await self._call("reset_prefix_cache"))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name with plain data on every rank."""
        if not isinstance(method, str):
            raise ClientError("code does not cross to another process: name a method of the worker.", param="method")
        call = self._call("collective_rpc", method, list(args), kwargs or {})
        result: list[Any] = await asyncio.wait_for(call, timeout)
        return result

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Begin a profile in every worker; needs `profiler_config`."""
        await self.collective_rpc("start_profile", args=[profile_prefix, delay_iterations, max_iterations])

    async def stop_profile(self) -> list[str]:
        """End it; the files written."""
        return [file for file in await self.collective_rpc("stop_profile") if file is not None]

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core and every open request. May be called twice. `timeout`: seconds the core may take to end."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._log_task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._log_task.cancel()
        self._outputs.fail_all(EngineDeadError("the engine was shut down."))
        self._core.shutdown(timeout)

    async def _call(self, method: str, *args: Any) -> Any:
        self._listen()
        return await self._core.call(method, *args)

    # What the supervisor says

    def on_outputs(self, outputs: EngineOutputs) -> None:
        """Hand one step's outputs to the requests they belong to."""
        self._after(self._outputs.process(outputs), outputs.stats)

    def on_core_lost(self, error: EngineDeadError) -> None:
        """Nothing runs for now; what is open waits."""
        self._outputs.on_core_lost()
        self._record_waiting(None)

    def on_core_ready(self) -> None:
        """What waited is with the new core."""
        self._record_waiting(IterationStats(num_engine_restarts=1))

    def _record_waiting(self, iteration_stats: IterationStats | None) -> None:
        """Everything open waits; no core says so."""
        self._record(SchedulerStats(num_waiting=len(self._outputs.progress())), iteration_stats)

    def progress(self) -> dict[str, int]:
        """Tokens of every unfinished answer."""
        return self._outputs.progress()

    def resubmissions(self, request_ids: Iterable[str]) -> list[EngineRequest]:
        """Unfinished answers as a new core must get them."""
        return self._outputs.resubmissions(request_ids)

    def fail_request(self, request_id: str, error: RequestFailedError) -> None:
        """End one request with an error."""
        self._after(self._outputs.fail(request_id, error))

    def on_death(self, error: EngineDeadError) -> None:
        """Tell every open request that the engine is gone for good."""
        logger.error("the engine gives up: %s", error)
        self._dead_error = error
        self._after(self._outputs.fail_all(error))
        self._record_waiting(None)

    def _after(self, processed: Processed, scheduler_stats: SchedulerStats | None = None) -> None:
        """Do what follows from a change of requests: aborts to the core, records to the stat loggers."""
        if processed.aborts and not self.is_stopped:
            self._core.abort_requests(processed.aborts)
        if not self._outputs.num_unfinished:
            self._drained.set()
        if scheduler_stats is not None or processed.finished:
            self._record(scheduler_stats, processed.stats)

    def _record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        if scheduler_stats is not None:
            scheduler_stats.sleep_level = self._sleep.level  # also where a step's arrive late
        for stat_logger in self.stat_loggers:
            stat_logger.record(scheduler_stats, iteration_stats)

    def _listen(self) -> None:
        """Bind to the running loop; cheap when that is done."""
        self._core.listen()
        if self.stat_loggers and (self._log_task is None or self._log_task.done()):
            self._log_task = asyncio.get_running_loop().create_task(self._log_stats(), name="octavo-log-stats")

    async def _log_stats(self) -> None:
        while True:
            await asyncio.sleep(self.config.observability.log_stats_interval)
            await self.do_log_stats()

    def _log_request(
        self, request_id: str, text: str | None, num_tokens: int, params: SamplingParams | PoolingParams
    ) -> None:
        if isinstance(params, PoolingParams):
            logger.info("request %s: %d prompt tokens, %s", request_id, num_tokens, params)
            return
        # What a client wrote stands in the parameters too: stop strings, words, arguments.
        cut = self.config.observability.max_log_len
        public = msgspec.structs.replace(params, stop=None, bad_words=None, extra_args=None, structured_outputs=None)
        logger.info("request %s: %d prompt tokens, %s", request_id, num_tokens, public)
        for name in ("stop", "bad_words", "extra_args", "structured_outputs"):
            if (value := getattr(params, name)) is not None:
                logger.debug("request %s: %s %s", request_id, name, repr(value)[:cut])
        if text is not None:
            logger.debug("request %s: prompt %r", request_id, text[:cut])


# vLLM's older name.
AsyncLLMEngine = AsyncLLM


def _text_length(prompt: Any) -> int:
    if isinstance(prompt, Mapping) and "second" in prompt:
        return len(prompt["first"]) + len(prompt["second"])
    text = prompt.get("prompt") if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt else prompt
    return len(text) if isinstance(text, str) else 0


def _refuse_unsupported(**options: Any) -> None:
    """Refuse options that are part of the interface and that this engine cannot honour yet."""
    for name, value in options.items():
        if value is not None:
            raise ClientError(f"{name}={value!r} is not supported yet; leave it out.", param=name)
