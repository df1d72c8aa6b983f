"""Sends requests at given times, no more than so many at once."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from octavo.bench.backends import RequestResult


async def run_load(
    send: Callable[[int], Awaitable[RequestResult]],
    times: Sequence[float],
    max_concurrency: int | None = None,
    on_done: Callable[[RequestResult], object] = lambda result: None,
) -> tuple[list[RequestResult], float]:
    """Call `send(i)` at `times[i]` (seconds from now, rising), later when `max_concurrency` are open.

    Returns the results in order, and the seconds until the last one was there. When the load is cancelled, so are all
    its requests.
    """
    slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(index: int) -> RequestResult:
        async with slots:
            result = await send(index)
        on_done(result)
        return result

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, moment in enumerate(times):
            await asyncio.sleep(max(0.0, started + moment - time.perf_counter()))
            tasks.append(group.create_task(one(index)))
    return [task.result() for task in tasks], time.perf_counter() - started
