"""`Executor`: the only way from the engine to its workers.

The core does not know whether a worker lives in its own process, in others or on other machines. Implementations are
rows of `EXECUTORS`; a dotted `"module:Class"` is accepted too, for plugins.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.config.engine import EngineConfig
from octavo.errors import ConfigError
from octavo.types.kv_spec import KVCacheConfig
from octavo.types.sampling_params import SamplingParams
from octavo.types.step import ModelRunnerOutput, SchedulerOutput, TokenMasks

# Loaded by name, so that choosing one does not import the others (and torch with them).
EXECUTORS = {"uni": "octavo.engine.uni_executor:UniExecutor"}


class StepHandle(Protocol):
    """A step on its way through the workers."""

    def done(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return what it produced; raises what went wrong in it."""


@dataclass(frozen=True)
class StartUp:
    """What an executor learned while it started its workers."""

    kv_cache_config: KVCacheConfig
    memory_plan: str = ""  # a printable table in bytes
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> seconds


class Executor(ABC):
    """Runs steps on one or many workers."""

    def __init__(self, config: EngineConfig):
        self.config = config

    @abstractmethod
    def initialize(self) -> StartUp:
        """Load the model, plan memory, allocate the KV cache and warm up: the next call may be `execute`."""

    @abstractmethod
    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Start one step. Steps run in the order of the calls; the caller may start the next before this one ends."""

    @abstractmethod
    def sample(self, masks: TokenMasks) -> None:
        """Let the step started last, which awaits its masks, sample. Nothing else is started before this."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a public method by name, or `method(worker, *args)`, on every worker; results in rank order."""

    def validate_params(self, params: SamplingParams) -> None:
        """Raise ClientError when a custom logits processor cannot take a request with these parameters."""
        self.collective_rpc("validate_params", (params,))

    def check_health(self) -> None:  # noqa: B027 (a worker in this process needs no check)
        """Raise when a worker is beyond use. Called after a step failed, to tell a bad request from a dead worker."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the workers and what they hold. May be called twice."""


def make_executor(config: EngineConfig) -> Executor:
    """Build the executor that `config.parallel.executor` names."""
    return load_executor(config.parallel.executor)(config)


def load_executor(name: str) -> type[Executor]:
    """Import an executor, and with it whatever its workers stand on."""
    module_name, colon, class_name = EXECUTORS.get(name, name).partition(":")
    if not colon:
        raise ConfigError(f"executor={name!r} is not known; use one of {sorted(EXECUTORS)} or 'module:Class'.")
    cls: type[Executor] = getattr(importlib.import_module(module_name), class_name)
    return cls
