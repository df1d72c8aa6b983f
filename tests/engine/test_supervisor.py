"""Promise 4: a dead core does not end a stream. Cores in child processes are killed, stopped and poisoned."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

import octavo.engine.supervisor
from octavo.config.engine import EngineConfig
from octavo.config.hf import HFConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import EngineDeadError, EngineRestartingError, QueueFullError, RequestFailedError, ServerError
from octavo.types.outputs import RequestOutput
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fakes import DIE, DIE_LATER, HANG, make_config

TIMEOUT = 60.0
LONG = {"max_model_len": 4096, "num_blocks": 3000}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(octavo.engine.supervisor, "BACKOFF_SECONDS", 0.01)


class Restarts:
    """A stat logger that counts restarts and lets tests wait for one."""

    def __init__(self):
        self.count = 0
        self.latest = None  # what the gauges show
        self._changed = asyncio.Event()

    def record(self, scheduler_stats, iteration_stats):
        self.latest = scheduler_stats or self.latest
        if iteration_stats is not None and iteration_stats.num_engine_restarts:
            self.count += iteration_stats.num_engine_restarts
            self._changed.set()

    def log(self):
        pass

    async def until(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT):
            while self.count < count:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def make_llm(tokenizer_dir):
    engines = []

    def make(*stat_loggers, **options) -> AsyncLLM:
        engines.append(AsyncLLM(make_config(tokenizer=tokenizer_dir, **options), stat_loggers=stat_loggers))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@dataclass
class Answer:
    """Everything a client gets of one choice, put together from what it was sent."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


async def read(outputs: AsyncIterator[RequestOutput], num_read: list[int] | None = None):
    """(answers by index, how often the prompt's scores came, those scores)."""
    answers: dict[int, Answer] = {}
    scores = []
    async with asyncio.timeout(TIMEOUT):
        async for output in outputs:
            if output.prompt_logprobs is not None:
                scores.append(output.prompt_logprobs)
            for piece in output.outputs:
                answer = answers.setdefault(piece.index, Answer())
                answer.text += piece.text
                answer.token_ids += piece.token_ids
                answer.logprobs += piece.logprobs or []
                answer.cumulative_logprob = piece.cumulative_logprob
                answer.finish_reason, answer.stop_reason = piece.finish_reason, piece.stop_reason
                if num_read is not None:
                    num_read[0] += len(piece.token_ids)
    return answers, scores


def delta(**params) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "output_kind": RequestOutputKind.DELTA, "max_tokens": 300} | params))


MIX = [
    delta(ignore_eos=True),
    delta(temperature=1.0, seed=5, ignore_eos=True),
    delta(temperature=1.0, seed=6, n=2, ignore_eos=True, logprobs=2),
    delta(logprobs=1, prompt_logprobs=1, ignore_eos=True),
    delta(min_tokens=250, ignore_eos=False),
    delta(temperature=0.7, seed=7, stop=["never there"], ignore_eos=True),
    delta(ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY),
    delta(ignore_eos=True, max_tokens=280, skip_special_tokens=False),
]


def ask(llm: AsyncLLM, num_read: list[int] | None = None):
    prompts = [[5, 6, 7 + i] for i in range(len(MIX) - 1)] + [[9] * 150]
    pairs = enumerate(zip(prompts, MIX, strict=True))
    return [asyncio.create_task(read(llm.generate(p, q.clone(), str(i)), num_read)) for i, (p, q) in pairs]


async def kill_when(condition, pid: int) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_streams_go_on_as_if_nothing_had_happened(make_llm, async_scheduling):
    restarts = Restarts()
    options = {"async_scheduling": async_scheduling, "max_num_seqs": 6, **LONG}
    llm = make_llm(restarts, **options)
    undisturbed = await asyncio.gather(*ask(llm))
    num_read = [0]
    tasks = ask(llm, num_read)
    for number, at in enumerate((1, 300, 900), 1):
        pid = llm.core_pid
        await kill_when(lambda at=at: num_read[0] >= at, pid)
        await restarts.until(number)
        assert llm.core_pid != pid
    assert await asyncio.gather(*tasks) == undisturbed
    assert restarts.count == 3 and llm.get_num_unfinished_requests() == 0
    assert await llm.reset_prefix_cache()  # no block is held


async def test_prompt_scores_come_once_even_if_their_chunks_were_cut(make_llm):
    """The core dies in the middle of a chunked prompt, and again after the scores are out."""
    restarts = Restarts()
    llm = make_llm(restarts, max_num_batched_tokens=8, **LONG)
    params = delta(prompt_logprobs=1, max_tokens=200, ignore_eos=True)
    prompt = [5 + i % 400 for i in range(2000)]
    undisturbed = await read(llm.generate(prompt, params, "a"))
    num_read = [0]
    task = asyncio.create_task(read(llm.generate(prompt, params, "b"), num_read))
    [request] = await until_open(llm, 1)
    await kill_when(lambda: request._prompt_logprobs is not None and len(request._prompt_logprobs) > 100, llm.core_pid)
    await restarts.until(1)
    await kill_when(lambda: num_read[0] > 5, llm.core_pid)
    assert await task == undisturbed
    [scores] = undisturbed[1]
    assert len(scores) == len(prompt) and restarts.count == 2


