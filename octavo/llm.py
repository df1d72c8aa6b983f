"""`LLM`: a model, ready to answer, in this process. Where a reader of Octavo starts."""

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import FrameType, TracebackType
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from tqdm import tqdm

from octavo.config.args import EngineArgs
from octavo.engine.beam_search import BeamSearch, scores_of, step_params
from octavo.engine.llm_engine import LLMEngine, PreparedRequest
from octavo.engine.sleep import PauseMode, check_pause_mode
from octavo.errors import ClientError, ServerError
from octavo.llm_pooling import PoolingMethods, as_list, one_each
from octavo.metrics import Metric, StatCollector, make_registry, read_metrics
from octavo.tokenizer.messages import ContentFormat
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.outputs import BeamSearchOutput, RequestOutput
from octavo.types.pooling_outputs import PoolingOutput, PoolingRequestOutput
from octavo.types.prompts import PromptType, TokensPrompt
from octavo.types.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Messages = list[dict[str, Any]]


class LLM(PoolingMethods):
    """An engine for batches of prompts.

    >>> llm = LLM("smollm2")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text
    ' Paris.'

    Scheduler, worker and text run in this process, one thread, without a server. When the constructor returns, the model
    is loaded and its cache allocated. Wrong arguments raise `ClientError` (a `ValueError`).
    """

    def __init__(self, model: str, **engine_args: Any):
        """`engine_args`: any option of `EngineArgs` by name."""
        engine_args.setdefault("disable_log_stats", True)
        self._start(EngineArgs.from_kwargs(model=model, **engine_args))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Like the constructor, from arguments that exist already."""
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, engine_args: EngineArgs) -> None:
        self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self._metrics: CollectorRegistry | None = None
        config = self.llm_engine.config
        if not config.observability.disable_log_stats:
            collector = StatCollector(config.model.served_model_names[0], config.model.max_model_len)
            collector.set_cache_config(config.cache, self.llm_engine.report.num_blocks)
            self.llm_engine.stat_loggers.append(collector)
            self._metrics = make_registry(collector)
        self.serial = count()
        self._enqueued: list[str] = []
        self._outputs: dict[str, Any] = {}

    # Answers

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in the order they came.

        A prompt is text, a list of token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or, with
        `enable_prompt_embeds`, `{"prompt_embeds": tensor}`. Parameters and priority are one value for all or one a
        prompt; without parameters, the model's own defaults hold. Nothing runs when any request is wrong. A request that
        fails inside the engine has an output with `error`; the others are answered.
        """
        return self.run(
            self._prepare(as_list(prompts), sampling_params, lora_request, priority, tokenization_kwargs), use_tqdm
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; each becomes a prompt through the model's chat template."""
        conversations = _as_conversations(messages)
        tokenizer = self.llm_engine.get_tokenizer()
        prompts: list[PromptType] = []
        for conversation in conversations:
            prompt = tokenizer.encode_chat(
                conversation,
                tools=tools,
                chat_template=chat_template,
                trust_chat_template=True,  # whoever holds this object could run anything
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": prompt.text, "prompt_token_ids": prompt.token_ids})
        return self.run(self._prepare(prompts, sampling_params, lora_request, priority, tokenization_kwargs), use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts as `generate` does, and return their request ids; `wait_for_completion` answers them."""
        return self._submit(
            self._prepare(as_list(prompts), sampling_params, lora_request, priority, tokenization_kwargs)
        )

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., tqdm] = True) -> list[RequestOutput]:
        """Answer everything enqueued, in the order it was."""
        request_ids, self._enqueued = self._enqueued, []
        self._finish(request_ids, use_tqdm)
        return [self._outputs.pop(request_id) for request_id in request_ids]

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool | Callable[..., tqdm] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest `params.beam_width` answers to each prompt, prompt included, best first.

        `concurrency_limit`: how many prompts are searched at a time; default: all.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            raise ClientError(f"concurrency_limit={concurrency_limit} must be at least 1.", param="concurrency_limit")
        model = self.llm_engine.model_config
        step = step_params(params, model.max_logprobs)
        searches = []
        for given in as_list(prompts):
            read = self.llm_engine.read_prompt(given)
            if read.embeds is not None:
                raise ClientError(
                    "beam_search extends the tokens of a prompt, and prompt_embeds has none.", param="prompt_embeds"
                )
            room = model.max_model_len - len(read.token_ids)
            encoder = None if read.encoder is None else TokensPrompt(prompt_token_ids=read.encoder.token_ids)
            searches.append(BeamSearch(read.token_ids, params, model.eos_token_ids, room, encoder))
        tokenizer = None if self.llm_engine.config.tokenizer.path is None else self.llm_engine.get_tokenizer()
        size = concurrency_limit or max(len(searches), 1)
        with _Progress(len(searches), use_tqdm) as progress:
            for start in range(0, len(searches), size):
                group = searches[start : start + size]
                self._search(group, step, lora_request)
                progress.advance(len(group))
        return [BeamSearchOutput(search.result(tokenizer)) for search in searches]

    # The engine

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; ClientError when the engine runs without one."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds when `generate` gets no parameters: the model's generation_config.json over Octavo's defaults."""
        return SamplingParams(**self.llm_engine.model_config.default_sampling_params)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers."""
        parallel = self.llm_engine.config.parallel
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return size * parallel.data_parallel_size if include_dp else size

    def get_metrics(self) -> list[Metric]:
        """A snapshot of everything counted; needs `LLM(..., disable_log_stats=False)`."""
        if self._metrics is None:
            raise ClientError("nothing is counted; create the LLM with disable_log_stats=False.")
        return read_metrics(self._metrics)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; False when requests are running, and nothing was forgotten."""
        if reset_running_requests or reset_connector:
            raise ClientError("reset_prefix_cache takes no options yet: it resets the local cache while it is unused.")
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give the memory back until `wake_up`; needs `LLM(..., enable_sleep_mode=True)`.

        level: 0 frees nothing, 1 drops the KV cache and moves the weights to host memory, 2 drops both. mode: what becomes
        of enqueued requests: `abort` forgets them, `wait` answers them first, `keep` leaves them for after waking.
        """
        check_pause_mode(mode)
        if not self.llm_engine.may_sleep(level):
            return
        if mode == "abort":
            self._enqueued.clear()
            self._outputs.clear()
            self.llm_engine.abort_all()
        elif mode == "wait":
            self._finish(self._enqueued, use_tqdm=False)
        self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again: all of it, or what `tags` name (`weights`, `kv_cache`). Level 2 reads the disk again."""
        self.llm_engine.wake_up(tags)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or `method(worker, ...)`, on every worker; results in rank order."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Run `func(model)` in every worker."""
        return self.llm_engine.collective_rpc("apply_model", args=(func,))

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record the steps from now on; needs `LLM(..., profiler_config={"torch_profiler_dir": folder})`."""
        self.llm_engine.start_profile(profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)

    def stop_profile(self) -> list[str]:
        """Write what was recorded: Chrome traces, for https://ui.perfetto.dev; returns the files."""
        return self.llm_engine.stop_profile()

    def shutdown(self) -> None:
        """Let go of the model and the cache; the object is of no use afterwards."""
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # Inside

    def _prepare(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: Any,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[PreparedRequest]:
        """Check every request before the first one runs."""
        if lora_request is not None:
            raise ClientError(
                f"lora_request={lora_request!r} is not supported yet; leave it out.", param="lora_request"
            )
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_each("sampling_params", sampling_params, SamplingParams, len(prompts))
        priorities = one_each("priority", 0 if priority is None else priority, int, len(prompts))
        return [
            self.llm_engine.prepare(
                str(next(self.serial)),
                prompt,
                msgspec.structs.replace(own, output_kind=RequestOutputKind.FINAL_ONLY),
                priority=rank,
                tokenization_kwargs=tokenization_kwargs,
            )
            for prompt, own, rank in zip(prompts, params, priorities, strict=True)
        ]

    def _search(self, searches: list[BeamSearch], step: SamplingParams, lora_request: Any) -> None:
        """Run searches to their ends, each round one request a beam."""
        while any(search.beams for search in searches):
            prompts: list[PromptType] = [search.prompt_of(beam) for search in searches for beam in search.beams]
            outputs = iter(self.run(self._prepare(prompts, step, lora_request, None, None), use_tqdm=False))
            for search in searches:
                if search.beams:
                    search.advance([scores_of(next(outputs)) for _ in search.beams])

    def _submit(self, requests: list[PreparedRequest]) -> list[str]:
        for request in requests:
            self.llm_engine.submit(request)
        request_ids = [request.request_id for request in requests]
        self._enqueued += request_ids
        return request_ids

    def run(self, requests: list[PreparedRequest], use_tqdm: bool | Callable[..., tqdm]) -> list[Any]:
        """Answer prepared requests, in their order."""
        if self._enqueued:
            raise ServerError("requests are enqueued; call wait_for_completion before generate or chat.")
        self._submit(requests)
        return self.wait_for_completion(use_tqdm=use_tqdm)

    def _finish(self, request_ids: list[str], use_tqdm: bool | Callable[..., tqdm]) -> None:
        """Step until every request is answered. Whatever ends this early aborts them all, so the engine stays usable."""
        engine = self.llm_engine
        with _Progress(len(request_ids), use_tqdm) as progress, _InterruptBetweenSteps() as interrupt:
            try:
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        self._outputs[output.request_id] = output
                        progress.add(output)
                    interrupt.check()
            except BaseException:
                self._outputs.clear()
                engine.abort_all()
                raise


class _Progress:
    """A progress bar over requests, with the token rates beside it."""

    def __init__(self, num_requests: int, use_tqdm: bool | Callable[..., tqdm]):
        make = tqdm if use_tqdm is True else use_tqdm
        self._bar = make(total=num_requests, desc="Processed prompts", dynamic_ncols=True) if make else None
        self._num_prompt_tokens = self._num_generation_tokens = 0

    def add(self, output: RequestOutput | PoolingRequestOutput[PoolingOutput]) -> None:
        """One request is done."""
        if self._bar is None:
            return
        self._num_prompt_tokens += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._num_generation_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_prompt_tokens / seconds:.0f} tokens/s, "
            f"output {self._num_generation_tokens / seconds:.0f} tokens/s",
            refresh=False,
        )
        self._bar.update()

    def advance(self, num: int) -> None:
        """That many are done, without counts of tokens."""
        if self._bar is not None:
            self._bar.update(num)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


class _InterruptBetweenSteps:
    """Holds back Ctrl-C until a step is over, so that it finds the engine in order. A second one is not held back."""

    def __init__(self) -> None:
        self._is_pending = False
        # Only the main thread gets signals, and a handler of the caller's own is left alone.
        self._is_active = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )

    def check(self) -> None:
        """Raise the interrupt that came during the step."""
        if self._is_pending:
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True

    def __enter__(self) -> "_InterruptBetweenSteps":
        if self._is_active:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _as_conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """One conversation as a list of one."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return messages  # type: ignore[return-value]
