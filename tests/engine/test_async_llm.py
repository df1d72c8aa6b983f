"""`AsyncLLM` over a core in a child process."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ClientError, ContextLengthError, EngineDeadError, QueueFullError, RequestFailedError
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fakes import EOS, FAIL_ROW, RAISE, make_config

TIMEOUT = 20.0
ENDLESS = {"max_model_len": 100_000, "num_blocks": 14_000}  # room for two answers without an end


class Recorder:
    """A stat logger that keeps everything."""

    def __init__(self):
        self.records = []
        self.num_logs = 0
        self._recorded = asyncio.Event()

    def record(self, scheduler_stats, iteration_stats):
        self.records.append((scheduler_stats, iteration_stats))
        self._recorded.set()

    def log(self):
        self.num_logs += 1

    async def until(self, condition) -> None:
        """Wait for a record of the scheduler that meets `condition`."""
        async with asyncio.timeout(TIMEOUT):
            while not any(stats is not None and condition(stats) for stats, _ in self.records[-1:]):
                self._recorded.clear()
                await self._recorded.wait()

    def finished(self):
        return [f for _, iteration in self.records if iteration for f in iteration.finished]


@pytest.fixture(scope="module")
def script(tokenizer):
    """A prompt and the answer the fake gives to it."""
    return "say it", "the cat sat on the mat GH and so on"


@pytest.fixture
async def make_llm(tokenizer_dir, tokenizer, script):
    """Start engines; all end with the test, and none leaves a task behind."""
    engines = []

    def make(stat_loggers=(), **options) -> AsyncLLM:
        prompt, answer = (tokenizer.encode(text) for text in script)
        options = {"scripts": {tuple(prompt): [*answer, EOS]}, "tokenizer": tokenizer_dir} | options
        config = make_config(**options)
        engines.append(AsyncLLM(config, stat_loggers=stat_loggers))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def greedy(**params) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 100} | params))


async def collect(llm: AsyncLLM, prompt, params, request_id="r"):
    async with asyncio.timeout(TIMEOUT):
        return [output async for output in llm.generate(prompt, params, request_id)]


async def test_a_stream_is_the_whole_answer(make_llm, tokenizer, script):
    llm = make_llm()
    prompt, answer = script
    deltas = await collect(llm, prompt, greedy(output_kind=RequestOutputKind.DELTA))
    [whole] = await collect(llm, prompt, greedy(output_kind=RequestOutputKind.FINAL_ONLY))
    assert "".join(d.outputs[0].text for d in deltas) == whole.outputs[0].text == answer
    assert [t for d in deltas for t in d.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert (whole.prompt, whole.prompt_token_ids) == (prompt, tokenizer.encode(prompt))
    assert whole.outputs[0].finish_reason == "stop" and whole.outputs[0].stop_reason is None


async def test_a_stop_string_ends_the_request_in_the_core_too(make_llm, script):
    llm = make_llm()
    [output] = await collect(llm, script[0], greedy(stop=["GH"], output_kind=RequestOutputKind.FINAL_ONLY))
    assert output.outputs[0].text == "the cat sat on the mat "
    assert output.outputs[0].stop_reason == "GH"
    await asyncio.wait_for(until_idle(llm), TIMEOUT)


async def until_idle(llm: AsyncLLM) -> None:
    """The core holds no block: it lets its prefix cache be forgotten."""
    while not await llm.reset_prefix_cache():
        pass


async def test_n_answers_depend_on_the_seed_alone(make_llm):
    params = SamplingParams(n=3, seed=11, max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)
    llm = make_llm(async_scheduling=True)
    [alone] = await collect(llm, [5, 6], params)
    crowd = [collect(llm, [7, i], SamplingParams(max_tokens=9), f"crowd{i}") for i in range(3, 9)]
    [together], *_ = await asyncio.gather(collect(llm, [5, 6], params), *crowd)
    texts = [choice.token_ids for choice in alone.outputs]
    assert [choice.index for choice in alone.outputs] == [0, 1, 2]
    assert len({tuple(ids) for ids in texts}) == 3
    assert [choice.token_ids for choice in together.outputs] == texts


async def test_logprobs_and_prompt_logprobs_come_along(make_llm, tokenizer, script):
    llm = make_llm()
    [output] = await collect(
        llm, script[0], greedy(logprobs=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    )
    choice = output.outputs[0]
    assert len(choice.logprobs) == len(choice.token_ids)
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(position)) == token_id and len(position) == 2
        assert position[token_id].decoded_token == tokenizer.token_text(token_id)
    assert choice.cumulative_logprob == pytest.approx(-0.75 * len(choice.token_ids))
    assert output.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]


@pytest.mark.parametrize("how", ["close", "cancel", "abort", "never read"])
@pytest.mark.parametrize("n", [1, 3])
async def test_every_way_to_leave_aborts(make_llm, how, n):
    recorder = Recorder()
    llm = make_llm([recorder], **ENDLESS)
    params = SamplingParams(max_tokens=None, ignore_eos=True, n=n, seed=1)
    if how == "never read":
        request = await llm.add_request("r", [5], params)
        await llm.abort("r")
        assert [c.finish_reason for c in request.take().outputs] == ["abort"] * n
    elif how == "close":
        stream = llm.generate([5], params, "r")
        await anext(stream)
        await stream.aclose()
    elif how == "cancel":
        task = asyncio.create_task(collect(llm, [5], params))
        await recorder.until(lambda stats: stats.num_running == n)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        stream = llm.generate([5], params, "r")
        await anext(stream)
        await llm.abort(["r", "unknown"])
        *_, last = [output async for output in stream]
        assert last.finished and [c.finish_reason for c in last.outputs] == ["abort"] * n
    assert llm.get_num_unfinished_requests() == 0
    await asyncio.wait_for(until_idle(llm), TIMEOUT)
    await asyncio.wait_for(llm.wait_for_requests_to_drain(), TIMEOUT)
    assert [f.finish_reason for f in recorder.finished()] == ["abort"] * n
    if how != "never read":  # then the core may have heard of both at once, and said nothing
        await recorder.until(lambda stats: (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0))


async def test_aborting_a_queued_request(make_llm):
    llm = make_llm(max_num_seqs=1, **ENDLESS)
    running = llm.generate([5], SamplingParams(max_tokens=None, ignore_eos=True), "running")
    await anext(running)
    queued = asyncio.create_task(collect(llm, [6], greedy(), "queued"))
    while llm.get_num_unfinished_requests() < 2:
        await asyncio.sleep(0)
    await llm.abort("queued")
    [output] = await queued
    assert output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids == []
    await running.aclose()
    await asyncio.wait_for(until_idle(llm), TIMEOUT)


async def test_mistakes_raise_before_anything_runs(make_llm):
    llm = make_llm()
    for prompt, options, kind in (
        ("", {}, ClientError),
        ([5] * 300, {}, ContextLengthError),
        ([5], {"lora_request": "adapter"}, ClientError),
        ([5], {"data_parallel_rank": 1}, ClientError),
        ([5], {"priority": 2}, ClientError),
    ):
        with pytest.raises(kind):
            await anext(llm.generate(prompt, greedy(), "r", **options))
    assert llm.get_num_unfinished_requests() == 0
    await llm.check_health()


async def test_a_failed_request_raises_and_leaves_its_neighbours_alone(make_llm):
    llm = make_llm()
    [quiet] = await collect(llm, [5, 6], greedy(output_kind=RequestOutputKind.FINAL_ONLY))
    neighbour = asyncio.create_task(collect(llm, [5, 6], greedy(output_kind=RequestOutputKind.FINAL_ONLY)))
    with pytest.raises(RequestFailedError, match="the row was told to fail"):
        await collect(llm, [FAIL_ROW], SamplingParams(n=2, max_tokens=5))
    [disturbed] = await neighbour
    assert disturbed.outputs[0].token_ids == quiet.outputs[0].token_ids
    with pytest.raises(RequestFailedError, match="told to fail"):
        await collect(llm, [RAISE], greedy())
    assert (await collect(llm, [5, 6], greedy()))[-1].outputs[0].token_ids == quiet.outputs[0].token_ids


async def test_a_full_queue_is_the_clients_to_hear(make_llm):
    llm = make_llm(max_num_seqs=1, max_num_queued_reqs=1, **ENDLESS)
    streams = [llm.generate([5], SamplingParams(max_tokens=None, ignore_eos=True), str(i)) for i in range(2)]
    await anext(streams[0])
    waiting = await llm.add_request("1", [6], greedy())
    with pytest.raises(QueueFullError):
        await collect(llm, [7], greedy(), "2")
    assert not waiting.is_finished
    await llm.abort(["1"])
    await streams[0].aclose()


async def test_death_reaches_everybody_who_waits(make_llm):
    llm = make_llm(max_restarts=0, **ENDLESS)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    tasks = [asyncio.create_task(collect(llm, [5, i], params, str(i))) for i in (6, 7)]
    stream = llm.generate([5], params, "s")
    await anext(stream)
    assert llm.is_running and not llm.errored
    os.kill(llm.core_pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2.0)
    assert all(isinstance(result, EngineDeadError) for result in results)
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    assert llm.errored and llm.is_stopped and "signal 9" in str(llm.dead_error)
    for use in (llm.check_health(), llm.reset_prefix_cache(), collect(llm, [5], greedy())):
        with pytest.raises(EngineDeadError):
            await use
    assert llm.get_num_unfinished_requests() == 0


async def test_shutdown_ends_open_requests(make_llm):
    llm = make_llm(**ENDLESS)
    task = asyncio.create_task(collect(llm, [5], SamplingParams(max_tokens=None, ignore_eos=True)))
    while not llm.get_num_unfinished_requests():
        await asyncio.sleep(0)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    assert not llm.is_running
    with pytest.raises(EngineDeadError):
        await llm.check_health()


async def test_statistics_add_up(make_llm, script):
    recorder = Recorder()
    llm = make_llm([recorder])
    outputs = await asyncio.gather(*(collect(llm, script[0], greedy(), str(i)) for i in range(4)))
    num_tokens = sum(len(o[-1].outputs[0].token_ids) for o in outputs)
    iterations = [iteration for _, iteration in recorder.records]
    assert sum(i.num_generation_tokens for i in iterations) == num_tokens
    assert sum(f.num_generation_tokens for f in recorder.finished()) == num_tokens
    assert sum(i.num_prompt_tokens for i in iterations) == sum(len(o[-1].prompt_token_ids) for o in outputs)
    assert sum(stats.num_generation_tokens for stats, _ in recorder.records if stats) == num_tokens
    await llm.do_log_stats()
    assert recorder.num_logs == 1


async def test_long_texts_do_not_hold_up_the_loop(make_llm):
    llm = make_llm()
    with pytest.raises(ContextLengthError):
        await collect(llm, "word " * 10_000, greedy())
    read = greedy(truncate_prompt_tokens=7, max_tokens=3)
    assert len((await collect(llm, {"prompt": "word " * 10_000}, read))[-1].prompt_token_ids) == 7


async def test_utilities(make_llm):
    llm = make_llm()
    assert await llm.collective_rpc("echo", args=(1,), kwargs={"a": "b"}) == [[[1], {"a": "b"}]]
    with pytest.raises(ClientError, match="name a method"):
        await llm.collective_rpc(print)
    with pytest.raises(ClientError, match="reset_running_requests"):
        await llm.reset_prefix_cache(reset_running_requests=True)
    assert await llm.get_tokenizer() is llm.tokenizer
    assert (await llm.get_model_config()).max_model_len == llm.model_config.max_model_len == 256
    assert await llm.get_supported_tasks() == ("generate",)


async def test_requests_are_logged_on_request(make_llm, monkeypatch):
    llm = make_llm()
    llm.config = replace(llm.config, observability=replace(llm.config.observability, enable_log_requests=True))
    lines = []
    monkeypatch.setattr("octavo.engine.async_llm.logger.info", lambda text, *args: lines.append(text % args))
    await collect(llm, [5, 6], greedy(), "named")
    assert any("named" in line and "2 prompt tokens" in line for line in lines)