async def until_open(llm: AsyncLLM, count: int):
    async with asyncio.timeout(TIMEOUT):
        while llm.get_num_unfinished_requests() < count:
            await asyncio.sleep(0)
    return [request for same_name in llm._outputs._requests.values() for request in same_name]


async def test_a_request_that_kills_the_core_fails_alone(make_llm):
    restarts = Restarts()
    llm = make_llm(restarts, **LONG)
    others = ask(llm)
    with pytest.raises(RequestFailedError, match=r"died twice .* killed by signal 9"):
        await read(llm.generate([5, DIE], delta(n=2), "poison"))
    disturbed = await asyncio.gather(*others)
    assert not llm.errored
    assert disturbed == await asyncio.gather(*ask(llm))


async def test_a_poison_that_acts_late_fails_alone(make_llm):
    """It has tokens, and dies with those after each restart: in company, then on trial.

    The last tokens before a death may be lost with it; each that comes later than it could delays the verdict.
    """
    restarts = Restarts()
    llm = make_llm(restarts, **LONG)
    others = ask(llm)
    with pytest.raises(RequestFailedError, match="died twice"):
        await read(llm.generate([5, DIE_LATER], delta(), "poison"))
    disturbed = await asyncio.gather(*others)
    assert 2 <= restarts.count <= 4 + 5
    assert disturbed == await asyncio.gather(*ask(llm))


async def test_several_poisons_at_once(make_llm):
    llm = make_llm(**LONG)
    others = ask(llm)
    poisons = [read(llm.generate([5 + i, DIE], delta(), f"poison{i}")) for i in range(3)]
    results = await asyncio.gather(*poisons, return_exceptions=True)
    assert [type(result) for result in results] == [RequestFailedError] * 3
    for answers, _ in await asyncio.gather(*others):
        assert all(answer.finish_reason == "length" for answer in answers.values())


async def test_a_step_that_hangs_is_ended_and_its_request_with_it(make_llm):
    llm = make_llm(stall_seconds=0.5, max_num_seqs=1, **LONG)
    hanging = asyncio.create_task(read(llm.generate([5, HANG], delta(), "h")))
    await until_open(llm, 1)
    answer, _ = await read(llm.generate([5, 6], delta(max_tokens=3), "a"))  # waits behind it
    assert len(answer[0].token_ids) == 3
    with pytest.raises(RequestFailedError, match="silent for"):
        await hanging


async def test_a_stopped_core_is_replaced(make_llm):
    """FC-161: SIGSTOP."""
    restarts = Restarts()
    llm = make_llm(restarts, stall_seconds=0.5, **LONG)
    num_read = [0]
    task = asyncio.create_task(read(llm.generate([5], delta(ignore_eos=True), "a"), num_read))
    while not num_read[0]:
        await asyncio.sleep(0)
    os.kill(llm.core_pid, signal.SIGSTOP)
    answers, _ = await task
    assert len(answers[0].token_ids) == 300 and restarts.count == 1


async def test_a_front_that_was_held_up_does_not_blame_the_core(make_llm, monkeypatch):
    """Only silence that the front lived through counts."""
    restarts = Restarts()
    llm = make_llm(restarts, stall_seconds=30.0)
    await read(llm.generate([5], delta(max_tokens=2), "a"))
    supervisor = llm._core
    supervisor._last_watch -= 10_000.0  # the last look was long ago
    supervisor._watch()
    assert supervisor._silent_seconds <= 2 * supervisor._watch_interval
    await read(llm.generate([5], delta(max_tokens=2), "b"))
    assert restarts.count == 0


async def kill_and_notice(llm: AsyncLLM) -> None:
    os.kill(llm.core_pid, signal.SIGKILL)
    async with asyncio.timeout(TIMEOUT):
        while llm._core._is_serving:
            await asyncio.sleep(0)


async def test_while_the_core_is_down(make_llm):
    """Health says so, requests wait in order, aborts work, calls wait."""
    restarts = Restarts()
    llm = make_llm(restarts, max_num_seqs=1, **LONG)
    num_read = [0]
    first = asyncio.create_task(read(llm.generate([5], delta(max_tokens=100, ignore_eos=True), "first"), num_read))
    unwanted = asyncio.create_task(read(llm.generate([6], delta(), "unwanted")))
    while not num_read[0] or len(llm.progress()) < 2:
        await asyncio.sleep(0)
    await kill_and_notice(llm)
    with pytest.raises(EngineRestartingError, match="killed by signal 9"):
        await llm.check_health()
    assert (restarts.latest.num_running, restarts.latest.num_waiting) == (0, 2)
    assert llm.is_running and not llm.errored
    order = []

    async def late(name: str) -> None:
        await read(llm.generate([7], delta(max_tokens=5, ignore_eos=True), name))
        order.append(name)

    tasks = [asyncio.create_task(late(name)) for name in "abc"]
    call = asyncio.create_task(llm.collective_rpc("echo", args=[1]))
    await until_open(llm, 5)
    await llm.abort("unwanted")
    assert (await unwanted)[0][0].finish_reason == "abort"
    assert restarts.count == 0
    assert await call == [[[1], {}]]
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert len((await first)[0][0].token_ids) == 100
    await llm.check_health()


