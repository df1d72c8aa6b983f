"""Names for the calls of a step in profiles: schedule, execute and update.

The methods are replaced on the objects, and only when somebody wants to see them: without a profiler a step pays nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

from octavo.config.engine import EngineConfig
from octavo.engine.executor import Executor
from octavo.scheduler.scheduler import Scheduler


def add_step_ranges(config: EngineConfig, scheduler: Scheduler, executor: Executor) -> None:
    """Wrap the three calls in ranges of whichever profilers are configured."""
    import torch  # a core has it, a front that imports this does not

    kinds: list[Callable[[str], Any]] = []
    if config.profiler is not None and config.profiler.folder is not None:
        kinds.append(torch.profiler.record_function)
    if config.observability.nvtx:
        kinds.append(torch.cuda.nvtx.range)
    if not kinds:
        return
    for owner, method in ((scheduler, "schedule"), (executor, "execute"), (scheduler, "update")):
        setattr(owner, method, _ranged(getattr(owner, method), f"octavo: {method}", kinds))


def _ranged(call: Callable[..., Any], name: str, kinds: Sequence[Callable[[str], Any]]) -> Callable[..., Any]:
    @wraps(call)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(kind(name))
            return call(*args, **kwargs)

    return ranged
