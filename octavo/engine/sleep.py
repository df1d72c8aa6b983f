"""Sleep: an engine that is not needed for a while gives its memory back, and takes it again when it is woken.

    level 0   nothing is freed; no step runs
    level 1   the KV cache goes, with graphs and step buffers; weights wait in host memory
    level 2   weights go too, and are read from disk again

What ran goes back to the queue as if preempted, and goes on when all parts are awake. Waking takes tags, so that weights
can come back, and be changed, before the cache takes its memory.
"""

import gc
import time
from collections.abc import Sequence
from typing import Literal, get_args

from octavo.config.engine import ModelConfig
from octavo.engine.executor import Executor
from octavo.errors import ClientError, EngineAsleepError
from octavo.logger import get_logger
from octavo.scheduler.scheduler import Scheduler

logger = get_logger(__name__)

# What becomes of open requests when an engine pauses or goes to sleep.
PauseMode = Literal["abort", "wait", "keep"]
WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
# What sleeps at each level.
LEVELS = {0: [SCHEDULING], 1: [WEIGHTS, KV_CACHE], 2: [WEIGHTS, KV_CACHE]}


def check_pause_mode(mode: str) -> None:
    """Raise ClientError for a mode that is not known."""
    if mode not in get_args(PauseMode):
        raise ClientError(f"mode={mode!r} is not known; use one of {', '.join(get_args(PauseMode))}.", param="mode")


class CoreSleep:
    """The core's side: puts parts of it to sleep and wakes them. No step may be in flight."""

    def __init__(self, executor: Executor, scheduler: Scheduler):
        self._executor = executor
        self._scheduler = scheduler
        self._level = 0
        self.parts: list[str] = []  # that sleep; steps run while there are none

    def begin(self, level: int, parts: Sequence[str] | None = None) -> list[str]:
        """Free what the level says, or only `parts` of it; returns what sleeps."""
        started = time.monotonic()
        parts = LEVELS[level] if parts is None else parts
        if level > 0:
            self._scheduler.preempt_all()
            was_reset = self._scheduler.reset_prefix_cache()
            assert was_reset, "blocks are held although nothing runs"
            self._executor.collective_rpc("free_cache")
            if WEIGHTS in parts:
                self._free_weights(level)
        self._level, self.parts = level, list(parts)
        logger.info("asleep at level %d after %.2f s", level, time.monotonic() - started)
        return self.parts

    def _free_weights(self, level: int) -> None:
        try:
            self._executor.collective_rpc("free_weights", (level,))
        except Exception:
            self._executor.collective_rpc("restore_cache")
            raise

    def end(self, tags: Sequence[str] | None = None) -> list[str]:
        """Bring back what `tags` name, None: everything; returns what still sleeps. What fails stays asleep.

        The cache is laid out by the model, so it waits for the weights, whatever the order of the tags.
        """
        started = time.monotonic()
        staying = [part for part in self.parts if tags is not None and part not in tags]
        if WEIGHTS in self.parts and WEIGHTS not in staying:
            self._executor.collective_rpc("restore_weights")
            self.parts = [KV_CACHE]
        if not staying and self._level > 0:
            self._executor.collective_rpc("restore_cache")
            gc.collect()
            gc.freeze()  # as after the start
        self.parts = staying
        logger.info(
            "%s after %.2f s", f"{', '.join(staying)} still asleep" if staying else "awake", time.monotonic() - started
        )
        return self.parts


class FrontSleep:
    """The front's side: checks what is asked, and refuses requests while the engine sleeps."""

    def __init__(self, model: ModelConfig):
        self._is_enabled = model.enable_sleep_mode
        self.level: int | None = None  # None: awake

    def may_begin(self, level: int) -> bool:
        """False when the engine sleeps already. ClientError when it cannot sleep like that."""
        if not self._is_enabled:
            raise ClientError("this engine was not made to sleep; start it with enable_sleep_mode.")
        if level not in LEVELS:
            raise ClientError(f"level={level!r} is not known; use 0, 1 or 2.", param="level")
        if self.level is not None:
            logger.warning("the engine sleeps at level %d already; wake it up first", self.level)
        return self.level is None

    def may_end(self, tags: Sequence[str] | None) -> bool:
        """False when the engine is awake. ClientError when a tag is not known."""
        known = [WEIGHTS, KV_CACHE, SCHEDULING]
        for tag in tags or ():
            if tag not in known:
                raise ClientError(f"tag {tag!r} is not known; use {', '.join(known)}.", param="tags")
        return self.level is not None

    def check_awake(self) -> None:
        """Raise EngineAsleepError while the engine sleeps."""
        if self.level is not None:
            raise EngineAsleepError(f"the engine sleeps at level {self.level} and takes no requests; wake it up.")
