"""Sampling: the random stream, which tokens survive, and that a row depends on nothing but itself."""

import math
import time

import pytest
import torch

from octavo.ops.sampling import gumbel_noise, philox4x32, sample, survivor_threshold

PROVIDERS = [
    pytest.param(sample.reference, id="torch"),
    pytest.param(next(p.fn for p in sample.providers if p.name == "numpy"), id="numpy"),
    pytest.param(sample, id="cpu"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def draw(logits, *, fn=sample, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    """Sample every row of logits with one set of parameters; returns token ids."""
    num = logits.shape[0]
    return fn(
        logits,
        torch.arange(num, dtype=torch.int32),
        torch.arange(num, dtype=torch.int32) if positions is None else positions,
        torch.full((num,), temperature),
        torch.full((num,), top_k, dtype=torch.int32),
        torch.full((num,), top_p),
        torch.full((num,), min_p),
        torch.zeros(num, dtype=torch.int64) if seeds is None else seeds,
    )[0]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The vectors published with Random123."""
    assert philox4x32(words(counter), words(key)) == words(expected)


def test_noise_is_addressed_by_seed_position_and_token():
    seed = 0x0123456789ABCDEF
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([77]), 11)[0]
    for token_id in range(11):
        counter = tuple(torch.tensor([word]) for word in (token_id // 4, 77, 0, 0))
        bits = philox4x32(counter, (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32])))[token_id % 4].item()
        uniform = (bits + 0.5) / 2**32
        assert noise[token_id].item() == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-5, abs=1e-6)


def test_noise_is_gumbel():
    noise = gumbel_noise(torch.tensor([1, -5]), torch.tensor([0, 2**31 - 1]), 100_000)
    assert noise.isfinite().all()
    for row in noise.double():
        assert row.mean().item() == pytest.approx(0.57722, abs=0.02)
        assert row.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("fn", PROVIDERS)
def test_draws_follow_the_softmax(fn):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    num = 20_000 if fn is sample.reference else 800  # the CPU's providers go row by row
    ids = draw(logits.repeat(num, 1), fn=fn, temperature=0.8)
    expected = (logits / 0.8).softmax(0)
    share = torch.bincount(ids.long(), minlength=5) / len(ids)
    # Four standard deviations of a binomial share.
    assert ((share - expected).abs() < 4 * (expected * (1 - expected) / len(ids)).sqrt()).all()


@pytest.mark.parametrize("fn", PROVIDERS)
def test_greedy_takes_the_lowest_id_among_equals(fn):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    assert draw(logits, fn=fn, temperature=0.0).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3}),  # the third and fourth are equal
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {0}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.45}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        # 0.4 / 0.7 of what top_k leaves is more than half, so the second is not needed.
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"min_p": 0.45, "top_p": 0.6}, {0, 1}),
    ],
)
@pytest.mark.parametrize("fn", PROVIDERS)
def test_filters_keep_exactly_these(parameters, kept, fn):
    """Probabilities 0.4, 0.3, 0.125, 0.125, 0.05."""
    logits = torch.tensor([0.4, 0.3, 0.125, 0.125, 0.05]).log()
    ids = draw(logits.repeat(150, 1), fn=fn, **parameters)
    assert set(ids.tolist()) == kept


def test_temperature_comes_before_the_filters():
    logits = torch.tensor([[0.6, 0.4]]).log().repeat(60, 1)
    assert set(draw(logits, top_p=0.58, temperature=1.0).tolist()) == {0}
    assert set(draw(logits, top_p=0.58, temperature=2.0).tolist()) == {0, 1}


def test_threshold_of_a_flat_row_keeps_all():
    x = torch.zeros(1, 50)
    one = torch.ones(1)
    assert survivor_threshold(x, torch.tensor([7]), 0.3 * one, 0 * one).item() == 0.0


def _mixed_batch(num: int, vocab_size: int = 997):
    rng = torch.Generator().manual_seed(7)
    logits = torch.randn(num, vocab_size, generator=rng) * 3
    pick = torch.arange(num)
    return (
        logits,
        torch.arange(num, dtype=torch.int32),
        torch.randint(0, 5000, (num,), generator=rng, dtype=torch.int32),
        torch.tensor([0.0, 0.7, 1.0, 1.6])[pick % 4],
        torch.tensor([0, 20, 0], dtype=torch.int32)[pick % 3],
        torch.tensor([1.0, 0.9, 1.0, 0.8, 0.99])[pick % 5],
        torch.tensor([0.0, 0.0, 0.05])[pick % 3],
        torch.randint(-(2**63), 2**63 - 1, (num,), generator=rng),
    )


def test_a_row_is_free_of_its_neighbours():
    logits, rows, positions, *parameters = _mixed_batch(24)
    together, _ = sample(logits, rows, positions, *parameters)
    for i in range(24):
        alone, _ = sample(logits[i : i + 1].clone(), rows[i : i + 1], positions[i : i + 1], *parameters)
        assert alone.item() == together[i].item()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    shuffled, _ = sample(logits[order], rows[order], positions[order], *parameters)
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("fn", PROVIDERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_is_reported_and_contained(fn, value):
    """A NaN or +inf anywhere, or nothing but -inf, spoils its row alone."""
    arguments = _mixed_batch(8)
    good, was_bad = fn(*arguments)
    assert not was_bad.any()
    broken = arguments[0].clone()
    broken[2] = -float("inf")
    broken[2, 40] = value
    broken[4, :] = value
    ids, is_bad = fn(broken, *arguments[1:])
    assert is_bad.tolist() == [False, False, True, False, True, False, False, False]
    assert ids[is_bad].tolist() == [0, 0]
    assert torch.equal(ids[~is_bad], good[~is_bad])


def test_masked_tokens_are_never_drawn():
    logits = torch.full((60, 64), -float("inf"))
    logits[:, 10:13] = 0.0
    assert set(draw(logits, temperature=2.0).tolist()) == {10, 11, 12}
    assert set(draw(logits, temperature=2.0, top_p=0.999).tolist()) == {10, 11, 12}
    assert set(draw(logits, temperature=2.0, top_k=5).tolist()) == {10, 11, 12}


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_every_int64_seed_works_and_repeats(seed):
    """FC-034, below the door."""
    logits = torch.zeros(6, 500)
    seeds = torch.full((6,), seed)
    first = draw(logits, seeds=seeds)
    assert torch.equal(first, draw(logits, seeds=seeds))
    assert len(set(first.tolist())) > 1  # the position matters
    assert not torch.equal(first, draw(logits, seeds=torch.full((6,), seed ^ 1)))
    assert not torch.equal(first, draw(logits, seeds=torch.full((6,), seed ^ (1 << 40))))  # so does the upper half


def test_half_precision_logits_sample_like_their_float32_values():
    logits, *rest = _mixed_batch(12)
    for dtype in (torch.bfloat16, torch.float16):
        half = logits.to(dtype)
        assert torch.equal(sample(half, *rest)[0], sample(half.float(), *rest)[0])


def test_promises_of_the_host_change_nothing():
    logits, rows, positions, temperature, top_k, top_p, min_p, seeds = _mixed_batch(12)
    off = (torch.zeros_like(top_k), torch.ones_like(top_p), torch.zeros_like(min_p))
    plain = (logits, rows, positions, temperature, *off, seeds)
    assert torch.equal(sample(*plain, False, False)[0], sample(*plain)[0])
    greedy = (logits, rows, positions, torch.zeros_like(temperature), *off, seeds)
    assert torch.equal(sample(*greedy, True, False)[0], sample(*greedy)[0])


def test_noise_of_a_whole_vocabulary_is_cheap():
    """The best of many, so that a busy machine does not fail it: 49,152 tokens took 1.8 ms of one core."""
    seed, position = torch.tensor([3]), torch.tensor([9])
    best = min(_seconds(lambda: gumbel_noise(seed, position, 49_152)) for _ in range(30))
    assert best < 0.02


def _seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _large_batch(num: int, vocab_size: int, scale: float):
    """Rows of every kind on the GPU, in bfloat16; a small scale makes survivors many, a large one few."""
    rng = torch.Generator().manual_seed(num)
    pick = torch.arange(num)
    arguments = (
        (torch.randn(num, vocab_size, generator=rng) * scale).bfloat16(),
        torch.randperm(num, generator=rng).int(),
        torch.randint(0, 5000, (num,), generator=rng, dtype=torch.int32),
        torch.tensor([0.0, 0.7, 1.0, 1.3])[pick % 4],
        torch.tensor([0, 20, 1, 3000, 0], dtype=torch.int32)[pick % 5],
        torch.tensor([1.0, 0.9, 0.5])[pick % 3],
        torch.tensor([0.0, 0.0, 0.05, 0.0, 0.5, 0.0, 0.0])[pick % 7],
        torch.randint(-(2**63), 2**63 - 1, (num,), generator=rng),
    )
    return tuple(t.cuda() for t in arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 262_144])
@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_triton_equals_the_reference_on_large_vocabularies(vocab_size, scale):
    """A sum that ends within a rounding of top_p may fall either way: of 60 rows at most one."""
    arguments = _large_batch(60, vocab_size, scale)
    expected, _ = sample.reference(*arguments)
    actual, is_bad = sample(*arguments)
    assert (actual != expected).sum().item() <= 1
    assert not is_bad.any()


@pytest.mark.gpu
def test_triton_rows_are_free_of_their_neighbours():
    logits, rows, *rest = _large_batch(200, 50_257, 1.5)
    together, _ = sample(logits, rows, *rest)
    for i in range(0, 200, 7):
        positions, *parameters = rest
        alone, _ = sample(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1], *parameters)
        assert alone.item() == together[i].item()


@pytest.mark.gpu
def test_triton_in_a_graph_reads_what_its_buffers_hold_at_replay():
    arguments = _large_batch(16, 50_257, 1.5)
    static = tuple(t.clone() for t in arguments)
    sample(*static)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids, _ = sample(*static)
    for seed in range(3):
        other = (torch.randn(16, 50_257, generator=torch.Generator().manual_seed(seed)) * 2).bfloat16().cuda()
        static[0].copy_(other)
        static[2].add_(1)
        static[3].copy_(static[3].flip(0))
        graph.replay()
        assert torch.equal(token_ids, sample(*static)[0])


@pytest.mark.gpu
def test_triton_contains_bad_rows():
    logits, *rest = _large_batch(12, 50_257, 1.5)
    good, _ = sample(logits, *rest)
    logits[3, 40_000] = float("nan")
    logits[5] = -float("inf")
    logits[7, 0] = float("inf")
    ids, is_bad = sample(logits, *rest)
    assert is_bad.nonzero().flatten().tolist() == [3, 5, 7]
    assert torch.equal(ids[~is_bad], good[~is_bad])
