"""The scheduler step by step: budget, chunks, order, rows, stops, steps in flight, refusals."""

import itertools
import random

import pytest

from octavo.errors import ClientError, ConfigError, ContextLengthError, QueueFullError
from octavo.types.outputs import FinishReason, TokenLogprobs
from octavo.types.step import ModelRunnerOutput
from tests.scheduler.fake_worker import EOS, Engine, kv_config, make_request, solo_run


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + i) % 50 for i in range(length)]


# ---- budget and chunks


def test_one_budget_for_all() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add(*(make_request(f"r{i}", prompt(6, i), ignore_eos=True) for i in range(3)))
    engine.run()
    assert [step.num_scheduled_tokens for step in engine.steps[:4]] == [[6, 4], [1, 2, 6], [1, 1, 1], [1, 1, 1]]
    assert [step.samples for step in engine.steps[:2]] == [[True, False], [True, True, True]]


def test_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=8)
    request = make_request("r", prompt(21), max_tokens=3, ignore_eos=True)
    engine.add(request)
    engine.run()
    assert [step.num_scheduled_tokens for step in engine.steps] == [[8], [8], [5], [1], [1]]
    assert [step.samples for step in engine.steps] == [[False], [False], [True], [True], [True]]
    engine.check_answer(request)


def test_without_chunked_prefill_a_prompt_is_computed_whole() -> None:
    engine = Engine(max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False)
    engine.add(*(make_request(f"r{i}", prompt(20, i), max_tokens=4, ignore_eos=True) for i in range(3)))
    engine.run()
    assert [step.num_scheduled_tokens for step in engine.steps[:3]] == [[20], [1, 20], [1, 1, 20]]
    assert all(count in (1, 20) for step in engine.steps for count in step.num_scheduled_tokens)


def test_long_prompts_leave_room_for_others() -> None:
    engine = Engine(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    engine.add(make_request("long", prompt(40), ignore_eos=True), make_request("short", prompt(5, 30), ignore_eos=True))
    engine.step()
    assert engine.steps[0].num_scheduled_tokens == [8, 5]
    engine.run()
    alone = Engine(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    alone.add(make_request("long", prompt(40)))
    alone.step()
    assert alone.steps[0].num_scheduled_tokens == [32], "the cap holds only while others wait"


def test_decodes_go_before_chunks_of_older_requests() -> None:
    engine = Engine(max_num_batched_tokens=16, long_prefill_token_threshold=12)
    engine.add(make_request("old", prompt(60), ignore_eos=True), make_request("new", prompt(3, 30), ignore_eos=True))
    engine.step()
    assert engine.steps[0].num_scheduled_tokens == [12, 3]
    engine.step()
    new_row = engine.steps[0].rows[1]
    assert engine.steps[1].rows[0] == new_row and engine.steps[1].num_scheduled_tokens == [1, 15]


def test_rows_are_permanent_and_reused_after_they_were_freed() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add(*(make_request(f"r{i}", prompt(4, i), max_tokens=2 + i, ignore_eos=True) for i in range(5)))
    engine.run()
    rows: dict[str, int] = {}
    freed: set[int] = set()
    for step in engine.steps:
        freed |= set(step.freed_rows)
        for new in step.new_rows:
            assert new.row not in rows.values() or new.row in freed
            rows[new.request_id] = new.row
            freed.discard(new.row)
        assert len(step.rows) <= 2
    assert set(rows.values()) == {0, 1}


# ---- what an output says


def test_first_output_tells_when_it_was_scheduled_and_what_was_cached() -> None:
    engine = Engine()
    engine.add(make_request("a", prompt(9), ignore_eos=True))
    engine.run()
    engine.add(make_request("b", prompt(9), ignore_eos=True))
    engine.run()
    first, *middle, last = [o for o in engine.outputs if o.request_id == "b"]
    assert first.queued_time > 0 and first.num_cached_tokens == 8
    assert all(o.queued_time == 0 for o in middle) and last.num_cached_tokens == 8
    assert next(o.num_cached_tokens for o in engine.outputs if o.request_id == "a") == 0


def test_stop_reason_is_the_clients_stop_id_only() -> None:
    engine = Engine()
    eos, stop = make_request("eos", prompt(5), max_tokens=40), make_request("stop", prompt(5), max_tokens=40)
    answer, _ = solo_run(make_request("x", prompt(5), max_tokens=40, ignore_eos=True), 128)
    eos.eos_token_ids = [answer[3]]
    stop.sampling_params.stop_token_ids = [answer[3]]
    stop.sampling_params.ignore_eos = True
    engine.add(eos, stop)
    engine.run()
    assert engine.tokens["eos"] == engine.tokens["stop"] == answer[: answer.index(answer[3]) + 1]
    assert (engine.finished["eos"].finish_reason, engine.finished["eos"].stop_reason) == (FinishReason.STOP, None)
    assert (engine.finished["stop"].finish_reason, engine.finished["stop"].stop_reason) == (
        FinishReason.STOP,
        answer[3],
    )


def test_worker_is_told_which_ids_to_mask() -> None:
    engine = Engine()
    engine.add(
        make_request("a", prompt(3), stop_token_ids=[9, 4]),
        make_request("b", prompt(3), stop_token_ids=[9], ignore_eos=True),
    )
    engine.step()
    assert [new.stop_token_ids for new in engine.steps[0].new_rows] == [[EOS, 4, 9], [9]]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 4, 30])
