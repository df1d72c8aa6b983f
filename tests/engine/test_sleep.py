"""Sleeping engines above the worker: what is refused, what goes on, what a lost core leaves behind."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.output_processor import Processed
from octavo.errors import ClientError, EngineAsleepError, ServerError
from octavo.metrics import StatCollector
from octavo.types.stats import SchedulerStats
from tests.engine.fakes import make_config
from tests.engine.test_core import make_core, request, run, tokens
from tests.engine.test_pause import LONG, TIMEOUT, Reader, greedy, until_restarted


def sleepy_config(**options):
    config = make_config(**options)
    return replace(config, model=replace(config.model, enable_sleep_mode=True))


@pytest.fixture
async def llm(tokenizer_dir):
    engine = AsyncLLM(sleepy_config(tokenizer=tokenizer_dir, **LONG))
    async with asyncio.timeout(TIMEOUT):
        yield engine
    engine.shutdown()


async def asleep(llm: AsyncLLM) -> list[str]:
    [parts] = await llm.collective_rpc("asleep")
    return parts


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_ran_goes_on_after_waking(async_scheduling):
    """Steps in flight are settled first; the rows are gone, so everything comes back as a new one."""
    undisturbed = run_alone(async_scheduling)
    core, _ = make_core(async_scheduling=async_scheduling)
    core.add_requests([request("a", [5, 6]), request("b", [7])])
    outputs = core.step().outputs
    assert core.call("sleep", [1], {}) == ["weights", "kv_cache"]
    while core.has_work:
        outputs += core.step().outputs
    core.on_idle()
    assert core.step() is None
    core.add_requests([request("c", [8])])  # of a front that restarted the core
    assert not core.has_work
    assert core.call("wake_up", [["kv_cache"]], {}) == ["weights"]
    assert not core.has_work
    assert core.call("wake_up", [], {}) == []
    rest = run(core)
    for name in "abc":
        got = [token for output in outputs if output.request_id == name for token in output.new_token_ids]
        assert got + tokens(rest[name]) == undisturbed[name]


def run_alone(async_scheduling: bool) -> dict[str, list[int]]:
    core, _ = make_core(async_scheduling=async_scheduling)
    core.add_requests([request("a", [5, 6]), request("b", [7]), request("c", [8])])
    return {name: tokens(outputs) for name, outputs in run(core).items()}


def test_parts_wake_one_by_one_and_what_fails_stays_asleep():
    core, executor = make_core()
    core.call("sleep", [2], {})
    assert executor.asleep == ["kv_cache", "weights at level 2"]
    executor.sleep_error = "no memory"
    with pytest.raises(RuntimeError, match="no memory"):
        core.call("wake_up", [], {})
    executor.sleep_error = None
    assert core.call("wake_up", [["weights"]], {}) == ["kv_cache"] and executor.asleep == ["kv_cache"]
    assert core.call("wake_up", [["kv_cache"]], {}) == [] and executor.asleep == []
    assert core.call("sleep", [0], {}) == ["scheduling"] and executor.asleep == []
    assert core.call("wake_up", [], {}) == []


def test_weights_that_find_no_room_on_the_host_leave_the_engine_awake():
    core, executor = make_core()
    executor.sleep_error = "no memory"
    with pytest.raises(RuntimeError, match="no memory"):
        core.call("sleep", [1], {})
    assert executor.asleep == []
    core.add_requests([request("a", [5])])
    assert len(tokens(run(core)["a"])) == 8


async def test_a_sleeping_engine_refuses_requests_and_says_so(llm):
    collector = StatCollector("fake", 100)
    llm.stat_loggers.append(collector)
    running = Reader(llm, "a", 90_000)
    await running.begun.wait()
    await llm.sleep()
    await running.task
    assert running.finish_reason == "abort" and await llm.is_sleeping()
    assert await asleep(llm) == ["kv_cache", "weights at level 1"] and sleep_state(collector) == "weights_offloaded"
    llm._after(Processed(), SchedulerStats())  # of a step before, arriving late
    assert sleep_state(collector) == "weights_offloaded"
    with pytest.raises(EngineAsleepError):
        await llm.check_health()
    with pytest.raises(EngineAsleepError, match="level 1"):
        await anext(llm.generate([5], greedy(1), "b"))
    await llm.sleep(level=2)  # asleep already: nothing changes
    assert await asleep(llm) == ["kv_cache", "weights at level 1"]
    await llm.wake_up(["weights"])
    assert await llm.is_sleeping() and await asleep(llm) == ["kv_cache"]
    await llm.wake_up()
    await llm.check_health()
    assert not await llm.is_sleeping() and not await llm.is_paused() and sleep_state(collector) == "awake"
    again = Reader(llm, "b", 3)
    await again.task
    assert len(again.token_ids) == 3
    await llm.wake_up()  # awake already: nothing changes


def sleep_state(collector: StatCollector) -> str:
    [family] = [family for family in collector.collect() if family.name.endswith("engine_sleep_state")]
    [state] = [sample.labels["sleep_state"] for sample in family.samples if sample.value]
    return state


async def test_modes(llm):
    waited = Reader(llm, "a", 300)
    await waited.begun.wait()
    await llm.sleep(mode="wait")
    assert (len(waited.token_ids), waited.finish_reason) == (300, "length")
    await llm.wake_up()
    kept = Reader(llm, "b", 2000)
    await kept.begun.wait()
    await llm.sleep(level=2, mode="keep")
    frozen = len(kept.token_ids)
    for _ in range(3):
        assert "weights at level 2" in await asleep(llm)
    assert not kept.task.done() and len(kept.token_ids) <= frozen + 2
    await llm.wake_up()
    await kept.task
    assert (len(kept.token_ids), kept.finish_reason) == (2000, "length")


async def test_a_restarted_core_sleeps_on(llm):
    kept = Reader(llm, "a", 500)
    await kept.begun.wait()
    await llm.sleep(level=1, mode="keep")
    await llm.wake_up(["weights"])
    os.kill(llm.core_pid, signal.SIGKILL)
    await until_restarted(llm, llm.core_pid)
    assert await asleep(llm) == ["kv_cache"] and await llm.is_sleeping()
    await llm.wake_up()
    await kept.task
    assert (len(kept.token_ids), kept.finish_reason) == (500, "length")


async def test_a_core_that_dies_on_the_way_leaves_a_waking_engine_asleep(llm):
    await llm.sleep()
    waking = asyncio.create_task(llm.wake_up())
    os.kill(llm.core_pid, signal.SIGKILL)
    with pytest.raises(ServerError, match="again"):
        await waking
    assert await llm.is_sleeping()
    await llm.wake_up()
    assert await asleep(llm) == [] and not await llm.is_sleeping()


async def test_what_is_asked_is_checked(llm, tokenizer_dir):
    for call, named in (
        (llm.sleep(level=3), "level"),
        (llm.sleep(mode="soon"), "mode"),
        (llm.wake_up(["cache"]), "weights, kv_cache"),
    ):
        with pytest.raises(ClientError, match=named):
            await call
    assert not await llm.is_sleeping()
    plain = AsyncLLM(make_config(tokenizer=tokenizer_dir))
    try:
        with pytest.raises(ClientError, match="enable_sleep_mode"):
            await plain.sleep()
    finally:
        plain.shutdown()
