"""The loop: what goes in comes out, in lock step and with two steps in flight, and faults stay where they belong."""

import pytest

from octavo.engine.core import MAX_CONSECUTIVE_FAULTS, EngineCore
from octavo.errors import ServerError
from octavo.types.outputs import EngineOutput, FinishReason
from octavo.types.request import EngineRequest
from octavo.types.sampling_params import SamplingParams
from tests.engine.fakes import EOS, FAIL_ROW, RAISE, FakeExecutor, make_config


@pytest.fixture(autouse=True)
def _check_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CHECK_INVARIANTS", "1")


def make_core(**options) -> tuple[EngineCore, FakeExecutor]:
    config = make_config(**options)
    executor = FakeExecutor(config)
    return EngineCore(config, executor), executor


def request(request_id: str, prompt: list[int], **params) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": 8, "seed": 0} | params
    return EngineRequest(request_id, prompt, SamplingParams(**params), eos_token_ids=[EOS])


def run(core: EngineCore) -> dict[str, list[EngineOutput]]:
    """Step until nothing is left; every output by request."""
    outputs: dict[str, list[EngineOutput]] = {}
    while core.has_work:
        step = core.step()
        for output in step.outputs if step is not None else ():
            outputs.setdefault(output.request_id, []).append(output)
    core.on_idle()
    return outputs


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def test_answers_follow_the_script_to_the_end_of_sequence():
    core, _ = make_core(scripts={(5, 6): [7, 8, EOS]})
    core.add_requests([request("a", [5, 6])])
    outputs = run(core)["a"]
    assert tokens(outputs) == [7, 8, EOS]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.STOP]


def test_two_steps_in_flight_equal_lock_step():
    requests = [request(str(i), list(range(3, 4 + 7 * i)), max_tokens=5 + i, logprobs=i % 2 or None) for i in range(12)]
    requests.append(request("stops", [5, 6], max_tokens=50))
    results = []
    for async_scheduling in (False, True):
        core, _ = make_core(
            async_scheduling=async_scheduling, max_num_seqs=5, num_blocks=30, scripts={(5, 6): [9, 9, 9, EOS]}
        )
        core.add_requests(requests)
        outputs = run(core)
        results.append({key: (tokens(value), value[-1].finish_reason) for key, value in outputs.items()})
    assert results[0] == results[1]
    assert results[0]["stops"] == ([9, 9, 9, EOS], FinishReason.STOP)


def test_two_steps_are_launched_before_the_first_is_awaited():
    core, executor = make_core(async_scheduling=True)
    core.add_requests([request("a", [5, 6])])
    core.step()
    assert len(executor.steps) == 2
    lock_step, executor = make_core()
    lock_step.add_requests([request("a", [5, 6])])
    lock_step.step()
    assert len(executor.steps) == 1


def test_nothing_to_do_is_no_step():
    core, executor = make_core()
    assert not core.has_work
    assert core.step() is None
    assert executor.steps == []


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_frees_everything_and_says_so(async_scheduling, num_steps):
    core, _ = make_core(async_scheduling=async_scheduling)
    core.add_requests([request(str(i), [5, 6, i + 3], max_tokens=100) for i in range(3)])
    for _ in range(num_steps):
        core.step()
    core.abort_requests(["0", "1", "2", "unknown"])
    outputs = run(core)
    assert [outputs[str(i)][-1].finish_reason for i in range(3)] == [FinishReason.ABORT] * 3


def test_an_abort_reports_empty_gauges_without_a_new_request():
    core, _ = make_core()
    core.add_requests([request("a", [5, 6], max_tokens=100)])
    core.step()
    core.abort_requests(["a"])
    last = core.step()
    assert last is not None and last.stats is not None
    assert (last.stats.num_running, last.stats.num_waiting, last.stats.kv_cache_usage) == (0, 0, 0.0)
    assert not core.has_work


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_that_raises_fails_its_requests_only(async_scheduling):
    core, _ = make_core(async_scheduling=async_scheduling, max_num_seqs=1)
    core.add_requests([request("before", [5]), request("bad", [RAISE]), request("after", [6])])
    outputs = run(core)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert "told to fail" in outputs["bad"][-1].error
    assert len(tokens(outputs["before"])) == len(tokens(outputs["after"])) == 8


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_row_that_fails_leaves_its_batch_alone(async_scheduling):
    alone, _ = make_core()
    alone.add_requests([request("good", [5, 6])])
    core, _ = make_core(async_scheduling=async_scheduling)
    core.add_requests([request("bad", [FAIL_ROW]), request("good", [5, 6])])
    outputs = run(core)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert tokens(outputs["good"]) == tokens(run(alone)["good"])


def test_steps_that_keep_failing_end_the_core():
    core, _ = make_core(max_num_seqs=1)
    core.add_requests([request(str(i), [RAISE]) for i in range(MAX_CONSECUTIVE_FAULTS)])
    with pytest.raises(ServerError, match="3 steps in a row failed"):
        run(core)


def test_a_worker_beyond_use_ends_the_core():
    core, executor = make_core()

    def check_health():
        raise ServerError("the device fell off the bus")

    executor.check_health = check_health
    core.add_requests([request("bad", [RAISE])])
    with pytest.raises(ServerError, match="fell off the bus"):
        run(core)


def test_a_request_that_can_never_run_is_refused_alone():
    core, _ = make_core(max_model_len=32)
    core.add_requests([request("long", [5] * 40), request("short", [5])])
    outputs = run(core)
    refused = outputs["long"][-1]
    assert (refused.finish_reason, refused.error_kind) == (FinishReason.ERROR, "ContextLengthError")
    assert len(tokens(outputs["short"])) == 8


def test_a_resumed_request_goes_on_where_it_was():
    core, _ = make_core()
    core.add_requests([request("whole", [5, 6], max_tokens=10)])
    whole = tokens(run(core)["whole"])
    resumed = request("resumed", [5, 6], max_tokens=10)
    resumed.output_token_ids = whole[:4]
    core.add_requests([resumed])
    assert tokens(run(core)["resumed"]) == whole[4:]


def test_utilities_are_named_in_a_table():
    core, _ = make_core()
    assert core.call("reset_prefix_cache", [], {}) is True
    assert core.call("collective_rpc", ["echo", [1]], {"kwargs": {"a": 2}}) == [[[1], {"a": 2}]]
    with pytest.raises(ServerError, match="no utility 'step'"):
        core.call("step", [], {})