def test_scoring_only(depth: int, length: int) -> None:
    """max_tokens=0: the prompt is scored, nothing is sampled, the end is reported once all chunks are in."""
    engine = Engine(depth=depth, max_num_batched_tokens=8)
    engine.add(make_request("r", prompt(length), max_tokens=0, prompt_logprobs=1))
    engine.run()
    assert engine.tokens["r"] == [] and engine.finished["r"].finish_reason == FinishReason.LENGTH
    scores = [entry.token_ids[0] for o in engine.outputs for entry in o.prompt_logprobs or ()]
    assert scores == prompt(length)[1:]
    assert not any(sample for step in engine.steps for sample in step.samples)


def test_several_tokens_a_row_are_cut_at_the_stop_with_their_logprobs() -> None:
    engine = Engine()
    engine.add(make_request("r", prompt(3), max_tokens=10, logprobs=0))
    step = engine.scheduler.schedule()
    assert step is not None
    logprobs = [TokenLogprobs([t], [-0.5], 1) for t in (5, EOS, 7)]
    (output,) = engine.scheduler.update(step, ModelRunnerOutput(step.step_id, [[5, EOS, 7]], {0: logprobs}))
    assert output.new_token_ids == [5, EOS] and output.logprobs == logprobs[:2]
    assert output.finish_reason == FinishReason.STOP
    engine.scheduler.check_idle()


def test_several_tokens_a_row_are_caught_up_with() -> None:
    engine = Engine()
    engine.add(make_request("r", prompt(3), max_tokens=10))
    step = engine.scheduler.schedule()
    assert step is not None
    engine.scheduler.update(step, ModelRunnerOutput(step.step_id, [[5, 6, 7]]))
    step = engine.scheduler.schedule()
    assert step is not None and step.num_scheduled_tokens == [3] and step.samples == [True]
    engine.scheduler.update(step, ModelRunnerOutput(step.step_id, [[8]]))
    step = engine.scheduler.schedule()
    assert step is not None and step.num_scheduled_tokens == [1]


