"""Random loads on random schedulers: the accounting is right after every step, and every answer is that of a solo run.

The fake worker checks each slot it reads, so sharing the wrong block, reusing one too early, losing one, or telling the
worker too little shows up at once. A failing seed replays exactly.
"""

import random

import pytest

from octavo.types.outputs import FinishReason
from octavo.types.request import EncoderInput, EngineRequest
from tests.scheduler.fake_worker import (
    EOS,
    GARBAGE,
    VOCAB,
    Engine,
    cross_spec,
    full_spec,
    kv_config,
    make_request,
    sliding_spec,
    solo_run,
)

GROUPS = {
    "full": lambda rng: [full_spec()],
    "sliding": lambda rng: [sliding_spec(rng.randint(1, 20))],
    "full+sliding": lambda rng: [full_spec(), sliding_spec(rng.randint(1, 20)), sliding_spec(rng.randint(1, 20))],
    "full+cross": lambda rng: [full_spec(), cross_spec()],
    "full+sliding+2 cross": lambda rng: [full_spec(), sliding_spec(rng.randint(1, 20)), cross_spec(), cross_spec()],
}
MAX_ENCODER_LEN = 20


def random_engine(rng: random.Random, groups: str, depth: int) -> Engine:
    specs = GROUPS[groups](rng)
    max_num_seqs = rng.choice([1, 3, 8])
    has_encoder = "cross" in groups
    is_chunked = rng.random() < 0.8 or has_encoder
    max_model_len = 64
    budget = rng.randint(max_num_seqs, 40) if is_chunked else max_model_len
    if has_encoder:
        budget += MAX_ENCODER_LEN
    return Engine(
        kv_config(rng.choice([13, 20, 40]) * len(specs), *specs),
        depth=depth,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.8,
        enable_chunked_prefill=is_chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        policy=rng.choice(["fcfs", "priority"]),
        max_encoder_len=MAX_ENCODER_LEN if has_encoder else 0,
    )


def random_request(rng: random.Random, engine: Engine, index: int, stems: list[list[int]]) -> EngineRequest:
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
    max_tokens = rng.choice([None, 0, 1, 5, 20, 40])
    options: dict[str, object] = {
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, 0, 3]) if max_tokens is None or max_tokens >= 3 else 0,
        "seed": rng.randrange(3),
        "ignore_eos": rng.random() < 0.5,
        "stop_token_ids": rng.choice([None, [7], [EOS, 9]]),
        "prompt_logprobs": rng.choice([None, None, None, 0]),
        "logprobs": rng.choice([None, None, 0]),
        "cache_salt": rng.choice([None, None, "a", "b"]),
    }
    if engine.scheduler._has_priorities:
        options["priority"] = rng.randint(-1, 1)
    if engine.worker.cross:
        options["encoder_input"] = EncoderInput([rng.randrange(3)] * rng.choice([1, 7, 8, MAX_ENCODER_LEN]))
    request = make_request(f"r{index}", prompt[: engine.scheduler.max_total_tokens - 1], **options)
    if rng.random() < 0.1:  # resubmitted: its client has the first tokens already
        answer, _ = solo_run(request, engine.scheduler.max_total_tokens)
        if len(answer) > 1:
            request.output_token_ids = answer[: rng.randrange(1, len(answer))]
    return request


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_solo_answers_and_accounting_holds(seed: int, groups: str, depth: int) -> None:
    rng = random.Random(f"{seed}/{groups}/{depth}")
    engine = random_engine(rng, groups, depth)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(8, 40))] for _ in range(3)]
    stems.append(stems[0][:9] + stems[1])
    requests: dict[str, EngineRequest] = {}
    num_requests = 40
    while len(requests) < num_requests or engine.scheduler.has_unfinished() or engine.in_flight:
        if len(requests) < num_requests:
            for _ in range(rng.choice([0, 0, 1, 1, 2, 6])):
                request = random_request(rng, engine, len(requests), stems)
                engine.add(request)
                requests[request.request_id] = request
        if requests and rng.random() < 0.05:
            engine.abort(rng.choice(list(requests)), "never heard of")
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache()
        engine.step()
    engine.scheduler.check_idle()
    for request_id, request in requests.items():
        answer, reason = solo_run(request, engine.scheduler.max_total_tokens)
        last = engine.finished[request_id]
        if last.finish_reason == FinishReason.ABORT:
            assert engine.tokens[request_id] == answer[: len(engine.tokens[request_id])]
            continue
        assert engine.tokens[request_id] == answer, request_id
        assert last.finish_reason == reason
        if request.sampling_params.prompt_logprobs is not None:
            outputs = [o for o in engine.outputs if o.request_id == request_id]
            scored = [entry.logprobs[0] for o in outputs for entry in o.prompt_logprobs or ()]
            assert scored == [-float(p) for p in range(1, len(request.prompt_token_ids))]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_encoder", [False, True])
def test_failing_rows_hurt_nobody_else(seed: int, depth: int, has_encoder: bool) -> None:
    # Much sharing between requests of the same step and of neighbouring steps, so that failed rows leave traps behind.
    rng = random.Random(f"fail/{seed}/{depth}")
    specs = [cross_spec()] if has_encoder else []
    engine = Engine(
        kv_config(80, full_spec(), sliding_spec(6), *specs),
        depth=depth,
        max_num_batched_tokens=60,
        max_model_len=64,
        max_encoder_len=MAX_ENCODER_LEN if has_encoder else 0,
    )
    engine.worker.tolerates_damage = True
    stems = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(2)]
    requests: dict[str, EngineRequest] = {}
    while len(requests) < 40 or engine.scheduler.has_unfinished() or engine.in_flight:
        if len(requests) < 40 and rng.random() < 0.7:
            for _ in range(rng.randint(1, 4)):
                prompt = [*rng.choice(stems)[: rng.choice([9, 20, 30])], rng.randrange(VOCAB)]
                options = {"max_tokens": rng.randint(1, 12), "seed": rng.randrange(3)}
                if has_encoder:
                    options["encoder_input"] = EncoderInput([rng.randrange(2)] * 9)
                request = make_request(f"r{len(requests)}", prompt, **options)
                engine.add(request)
                requests[request.request_id] = request
                if rng.random() < 0.2:
                    engine.worker.fail_request_ids.add(request.request_id)
        engine.step()
    engine.scheduler.check_idle()
    for request_id, request in requests.items():
        last = engine.finished[request_id]
        assert GARBAGE not in engine.tokens[request_id]
        if request_id in engine.worker.fail_request_ids:
            assert last.finish_reason == FinishReason.ERROR and last.error == "told to fail"
        else:
            engine.check_answer(request)


def test_pressure_is_real() -> None:
    """The fuzz above is worth nothing if its pools never run dry: this one must preempt, hit and evict."""
    engine = Engine(kv_config(13), max_num_seqs=8, max_num_batched_tokens=16, max_model_len=48)
    rng = random.Random(5)
    stem = [rng.randrange(VOCAB) for _ in range(12)]
    requests = [make_request(f"r{i}", [*stem[: rng.randint(1, 12)], i], max_tokens=20) for i in range(200)]
    engine.add(*requests)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 10
    assert stats.prefix_cache_hits > 100
    for request in requests:
        engine.check_answer(request)
