"""What the server asks of the engine: `AsyncLLM` offers it, and so does the double that tests use."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from octavo.config.engine import EngineConfig
from octavo.engine.sleep import PauseMode
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.outputs import RequestOutput
from octavo.types.pooling_outputs import PoolingOutput, PoolingRequestOutput
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PairPrompt, PromptType
from octavo.types.sampling_params import SamplingParams


class EngineClient(Protocol):
    """The part of `AsyncLLM` that serves requests."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def errored(self) -> bool:
        """The engine is gone for good."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """ClientError when the engine runs without one."""
        ...

    def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """An asynchronous generator; closing it aborts the request. A wrong request raises ClientError at once."""
        ...

    def encode(
        self,
        prompt: PromptType | PairPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """The same for a model that makes no text: one output."""
        ...

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by id, unknown ones aside: their readers get a last output with finish reason `abort`."""
        ...

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Start nothing new; ClientError when `mode` is not known."""
        ...

    async def resume_generation(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give memory back and refuse requests; ClientError when the engine cannot sleep like that."""
        ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> None: ...

    async def is_sleeping(self) -> bool: ...

    async def reset_prefix_cache(self) -> bool:
        """False when requests are running, and nothing was forgotten."""
        ...

    async def start_profile(self) -> None:
        """ConflictError while a profile is being taken."""
        ...

    async def stop_profile(self) -> list[str]:
        """The files written; ConflictError without a profile."""
        ...

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine is gone or its loop has not been heard of for too long,
        EngineAsleepError when it sleeps."""
        ...
