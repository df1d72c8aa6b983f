"""One worker in the core's own process: the executor of a single device."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.config.engine import EngineConfig
from octavo.engine.executor import Executor, StartUp, StepHandle
from octavo.errors import ServerError
from octavo.logger import get_logger
from octavo.types.kv_spec import FullAttentionSpec, KVCacheConfig, KVGroup, make_kv_groups
from octavo.types.step import SchedulerOutput, TokenMasks
from octavo.worker.worker import Worker

logger = get_logger(__name__)


class UniExecutor(Executor):
    """Calls the worker directly; what overlaps is up to the worker's own streams and threads."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._worker: Worker | None = Worker(config)

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise ServerError("the executor has been shut down.")
        return self._worker

    def initialize(self) -> StartUp:
        seconds: dict[str, float] = {}
        with _timed(seconds, "load"):
            self.worker.load_model()
        groups = make_kv_groups(self.worker.kv_specs())
        has_states = self.worker.has_row_states()
        if has_states and self.config.cache.enable_prefix_caching:
            logger.info(
                "prefix caching is off: recurrent layers keep the state of a whole request, not of its prefixes"
            )
        if not groups:  # nothing attends: tables of blocks that take no bytes
            cache = self.config.cache
            groups = [KVGroup([], FullAttentionSpec(0, 0, cache.kv_cache_dtype, cache.block_size))]
        with _timed(seconds, "plan"):
            plan = self.worker.plan_memory(groups)
        kv_cache_config = KVCacheConfig(plan.num_blocks, groups, has_states)
        with _timed(seconds, "warm_up"):
            self.worker.initialize_kv_cache(kv_cache_config)
            self.worker.warm_up()
        return StartUp(kv_cache_config, plan.table(), seconds)

    def execute(self, step: SchedulerOutput) -> StepHandle:
        return self.worker.execute(step)

    def sample(self, masks: TokenMasks) -> None:
        self.worker.sample(masks)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """As in `Executor`; the call runs on this thread, so `timeout` cannot cut it short."""
        if isinstance(method, str):
            return [self.worker.call(method, *args, **(kwargs or {}))]
        return [method(self.worker, *args, **(kwargs or {}))]

    def shutdown(self) -> None:
        self._worker = None


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - started