def test_resubmitted_request_goes_on_where_it_was() -> None:
    whole = make_request("r", prompt(5), max_tokens=12, ignore_eos=True)
    answer, _ = solo_run(whole, 128)
    engine = Engine()
    engine.add(make_request("r", prompt(5), max_tokens=12, ignore_eos=True, output_token_ids=answer[:7]))
    engine.run()
    assert engine.tokens["r"] == answer
    assert engine.steps[0].new_rows[0].num_prompt_tokens == 5
    assert engine.steps[0].new_rows[0].token_ids == prompt(5) + answer[:7]


# ---- steps in flight


def test_two_steps_in_flight_waste_at_most_one_token_and_none_at_a_known_limit() -> None:
    engine = Engine(depth=2)
    engine.add(make_request("r", prompt(4), max_tokens=6, ignore_eos=True))
    engine.run()
    assert sum(step.total_num_scheduled_tokens for step in engine.steps) == 4 + 5
    answer = engine.tokens["r"]
    engine = Engine(depth=2)
    stop = next(i for i in range(1, 6) if answer[i] not in answer[:i])
    engine.add(make_request("r", prompt(4), max_tokens=6, ignore_eos=True, stop_token_ids=[answer[stop]]))
    engine.run()
    assert engine.tokens["r"] == answer[: stop + 1]
    assert sum(step.total_num_scheduled_tokens for step in engine.steps) == 4 + stop + 1


def test_abort_drops_tokens_in_flight() -> None:
    engine = Engine(depth=2)
    engine.add(make_request("r", prompt(4), max_tokens=20, ignore_eos=True))
    engine.step()
    engine.step()
    (output,) = engine.abort("r")
    assert output.finish_reason == FinishReason.ABORT and len(engine.in_flight) == 1
    assert engine.abort("r") == []
    engine.scheduler.check_idle()
    engine.run()
    assert engine.outputs[-1] is output


def test_preempted_request_gets_its_token_in_flight_and_waits_for_it() -> None:
    engine = Engine(kv_config(1 + 4), depth=2, max_num_seqs=2, max_model_len=17)
    old = make_request("old", prompt(6), max_tokens=10, ignore_eos=True)
    new = make_request("new", prompt(4, 30), max_tokens=10, ignore_eos=True)
    engine.add(old, new)
    engine.run()
    assert engine.finished["new"].num_preemptions > 0
    engine.check_answer(old)
    engine.check_answer(new)


# ---- failures


@pytest.mark.parametrize("depth", [1, 2])
def test_row_error_ends_its_request_only(depth: int) -> None:
    engine = Engine(depth=depth)
    bad, good = make_request("bad", prompt(6)), make_request("good", prompt(6, 20), ignore_eos=True)
    engine.worker.fail_request_ids.add("bad")
    engine.add(bad, good)
    engine.run()
    assert engine.finished["bad"].finish_reason == FinishReason.ERROR
    assert engine.finished["bad"].error == "told to fail"
    engine.check_answer(good)


@pytest.mark.parametrize("depth", [1, 2])
def test_who_shares_the_blocks_of_a_failed_row_starts_over(depth: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=24)
    engine.worker.tolerates_damage = True
    engine.worker.fail_request_ids.add("bad")
    # "same" is admitted in the step that fails, "next" in the one behind it.
    requests = [make_request(name, prompt(17), seed=i, ignore_eos=True) for i, name in enumerate(["bad", "same"])]
    engine.add(*requests, make_request("next", prompt(20), seed=9, ignore_eos=True))
    engine.run()
    assert [new.num_computed_tokens for new in engine.steps[0].new_rows[:2]] == [0, 16], "the test shares nothing"
    assert engine.finished["bad"].finish_reason == FinishReason.ERROR
    engine.check_answer(requests[1])
    engine.check_answer(make_request("next", prompt(20), seed=9, ignore_eos=True))


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_computed_from_a_failed_rows_blocks_are_not_found_either(depth: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=64)
    engine.worker.tolerates_damage = True
    engine.worker.fail_request_ids.add("bad")
    engine.add(make_request("bad", prompt(9)), make_request("longer", prompt(30), ignore_eos=True))
    engine.step()
    late = make_request("late", prompt(29), ignore_eos=True)
    engine.add(late)
    engine.run()
    assert engine.steps[0].new_rows[1].num_computed_tokens == 8, "the test shares nothing"
    engine.check_answer(make_request("longer", prompt(30), ignore_eos=True))
    engine.check_answer(late)


