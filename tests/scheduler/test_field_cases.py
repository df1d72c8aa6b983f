"""Cases from the field: prefix cache, preemption, scheduling. Each names the number it has in the list of cases."""

import itertools
import random

import pytest

from octavo.errors import ClientError
from octavo.types.outputs import FinishReason
from tests.scheduler.fake_worker import VOCAB, Engine, full_spec, kv_config, make_request, solo_run

BLOCK = 16


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("length", [BLOCK * 2 - 1, BLOCK * 2, BLOCK * 2 + 1])
def test_fc110_cache_on_or_off_same_answer(length: int) -> None:
    """Three turns; each turn computes only what is new, and at least one token."""
    answers = {}
    for caching in (True, False):
        engine = Engine(
            kv_config(100, full_spec(BLOCK)),
            max_num_batched_tokens=512,
            max_model_len=512,
            enable_prefix_caching=caching,
        )
        history = prompt(length)
        computed = []
        for turn in range(3):
            request = make_request(f"turn{turn}", history, max_tokens=10, ignore_eos=True)
            before = engine.worker.num_prompt_tokens_computed
            engine.add(request)
            engine.run()
            engine.check_answer(request)
            computed.append(engine.worker.num_prompt_tokens_computed - before)
            history = history + engine.tokens[request.request_id] + prompt(5, turn)
        answers[caching] = dict(engine.tokens)
        if not caching:
            assert computed == [length, length + 15, length + 30]
        else:
            # All but the last token of a turn has been computed; whole blocks of it are found.
            known = [0, (length + 9) // BLOCK * BLOCK, (length + 24) // BLOCK * BLOCK]
            assert computed == [length + 15 * turn - known[turn] for turn in range(3)]
    assert answers[True] == answers[False]


def test_fc110_fully_cached_prompt_still_computes_its_last_token() -> None:
    engine = Engine(kv_config(100, full_spec(BLOCK)))
    for i in range(2):
        engine.add(make_request(f"r{i}", prompt(BLOCK * 2), max_tokens=1))
        engine.run()
    assert engine.steps[-1].num_scheduled_tokens == [BLOCK]
    assert engine.tokens["r0"] == engine.tokens["r1"]


def test_fc111_other_namespace_other_blocks() -> None:
    """The extra keys of the first block separate whole chains (adapters enter the same way as salts)."""
    engine = Engine(kv_config(100, full_spec(BLOCK)), max_num_batched_tokens=256)
    for i, salt in enumerate([None, "a", "b", None, "a"]):
        engine.add(make_request(f"r{i}", prompt(50), cache_salt=salt))
        engine.run()
    assert [engine.finished[f"r{i}"].num_cached_tokens for i in range(5)] == [0, 0, 0, 48, 48]


def test_fc113_cached_tokens_are_reported() -> None:
    engine = Engine(kv_config(100, full_spec(BLOCK)))
    engine.add(make_request("first", prompt(50)))
    engine.run()
    assert engine.scheduler.stats().prefix_cache_hits == 0
    engine.add(make_request("second", prompt(50)))
    engine.run()
    assert engine.finished["first"].num_cached_tokens == 0
    assert engine.finished["second"].num_cached_tokens == 48
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (50, 48)


@pytest.mark.parametrize("depth", [1, 2])
def test_fc115_eviction_under_pressure(depth: int) -> None:
    """Pool of 12 blocks, 200 prompts with shared prefixes, random aborts; the engine checks accounting at each step."""
    rng = random.Random(115)
    engine = Engine(kv_config(1 + 12), depth=depth, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=48)
    stems = [prompt(16, seed) for seed in range(3)]
    requests = [
        make_request(f"r{i}", rng.choice(stems)[: rng.randint(4, 16)] + prompt(rng.randint(1, 5), i), max_tokens=12)
        for i in range(200)
    ]
    waiting = list(requests)
    while waiting or engine.scheduler.has_unfinished() or engine.in_flight:
        if waiting and rng.random() < 0.8:
            engine.add(waiting.pop())
        if rng.random() < 0.1:
            engine.abort(rng.choice(requests).request_id)
        engine.step()
    engine.scheduler.check_idle()
    aborted = 0
    for request in requests:
        if engine.finished[request.request_id].finish_reason == FinishReason.ABORT:
            aborted += 1
        else:
            engine.check_answer(request)
    assert 0 < aborted < 100


@pytest.mark.parametrize("depth", [1, 2])
def test_fc116_resumed_answer_equals_the_undisturbed_one(depth: int) -> None:
    """Eight runs of 100 tokens in a pool that fits three."""
    num_blocks = 3 * ((12 + 100) // 4)
    engine = Engine(kv_config(1 + num_blocks), depth=depth)
    requests = [make_request(f"r{i}", prompt(12, i), max_tokens=100, ignore_eos=True, logprobs=0) for i in range(8)]
    engine.add(*requests)
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    for request in requests:
        engine.check_answer(request)
        assert len(engine.tokens[request.request_id]) == 100


@pytest.mark.parametrize("depth", [1, 2])
def test_fc117_no_thrashing(depth: int) -> None:
    """One long request and many short ones in a tight pool."""
    requests = [make_request("long", prompt(20, 99), max_tokens=100, ignore_eos=True)]
    requests += [make_request(f"r{i}", prompt(8, i), max_tokens=24, ignore_eos=True) for i in range(24)]
    num_steps = {}
    for num_blocks in (1000, 1 + 42):
        engine = Engine(kv_config(num_blocks), depth=depth, max_num_seqs=8, max_num_batched_tokens=32)
        engine.add(*requests)
        engine.run()
        num_steps[num_blocks] = len(engine.steps)
        for request in requests:
            engine.check_answer(request)
    assert engine.scheduler.stats().num_preemptions > 0
    assert num_steps[43] <= 2 * num_steps[1000]
    assert engine.finished["long"].num_preemptions == 0, "the oldest was preempted"
    # Between two admissions of a request it has got on: more tokens are known each time it comes back.
    admissions: dict[str, list[int]] = {}
    for step in engine.steps:
        for new in step.new_rows:
            admissions.setdefault(new.request_id, []).append(len(new.token_ids))
    assert any(len(lengths) > 1 for lengths in admissions.values())
    for lengths in admissions.values():
        assert all(a < b for a, b in itertools.pairwise(lengths))


def test_fc117_answers_come_in_order_when_nothing_fits_beside_the_oldest() -> None:
    engine = Engine(kv_config(1 + 16), max_num_batched_tokens=16, max_model_len=64)
    requests = [make_request(f"r{i}", prompt(20, i), max_tokens=40, ignore_eos=True) for i in range(5)]
    engine.add(*requests)
    engine.run()
    assert list(engine.finished) == [f"r{i}" for i in range(5)]
    for request in requests:
        engine.check_answer(request)


def test_fc119_request_larger_than_the_whole_pool() -> None:
    engine = Engine(kv_config(1 + 50, full_spec(BLOCK)), max_num_batched_tokens=2048, max_model_len=2048)
    with pytest.raises(ClientError, match="1500 tokens, but the whole KV cache holds 800"):
        engine.add(make_request("huge", prompt(1500)))
    engine.add(make_request("short", prompt(5)))
    engine.run()
    engine.check_answer(make_request("short", prompt(5)))


def test_fc119_answer_that_outgrows_the_pool_ends_with_length() -> None:
    engine = Engine(kv_config(1 + 5), max_model_len=2048, max_num_batched_tokens=64)
    engine.add(make_request("r", prompt(10), max_tokens=None, ignore_eos=True), make_request("s", prompt(7)))
    engine.run(max_steps=200)
    assert engine.finished["r"].finish_reason == FinishReason.LENGTH
    # 20 tokens are kept; the 21st is sampled from them and needs no place.
    assert len(engine.tokens["r"]) == 11


@pytest.mark.parametrize("depth", [1, 2])
def test_fc120_long_prefill_does_not_freeze_running_streams(depth: int) -> None:
    engine = Engine(
        kv_config(600, full_spec(BLOCK)), depth=depth, max_num_batched_tokens=256, max_model_len=4200, check=False
    )
    streams = [make_request(f"s{i}", prompt(10, i), max_tokens=60, ignore_eos=True) for i in range(4)]
    engine.add(*streams)
    for _ in range(5):
        engine.step()
    engine.add(make_request("long", prompt(4000, 9), max_tokens=3, ignore_eos=True))
    arrival = len(engine.steps)
    while "long" not in engine.finished:
        ids = {output.request_id for output in engine.step()}
        assert {s.request_id for s in streams} <= ids, "a stream missed a step"
    assert len(engine.steps) - arrival <= 4000 // 252 + 1 + 3 + depth
    engine.run()


def test_fc121_better_priority_starts_next_and_ties_keep_arrival_order() -> None:
    engine = Engine(max_num_seqs=1, policy="priority")
    engine.add(make_request("running", prompt(4), priority=-5, max_tokens=4, ignore_eos=True))
    engine.step()
    for i, priority in enumerate([0, 0, 0, -1, 0, -1]):
        engine.add(make_request(f"r{i}", prompt(4, i), priority=priority, max_tokens=3, ignore_eos=True))
    engine.run()
    assert list(engine.finished) == ["running", "r3", "r5", "r0", "r1", "r2", "r4"]
    assert engine.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize(("seconds", "last_to_go_before"), [(10.0, 49), (0.0, 99)])
def test_fc121_nobody_starves(seconds: float, last_to_go_before: int) -> None:
    """A stream of better requests, one a second: waiting is worth a level every `seconds`, so the worse one gets in."""
    engine = Engine(max_num_seqs=1, policy="priority", priority_aging_seconds=seconds)
    engine.add(make_request("worse", prompt(4), priority=5, arrival_time=0.5, max_tokens=1, ignore_eos=True))
    better = [
        make_request(f"b{i}", prompt(4, i), priority=0, arrival_time=1.0 + i, max_tokens=1, ignore_eos=True)
        for i in range(100)
    ]
    engine.add(*better)
    engine.run()
    order = list(engine.finished)
    assert order.index("worse") == last_to_go_before + 1 and order[:1] == ["b0"]


@pytest.mark.parametrize("depth", [1, 2])
def test_ageing_takes_no_seat_from_equals(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=2, policy="priority", priority_aging_seconds=10.0)
    for i in range(6):
        engine.add(
            make_request(f"r{i}", prompt(4, i), priority=0, arrival_time=float(i), max_tokens=5, ignore_eos=True)
        )
        engine.step()
    engine.run()
    assert list(engine.finished) == [f"r{i}" for i in range(6)]
    assert engine.scheduler.stats().num_preemptions == 0


def test_fc121_without_the_policy_priority_is_refused() -> None:
    with pytest.raises(ClientError, match="--scheduling-policy priority"):
        Engine().add(make_request("r", prompt(4), priority=-1))


@pytest.mark.parametrize("depth", [1, 2])
def test_priority_takes_a_seat_from_a_worse_running_request(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=2, policy="priority")
    worse = [make_request(f"w{i}", prompt(4, i), priority=i + 1, max_tokens=30, ignore_eos=True) for i in range(2)]
    better = make_request("better", prompt(4, 9), priority=0, max_tokens=5, ignore_eos=True)
    engine.add(*worse)
    for _ in range(4):
        engine.step()
    engine.add(better)
    engine.run()
    assert list(engine.finished) == ["better", "w0", "w1"]
    assert [engine.finished[r].num_preemptions for r in ("better", "w0", "w1")] == [0, 0, 1]
    for request in (*worse, better):
        engine.check_answer(request)


def test_priority_takes_blocks_only_when_that_lets_it_in() -> None:
    engine = Engine(kv_config(1 + 12), policy="priority", max_model_len=48)
    engine.add(
        make_request("best", prompt(24, 1), priority=0, max_tokens=8, ignore_eos=True),
        make_request("worst", prompt(8, 2), priority=2, max_tokens=12, ignore_eos=True),
    )
    engine.step()
    engine.step()
    engine.add(make_request("middle", prompt(40, 3), priority=1, max_tokens=2, ignore_eos=True))
    engine.step()
    assert engine.scheduler.num_running == 2, "a request was preempted for one that does not fit even so"
    engine.run()
    assert engine.finished["best"].num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("moment", ["stream", "queued", "prefill", "three answers"])
def test_fc122_client_hangs_up(moment: str, depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=3, max_num_batched_tokens=16)
    engine.add(make_request("other", prompt(4), max_tokens=40, ignore_eos=True))
    ids = [f"{i}_r" for i in range(3)] if moment == "three answers" else ["r"]
    if moment == "queued":
        engine.add(*(make_request(f"seat{i}", prompt(4, i), max_tokens=40, ignore_eos=True) for i in range(2)))
    engine.step()
    engine.add(*(make_request(i, prompt(60 if moment == "prefill" else 8, 7), ignore_eos=True) for i in ids))
    engine.step()
    if moment in ("stream", "three answers"):
        engine.step()
    outputs = engine.abort(*ids)
    assert [o.request_id for o in outputs] == ids
    assert all(o.finish_reason == FinishReason.ABORT for o in outputs)
    assert engine.scheduler.num_waiting == 0
    engine.abort("other", "seat0", "seat1")
    assert engine.scheduler.num_running == 0 and not engine.scheduler.has_unfinished()
    assert engine.scheduler.stats().kv_cache_usage == 0.0
    engine.scheduler.check_idle()
    engine.run()


def test_n_answers_share_the_prompt() -> None:
    """The children of one request are admitted in one step and compute their common prompt once."""
    engine = Engine(kv_config(100, full_spec(BLOCK)), max_num_batched_tokens=256)
    children = [make_request(f"{i}_r", prompt(50), seed=i, ignore_eos=True) for i in range(4)]
    engine.add(*children)
    engine.run()
    assert engine.worker.num_prompt_tokens_computed == 50 + 3 * 2
    for child in children:
        engine.check_answer(child)
    assert len({tuple(engine.tokens[c.request_id]) for c in children}) > 1
    assert solo_run(children[0], 128)[0] == engine.tokens["0_r"]
