"""Pausing an engine and what it logs of requests."""

import asyncio
import contextlib
import logging
import os
import signal
from dataclasses import replace

import pytest

from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ClientError, ServerError
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fakes import make_config
from tests.engine.test_core import make_core, request, run, tokens

TIMEOUT = 20.0
LONG = {"max_model_len": 100_000, "num_blocks": 14_000}


@pytest.fixture
async def llm(tokenizer_dir):
    config = make_config(tokenizer=tokenizer_dir, **LONG)
    observability = replace(config.observability, enable_log_requests=True, max_log_len=5)
    engine = AsyncLLM(replace(config, observability=observability))
    async with asyncio.timeout(TIMEOUT):
        yield engine
    engine.shutdown()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)


class Reader:
    """A request being read, and how far it is."""

    def __init__(self, llm: AsyncLLM, name: str, max_tokens: int):
        self.token_ids: list[int] = []
        self.finish_reason = None
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(llm, name, max_tokens))

    async def _read(self, llm, name, max_tokens):
        async for output in llm.generate([5, 6], greedy(max_tokens), name):
            self.token_ids += output.outputs[0].token_ids
            self.finish_reason = output.outputs[0].finish_reason
            self.begun.set()


async def test_abort_ends_what_runs_and_holds_what_comes(llm):
    running = Reader(llm, "a", 90_000)
    await running.begun.wait()
    await llm.pause_generation()
    await running.task
    assert running.finish_reason == "abort" and await llm.is_paused()
    held = Reader(llm, "b", 3)
    await asyncio.sleep(0)
    assert llm.get_num_unfinished_requests() == 0
    await llm.resume_generation()
    await held.task
    assert (len(held.token_ids), held.finish_reason, await llm.is_paused()) == (3, "length", False)


async def test_wait_lets_requests_finish(llm):
    running = Reader(llm, "a", 400)
    await running.begun.wait()
    await llm.pause_generation("wait")
    await running.task
    assert (len(running.token_ids), running.finish_reason) == (400, "length")
    await llm.resume_generation()


async def test_keep_freezes_and_goes_on(llm):
    running = Reader(llm, "a", 2000)
    await running.begun.wait()
    await llm.pause_generation("keep")
    frozen = len(running.token_ids)
    for _ in range(3):
        assert not await llm.reset_prefix_cache()  # a round trip to the core: nothing is scheduled meanwhile
    late = len(running.token_ids)
    assert not await llm.reset_prefix_cache()
    assert frozen <= late == len(running.token_ids) < 2000
    await llm.resume_generation()
    await running.task
    assert (len(running.token_ids), running.finish_reason) == (2000, "length")


async def test_a_restarted_core_stays_paused(llm):
    running = Reader(llm, "a", 1000)
    await running.begun.wait()
    await llm.pause_generation("keep")
    await llm.reset_prefix_cache()  # what was on its way has arrived
    frozen = len(running.token_ids)
    os.kill(llm.core_pid, signal.SIGKILL)
    await until_restarted(llm, llm.core_pid)
    for _ in range(5):
        await llm.reset_prefix_cache()
    assert len(running.token_ids) <= frozen + 2  # steps in flight when the core heard of the pause
    await llm.resume_generation()
    await running.task
    assert (len(running.token_ids), running.finish_reason) == (1000, "length")


async def until_restarted(llm: AsyncLLM, old: int | None) -> None:
    """Utilities wait for a core that serves."""
    while llm.core_pid in (old, None):
        with contextlib.suppress(ServerError):  # lost with the old core
            await llm.collective_rpc("echo", args=[1])


async def test_modes(llm):
    with pytest.raises(ClientError, match="abort, wait, keep"):
        await llm.pause_generation("soon")
    assert not await llm.is_paused()


def test_a_paused_core_schedules_nothing_and_loses_nothing():
    for async_scheduling in (False, True):
        core, _ = make_core(async_scheduling=async_scheduling)
        core.add_requests([request("a", [5, 6])])
        outputs = core.step().outputs
        core.call("set_paused", [True], {})
        while core.has_work:
            outputs += core.step().outputs
        core.on_idle()
        assert core.step() is None and len(tokens(outputs)) < 8
        core.add_requests([request("b", [7])])
        assert not core.has_work
        core.call("set_paused", [False], {})
        rest = run(core)
        assert len(tokens(outputs + rest["a"])) == len(tokens(rest["b"])) == 8


async def test_what_is_logged_of_a_request(llm, monkeypatch):
    """FC: a log must not become a copy of the traffic: text is cut, whichever field it came in."""
    records = []
    log = logging.getLogger("octavo.engine.async_llm")
    monkeypatch.setattr(log, "level", logging.DEBUG)
    log._cache.clear()
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log.addHandler(handler)
    try:
        params = SamplingParams(max_tokens=1, stop=["confidential stop"], bad_words=["confidential word"])
        async for _ in llm.generate("short and confidential", params, "r"):
            pass
    finally:
        log.removeHandler(handler)
        log._cache.clear()
    assert any("request r: prompt 'short'" in line for line in records)
    assert "max_tokens=1" in records[0]
    assert not any("confidential" in line for line in records)