async def test_the_number_of_requests_that_wait_for_a_core_is_bounded(make_llm):
    llm = make_llm(max_num_queued_reqs=2, **LONG)
    await read(llm.generate([5], delta(max_tokens=2), "a"))
    await kill_and_notice(llm)
    requests = [await llm.add_request(str(i), [5], delta(max_tokens=4, ignore_eos=True)) for i in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait"):
        await llm.add_request("x", [5], delta(max_tokens=4, ignore_eos=True))
    async with asyncio.timeout(TIMEOUT):
        for request in requests:
            while not request.is_finished:
                await request.wait()
                request.take()


def broken(config: EngineConfig) -> EngineConfig:
    """The same configuration, with which no core starts."""
    fake = {**config.model.hf_config.data["fake"], "start_error": "LoadError: the disk is gone"}
    hf_config = HFConfig({**config.model.hf_config.data, "fake": fake})
    return replace(config, model=replace(config.model, hf_config=hf_config))


async def test_restarts_in_vain_come_to_an_end(make_llm):
    restarts = Restarts()
    llm = make_llm(restarts, max_restarts=2, **LONG)
    num_read = [0]
    task = asyncio.create_task(read(llm.generate([5], delta(ignore_eos=True), "a"), num_read))
    while not num_read[0]:
        await asyncio.sleep(0)
    llm._core._config = broken(llm._core._config)
    os.kill(llm.core_pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"the disk is gone.*restarted 2 times in a row in vain"):
        await task
    assert llm.errored
    assert (restarts.latest.num_running, restarts.latest.num_waiting) == (0, 0)
    for use in (llm.check_health(), llm.reset_prefix_cache(), read(llm.generate([5], delta(), "b"))):
        with pytest.raises(EngineDeadError, match="in vain"):
            await use


async def test_a_core_that_dies_while_it_starts_is_started_again(make_llm):
    restarts = Restarts()
    llm = make_llm(restarts, **LONG)
    num_read = [0]
    task = asyncio.create_task(read(llm.generate([5], delta(ignore_eos=True), "a"), num_read))
    while not num_read[0]:
        await asyncio.sleep(0)
    old = llm.core_pid
    os.kill(old, signal.SIGKILL)
    async with asyncio.timeout(TIMEOUT):
        while llm.core_pid in (None, old):
            await asyncio.sleep(0)
    os.kill(llm.core_pid, signal.SIGKILL)
    answers, _ = await task
    assert len(answers[0].token_ids) == 300 and restarts.count == 1


async def test_calls_that_die_with_the_core_say_so(make_llm):
    llm = make_llm(stall_seconds=60.0, **LONG)
    request = await llm.add_request("h", [5, HANG], delta())
    call = asyncio.create_task(llm.reset_prefix_cache())
    await asyncio.sleep(0)
    os.kill(llm.core_pid, signal.SIGKILL)
    with pytest.raises(ServerError, match="Call it again"):
        await asyncio.wait_for(call, TIMEOUT)
    await llm.abort(request.request_id)


async def test_shutdown_in_the_middle_of_a_restart(make_llm):
    llm = make_llm(**LONG)
    task = asyncio.create_task(read(llm.generate([5], delta(ignore_eos=True), "a")))
    await until_open(llm, 1)
    old = llm.core_pid
    os.kill(old, signal.SIGKILL)
    async with asyncio.timeout(TIMEOUT):
        while llm.core_pid in (None, old):
            await asyncio.sleep(0)
    pid = llm.core_pid
    llm.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineDeadError, match="shut down"):
        await task


def test_a_death_between_two_event_loops(tokenizer_dir):
    llm = AsyncLLM(make_config(tokenizer=tokenizer_dir, **LONG))
    try:
        want = asyncio.run(read(llm.generate([5], delta(ignore_eos=True), "a")))
        os.kill(llm.core_pid, signal.SIGKILL)
        assert asyncio.run(read(llm.generate([5], delta(ignore_eos=True), "b"))) == want
    finally:
        llm.shutdown()


async def test_a_paused_engine_is_paused_after_a_restart(make_llm):
    restarts = Restarts()
    llm = make_llm(restarts, **LONG)
    num_read = [0]
    task = asyncio.create_task(read(llm.generate([5], delta(ignore_eos=True), "a"), num_read))
    while not num_read[0]:
        await asyncio.sleep(0)
    await llm.pause_generation("keep")
    os.kill(llm.core_pid, signal.SIGKILL)
    await restarts.until(1)
    frozen = num_read[0]
    assert await llm.collective_rpc("echo", args=[1]) == [[[1], {}]]  # the core has had its say
    assert num_read[0] == frozen < 300
    await llm.resume_generation()
    answers, _ = await task
    assert len(answers[0].token_ids) == 300