# ---- short of blocks


def test_admission_leaves_each_running_request_a_block() -> None:
    engine = Engine(kv_config(1 + 6), max_model_len=24)
    engine.add(make_request("old", prompt(6), max_tokens=18, ignore_eos=True))
    engine.step()  # holds 2 blocks, 4 are free
    engine.add(make_request("new", prompt(16, 30), max_tokens=3, ignore_eos=True))
    engine.step()
    assert engine.scheduler.num_running == 1, "the last free blocks were given to a newcomer"
    engine.run()


def test_request_already_in_the_step_is_not_preempted_for_one_that_catches_up() -> None:
    engine = Engine(kv_config(1 + 3), max_model_len=13, max_num_batched_tokens=16)
    scheduler = engine.scheduler
    scheduler.add_request(make_request("old", prompt(3), max_tokens=9, ignore_eos=True))
    scheduler.add_request(make_request("new", prompt(1, 30), max_tokens=9, ignore_eos=True))
    for tokens in ([[5], [6]], [[5], [6]], [[5, 6, 7, 8], [6]]):
        step = scheduler.schedule()
        assert step is not None and len(step.rows) == len(tokens)
        scheduler.update(step, ModelRunnerOutput(step.step_id, tokens))
    # "old" lacks a slot for four tokens more, all blocks are taken, and "new" has a slot for its next token.
    step = scheduler.schedule()
    assert step is not None
    assert not set(step.freed_rows) & set(step.rows)
    scheduler.check_invariants()


@pytest.mark.parametrize("seed", [14, 52, 79])
def test_resumed_request_is_not_preempted_before_it_is_past_where_it_was(seed: int) -> None:
    # Loads picked because without protection they preempt a request that is still recomputing: a token or two a step are
    # left for it, nothing is cached, and the older ones cross many block borders meanwhile.
    rng = random.Random(seed)
    engine = Engine(
        kv_config(1 + rng.randint(30, 60)),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([4, 5]),
        max_model_len=100,
        enable_prefix_caching=False,
    )
    sizes = [(rng.randint(4, 40), rng.randint(5, 60)) for _ in range(8)]
    requests = [
        make_request(f"r{i}", prompt(length, 11 * i), max_tokens=max_tokens, ignore_eos=True)
        for i, (length, max_tokens) in enumerate(sizes)
    ]
    engine.add(*requests)
    engine.run()
    admissions: dict[str, list[int]] = {}
    for step in engine.steps:
        for new in step.new_rows:
            admissions.setdefault(new.request_id, []).append(len(new.token_ids))
    assert any(len(lengths) > 1 for lengths in admissions.values()), "nobody was preempted"
    for lengths in admissions.values():
        # The first admission may end before the prompt is done; each later one must have brought a token.
        assert all(a < b for a, b in itertools.pairwise(lengths[1:]))
    for request in requests:
        engine.check_answer(request)


def test_protected_request_that_is_stuck_gives_way() -> None:
    engine = Engine(kv_config(1 + 8), max_num_seqs=2, max_num_batched_tokens=4, max_model_len=32)
    engine.add(make_request("old", prompt(3), max_tokens=28, ignore_eos=True))
    engine.step()
    engine.add(make_request("new", prompt(20, 30), max_tokens=4, ignore_eos=True))
    for _ in range(2):
        engine.step()
    old, new = engine.scheduler._running
    # As if resumed, and its reserve lost to the growth of others.
    new.is_protected = True
    engine.scheduler._kv._reserve(new, 0)
    taken = engine.scheduler._kv.pool.allocate(engine.scheduler._kv.pool.num_free)
    engine.check = False
    for _ in range(8):
        engine.step()
    assert old.num_output_tokens > 6 and new.num_preemptions == 1
    engine.scheduler._kv.pool.release(taken)
    engine.run()


# ---- refusals


@pytest.mark.parametrize(
    ("request_options", "message"),
    [
        ({"prompt": []}, "holds no token"),
        ({"prompt": prompt(32)}, "context holds 32"),
        ({"prompt": prompt(30), "output_token_ids": [1, 2]}, "context holds 32"),
        ({"prompt": prompt(33), "max_tokens": 0}, "context holds 32"),
        ({"prompt": prompt(3), "priority": 1}, "scheduling_policy='fcfs'"),
    ],
)
def test_request_that_can_never_run_is_refused(request_options: dict, message: str) -> None:
    engine = Engine(max_model_len=32)
    with pytest.raises(ClientError, match=message):
        engine.scheduler.add_request(make_request("r", request_options.pop("prompt"), **request_options))
    assert not engine.scheduler.has_unfinished()
    engine.scheduler.check_idle()


def test_largest_request_runs() -> None:
    engine = Engine(max_model_len=32)
    requests = [make_request("one", prompt(31), ignore_eos=True), make_request("score", prompt(32), max_tokens=0)]
    engine.add(*requests)
    engine.run()
    for request in requests:
        engine.check_answer(request)


def test_id_in_use_is_refused() -> None:
    engine = Engine()
    engine.add(make_request("r", prompt(3)))
    with pytest.raises(ClientError, match="'r' is in use"):
        engine.scheduler.add_request(make_request("r", prompt(3)))
    engine.run()
    engine.scheduler.add_request(make_request("r", prompt(3)))


def test_full_queue_refuses_new_requests_but_not_resubmitted_ones() -> None:
    engine = Engine(max_num_queued_reqs=2, max_num_queued_tokens=20)
    engine.add(make_request("a", prompt(18)))
    with pytest.raises(QueueFullError, match="at most 20"):
        engine.add(make_request("b", prompt(3)))
    engine.add(make_request("c", prompt(2)))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.add(make_request("d", prompt(1)))
    engine.add(make_request("e", prompt(5), is_admitted=True))
    engine.run()
    engine.add(make_request("f", prompt(30)))


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs=8 .* max_num_batched_tokens=4"):
        Engine(max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match="without chunked prefill"):
        Engine(max_num_batched_tokens=64, max_model_len=128, enable_chunked_prefill=False)


def test_context_error_names_the_prompt() -> None:
    engine = Engine(kv_config(1 + 5), max_model_len=64)
    with pytest.raises(ContextLengthError, match="whole KV cache holds 20") as error:
        engine.add(make_request("r", prompt(21)))
    assert error.value.param == "prompt" and error.value.status == 400


# ---- statistics


def test_stats_count_each_thing_once() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add(*(make_request(f"r{i}", prompt(12), max_tokens=5, ignore_eos=True) for i in range(2)))
    totals = [0, 0, 0, 0]
    peak = 0
    while engine.scheduler.has_unfinished():
        engine.step()
        stats = engine.scheduler.stats()
        peak = max(peak, stats.num_running)
        for i, n in enumerate(
            (stats.num_prompt_tokens, stats.num_generation_tokens, stats.prefix_cache_queries, stats.prefix_cache_hits)
        ):
            totals[i] += n
    assert totals == [12 + 4, 10, 24, 8]
    assert peak == 2
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage, stats.num_generation_tokens) == (0, 0, 0.0, 0)


def test_prefix_cache_is_reset_only_when_idle() -> None:
    engine = Engine()
    engine.add(make_request("a", prompt(9), ignore_eos=True))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.add(make_request("b", prompt(9)))
    engine.run()
    assert engine.finished["b"].num_cached_tokens == 0
