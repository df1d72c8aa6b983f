"""The sampler and the processors of logits: every field of SamplingParams, by itself and beside neighbours."""

import math

import pytest
import torch

from octavo.types.sampling_params import SamplingParams
from octavo.types.step import ModelRunnerOutput, NewRow
from octavo.worker.logits_processors import LogitsProcessor
from octavo.worker.sampler import NO_TOKEN_ERROR, Sampler

VOCAB = 96
NUM_ROWS = 9
CPU = torch.device("cpu")


class Rig:
    """A sampler with the rows a runner would keep, and requests that append what they sample."""

    def __init__(self, mode: str = "raw_logprobs", processors=()):
        self.sampler = Sampler(NUM_ROWS, VOCAB, CPU, mode, processors)
        self.token_ids = torch.zeros(NUM_ROWS, 64, dtype=torch.int32)
        self.num_prompt = torch.zeros(NUM_ROWS, dtype=torch.int32)
        self.lengths: dict[int, int] = {}

    def add(self, row: int, prompt=(1, 2), output=(), stop_token_ids=(), **params) -> None:
        params.setdefault("temperature", 0.0)
        tokens = [*prompt, *output]
        new = NewRow(row, f"request-{row}", tokens, len(prompt), 0, SamplingParams(**params), list(stop_token_ids), [])
        self.sampler.add_row(row, new)
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.num_prompt[row] = len(prompt)
        self.lengths[row] = len(tokens)

    def remove(self, row: int) -> None:
        self.sampler.remove_row(row)
        del self.lengths[row]

    def step(self, logits: torch.Tensor, *rows: int, **kwargs) -> ModelRunnerOutput:
        """One step over `rows`; what is sampled is appended."""
        tensor = torch.tensor(rows, dtype=torch.int32)
        seq_lens = torch.tensor([self.lengths[row] for row in rows], dtype=torch.int32)
        before = logits.clone()
        sampled = self.sampler.sample(logits, list(rows), tensor, seq_lens, self.token_ids, self.num_prompt, **kwargs)
        assert torch.equal(logits, before) or before.isnan().any()
        output = ModelRunnerOutput(0, [[] for _ in rows])
        sampled.to_host().fill(output, [True] * len(rows))
        for i, row in enumerate(rows):
            self.token_ids[row, self.lengths[row]] = sampled.token_ids[i]
            self.lengths[row] += 1
        return output

    def tokens(self, logits: torch.Tensor, *rows: int) -> list[int]:
        output = self.step(logits, *rows)
        assert output.errors is None
        return [token for (token,) in output.sampled_token_ids]


def ladder(num: int, *order: int) -> torch.Tensor:
    """Logits whose most likely tokens are `order`, 1 apart; everything else far below."""
    logits = torch.full((num, VOCAB), -20.0)
    for place, token_id in enumerate(order):
        logits[:, token_id] = 10.0 - place
    return logits


def processed(rig: Rig, logits: torch.Tensor, row: int) -> torch.Tensor:
    """The row's logits after the processors, read through the whole vocabulary's processed logits."""
    (entry,) = rig.step(logits, row).logprobs[0]
    values = torch.empty(VOCAB)
    values[torch.tensor(entry.token_ids[1:])] = torch.tensor(entry.logprobs[1:])
    return values


def test_plain_rows_take_the_short_path():
    rig = Rig()
    rig.add(0)
    rig.add(1, temperature=1.0, top_k=3, seed=1)
    assert rig.sampler.is_plain([0, 1])
    assert not rig.sampler.all_greedy
    assert rig.sampler.any_filter
    rig.add(2, logit_bias={3: 1.0})
    rig.add(3, logprobs=0)
    assert rig.sampler.is_plain([1, 0])
    assert not rig.sampler.is_plain([0, 2])
    assert not rig.sampler.is_plain([3])
    for row in (1, 2, 3):
        rig.remove(row)
    assert rig.sampler.is_plain([0, 1, 2, 3])
    assert rig.sampler.all_greedy
    assert not rig.sampler.any_filter


def test_the_plain_path_samples_like_the_full_one():
    rig = Rig()
    rig.add(4, temperature=0.9, seed=5)
    rig.add(2)
    rig.add(7, temperature=1.2, top_p=0.8, min_p=0.01, seed=-9)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    rows, seq_lens = torch.tensor([7, 2, 4], dtype=torch.int32), torch.full((3,), 2, dtype=torch.int32)
    rig.sampler.flush()
    token_ids, is_bad = rig.sampler.sample_plain(logits, rows, seq_lens)
    assert token_ids.tolist() == rig.tokens(logits, 7, 2, 4)
    assert not is_bad.any()


def test_a_row_taken_over_keeps_nothing_of_its_predecessor():
    everything = {
        "temperature": 1.5,
        "top_k": 2,
        "logit_bias": {9: 100.0},
        "allowed_token_ids": [9],
        "bad_words_token_ids": [[5]],
        "min_tokens": 4,
        "presence_penalty": 2.0,
        "logprobs": 3,
    }
    rig = Rig()
    rig.add(0, stop_token_ids=[5], **everything)
    rig.step(ladder(1, 5, 6), 0)
    rig.remove(0)
    rig.add(0)
    output = rig.step(ladder(1, 5, 6), 0)
    assert output.sampled_token_ids == [[5]]
    assert output.logprobs is None
    assert rig.sampler.is_plain([0])


def test_seeded_rows_repeat_alone_and_among_others():
    """FC-038, below the front: the row, the batch and the order do not matter; seed and position do."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))

    def run(row: int, neighbours: list[int]) -> list[int]:
        rig = Rig()
        rig.add(row, temperature=1.0, seed=11)
        for other in neighbours:
            rig.add(other, temperature=1.3, seed=other, top_p=0.9, presence_penalty=0.5)
        rows = [*neighbours, row]
        return [rig.tokens(logits[step].repeat(len(rows), 1), *rows)[-1] for step in range(8)]

    alone = run(0, [])
    assert len(set(alone)) > 1
    assert run(5, [1, 2, 3, 0]) == alone


def test_a_resumed_row_goes_on_with_the_same_noise():
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    through = Rig()
    through.add(0, temperature=1.0, seed=3, frequency_penalty=0.5, min_tokens=3, stop_token_ids=[7])
    expected = [through.tokens(logits[i : i + 1], 0)[0] for i in range(6)]
    resumed = Rig()
    resumed.add(
        4, output=expected[:2], temperature=1.0, seed=3, frequency_penalty=0.5, min_tokens=3, stop_token_ids=[7]
    )
    assert [resumed.tokens(logits[i : i + 1], 4)[0] for i in range(2, 6)] == expected[2:]


def test_requests_without_a_seed_differ_and_repeat():
    logits = torch.zeros(2, VOCAB)
    rig, again = Rig(), Rig()
    for r in (rig, again):
        r.add(0, temperature=1.0)
        r.add(1, temperature=1.0)
    draws = [rig.tokens(logits, 0, 1) for _ in range(6)]
    assert [a for a, _ in draws] != [b for _, b in draws]
    assert draws == [again.tokens(logits, 0, 1) for _ in range(6)]


def test_min_tokens_masks_every_end_id_until_then():
    """FC-029: ids 2 and 7 end the answer; both are impossible for five tokens, then possible."""
    rig = Rig()
    rig.add(0, stop_token_ids=[2, 7], min_tokens=5)
    assert [rig.tokens(ladder(1, 7, 2, 30), 0)[0] for _ in range(7)] == [30] * 5 + [7, 7]
    assert rig.sampler.is_plain([0])  # once past, it costs nothing


def test_min_tokens_counts_what_was_out_before():
    rig = Rig()
    rig.add(0, output=[9, 9, 9], stop_token_ids=[7], min_tokens=4)
    rig.add(1, output=[9, 9, 9, 9], stop_token_ids=[7], min_tokens=4)
    assert rig.tokens(ladder(2, 7, 30), 0, 1) == [30, 7]
    assert rig.tokens(ladder(2, 7, 30), 0, 1) == [7, 7]


def test_end_ids_beyond_the_vocabulary_are_ignored():
    """FC-031: the request lives, and so does its neighbour."""
    rig = Rig()
    rig.add(0, stop_token_ids=[999_999, 7], min_tokens=1)
    rig.add(1)
    rig.add(2, stop_token_ids=[999_999], min_tokens=3)
    assert rig.tokens(ladder(3, 7, 30), 0, 1, 2) == [30, 7, 7]


def test_logit_bias_forces_and_forbids():
    """FC-032: +100 forces, -100 forbids, also the last id of the vocabulary."""
    rig = Rig()
    rig.add(0, logit_bias={VOCAB - 1: 100.0})
    rig.add(1, logit_bias={5: -100.0, 8: 0.5})
    rig.add(2)
    assert rig.tokens(ladder(3, 5, 6), 0, 1, 2) == [VOCAB - 1, 6, 5]


def test_logit_bias_adds_just_that():
    rig = Rig("processed_logits")
    rig.add(0, logit_bias={5: -1.25, 40: 3.5}, logprobs=-1)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    change = processed(rig, logits, 0) - logits[0]
    assert change[5].item() == pytest.approx(-1.25, abs=1e-6)
    assert change[40].item() == pytest.approx(3.5, abs=1e-6)
    assert change.count_nonzero() == 2


def test_allowed_token_ids():
    rig = Rig()
    rig.add(0, allowed_token_ids=[95, 31, 32, 0], temperature=2.0, seed=0)
    rig.add(1, allowed_token_ids=[64])
    rig.add(2)
    for _ in range(20):
        first, second, third = rig.tokens(torch.zeros(3, VOCAB), 0, 1, 2)
        assert first in (95, 31, 32, 0)
        assert (second, third) == (64, 0)


def test_bad_words_of_one_token_never_come():
    rig = Rig()
    rig.add(0, bad_words_token_ids=[[5], [6]])
    assert rig.tokens(ladder(1, 5, 6, 7), 0) == [7]


def test_bad_words_forbid_the_last_token_after_the_rest():
    rig = Rig()
    rig.add(0, bad_words_token_ids=[[11, 12, 5], [40]])
    rig.add(1, bad_words_token_ids=[[12, 6]])  # narrower than its neighbour's: padded
    likes_5 = ladder(2, 5, 6)
    assert rig.tokens(likes_5, 0, 1) == [5, 5]
    assert rig.tokens(ladder(2, 11), 0, 1) == [11, 11]
    assert rig.tokens(likes_5, 0, 1) == [5, 5]  # 11 alone is not enough
    for token_id in (11, 12):
        rig.tokens(ladder(2, token_id), 0, 1)
    assert rig.tokens(likes_5, 0, 1) == [6, 5]
    assert rig.tokens(likes_5, 0, 1) == [5, 5]


def test_bad_words_look_at_the_output_only():
    rig = Rig()
    rig.add(0, prompt=[11, 12], bad_words_token_ids=[[12, 5]])
    rig.add(1, prompt=[11], output=[12], bad_words_token_ids=[[12, 5]])
    rig.add(2, prompt=[12], bad_words_token_ids=[[1, 2, 3, 12, 5]])  # longer than all there is
    assert rig.tokens(ladder(3, 5, 6), 0, 1, 2) == [5, 6, 5]


def test_each_penalty_looks_at_its_text():
    """FC-040: the closed formula, against every token. 20 is in the prompt twice, 21 in both, 22 twice in the output."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6)) * 3
    logits[0, 20], logits[0, 21] = 2.0, -2.0
    prompt, output = [20, 20, 21], [21, 22, 22]

    def change(**params) -> dict[int, float]:
        rig = Rig("processed_logits")
        rig.add(0, prompt=prompt, output=output, logprobs=-1, **params)
        values = processed(rig, logits, 0)
        return {i: values[i].item() for i in (values != logits[0]).nonzero().flatten().tolist()}

    before = logits[0].tolist()
    x = before[22]
    assert change(repetition_penalty=1.3) == pytest.approx(
        {20: 2.0 / 1.3, 21: -2.0 * 1.3, 22: x / 1.3 if x > 0 else x * 1.3}, rel=1e-6
    )
    assert change(presence_penalty=2.0) == pytest.approx({21: -4.0, 22: x - 2.0}, rel=1e-6)
    assert change(frequency_penalty=2.0) == pytest.approx({21: -4.0, 22: x - 4.0}, rel=1e-6)
    assert change(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=-0.25) == pytest.approx(
        {20: 1.0, 21: -4.0 - 0.25, 22: (x / 2 if x > 0 else x * 2) - 0.5 + 0.5}, rel=1e-5
    )


def test_penalties_see_tokens_as_they_come():
    rig = Rig()
    rig.add(0, presence_penalty=2.0)
    rig.add(1)
    drawn = [rig.tokens(ladder(2, 5, 6, 7), 0, 1) for _ in range(3)]
    assert [a for a, _ in drawn] == [5, 6, 5]  # 10 → 8, 9 → 7: then 5 leads once more
    assert [b for _, b in drawn] == [5, 5, 5]


def test_grammar_bitmask_masks_its_rows():
    rig = Rig()
    for row in (0, 1, 2):
        rig.add(row)
    words = torch.zeros(1, VOCAB // 32, dtype=torch.int32)
    words[0, 2] = -(2**31)  # token 95
    output = rig.step(ladder(3, 5), 0, 1, 2, bitmask=words, bitmask_indices=torch.tensor([1]))
    assert output.sampled_token_ids == [[5], [95], [5]]


def test_raw_logprobs_are_those_of_the_model():
    rig = Rig()
    rig.add(0, logprobs=2, temperature=0.5, logit_bias={5: -100.0}, seed=1, top_k=1)
    rig.add(1, logprobs=0)
    rig.add(2)
    logits = ladder(3, 5, 6, 7)
    output = rig.step(logits, 2, 0, 1)
    expected = logits[0].log_softmax(0).tolist()
    (first,), (second,) = output.logprobs[1], output.logprobs[2]
    assert first.token_ids == [6, 5, 6]
    assert first.logprobs == pytest.approx([expected[6], expected[5], expected[6]], rel=1e-5)
    assert first.rank == 2
    assert second.token_ids == [5]
    assert second.logprobs == pytest.approx([expected[5]], rel=1e-5)
    assert second.rank == 1
    assert 0 not in output.logprobs


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_other_logprobs_modes(mode):
    rig = Rig(mode)
    rig.add(0, logprobs=4, temperature=0.5, logit_bias={5: -2.5}, seed=1, top_k=2)
    (entry,) = rig.step(ladder(1, 5, 6, 7), 0).logprobs[0]
    # 5, 6, 7 at 10, 9, 8; the bias takes 5 to 7.5; temperature doubles; top_k leaves 6 and 7.
    lower = math.log1p(math.exp(-2.0))
    expected = {
        "raw_logits": ([5, 6, 7], [10.0, 9.0, 8.0]),
        "processed_logits": ([6, 7], [18.0, 16.0]),
        "processed_logprobs": ([6, 7], [-lower, -2.0 - lower]),
    }[mode]
    ids, values = expected
    assert entry.token_ids[1 : 1 + len(ids)] == ids
    assert entry.logprobs[1 : 1 + len(ids)] == pytest.approx(values, rel=1e-5)
    if mode != "raw_logits":
        assert entry.logprobs[1 + len(ids)] == -math.inf


def test_the_whole_vocabulary_of_logprobs():
    rig = Rig()
    rig.add(0, logprobs=-1)
    (entry,) = rig.step(torch.zeros(1, VOCAB), 0).logprobs[0]
    assert len(entry.token_ids) == VOCAB + 1
    assert sum(math.exp(value) for value in entry.logprobs[1:]) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"presence_penalty": 1.0}])
def test_a_row_of_nan_fails_alone(extra):
    rig, healthy = Rig(), Rig()
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8))
    for r in (rig, healthy):
        r.add(0, temperature=1.0, seed=1, **extra)
        r.add(1, temperature=1.0, seed=2, top_k=5, **extra)
        r.add(2, **extra)
    expected = healthy.step(logits, 0, 1, 2)
    logits[1, 17] = math.nan
    output = rig.step(logits, 0, 1, 2)
    assert output.errors == {1: NO_TOKEN_ERROR}
    assert output.sampled_token_ids == [expected.sampled_token_ids[0], [], expected.sampled_token_ids[2]]
    if "logprobs" in extra:
        assert output.logprobs == {i: expected.logprobs[i] for i in (0, 2)}


def test_a_row_with_nothing_left_to_choose_fails_alone():
    rig = Rig()
    rig.add(0, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2)
    rig.add(1)
    output = rig.step(ladder(2, 5), 0, 1)
    assert output.errors == {0: NO_TOKEN_ERROR}
    assert output.sampled_token_ids == [[], [5]]


class Faulty(LogitsProcessor):
    """Refuses requests that allow "refuse", and breaks in the middle of a step for those that allow "break"."""

    def add_row(self, row: int, new: NewRow) -> None:
        wish = (new.sampling_params.extra_args or {}).get("faulty")
        if wish == "refuse":
            raise ValueError("no, thanks")
        if wish == "break":
            self.rows.add(row)

    def apply(self, logits, step) -> None:
        raise RuntimeError("out of luck")


def test_a_faulty_processor_fails_its_own_rows():
    rig = Rig(processors=[Faulty()])
    rig.add(0)
    rig.add(1, extra_args={"faulty": "break"})
    rig.add(2, extra_args={"faulty": "refuse"}, logit_bias={9: 100.0})
    output = rig.step(ladder(3, 5), 0, 1, 2)
    assert output.sampled_token_ids == [[5], [], []]
    assert output.errors == {1: "Faulty: out of luck", 2: "Faulty: no, thanks"}
    rig.remove(1)
    rig.remove(2)
    rig.add(2)
    assert rig.tokens(ladder(2, 5), 0, 2) == [5, 5]


def test_ids_that_would_write_into_a_neighbour_are_refused():
    """The front checks them; a hole there must not become somebody else's wrong token."""
    rig = Rig()
    rig.add(0, logit_bias={VOCAB: 100.0})
    rig.add(1)
    output = rig.step(ladder(2, 5), 0, 1)
    assert list(output.errors) == [0]
    assert output.sampled_token_ids == [[], [5]]


def test_results_go_to_the_places_that_sampled():
    rig = Rig()
    rig.add(0, logprobs=1)
    rig.add(1)
    sampled = rig.sampler.sample(
        ladder(2, 5),
        [1, 0],
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([2, 2]),
        rig.token_ids,
        rig.num_prompt,
    )
    output = ModelRunnerOutput(0, [[] for _ in range(4)])
    sampled.to_host().fill(output, [False, True, False, True])
    assert output.sampled_token_ids == [[], [5], [], [5]]
    assert list(output.logprobs) == [3]


def test_everything_at_once_equals_each_row_alone():
    """Rows of all kinds in one batch, in any order, over steps: nothing leaks from one to another."""
    kinds = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 9, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "logprobs": 2},
        {"logit_bias": {3: 2.0}, "repetition_penalty": 1.4},
        {"temperature": 1.1, "seed": 5, "min_p": 0.05, "bad_words_token_ids": [[4], [8, 9]]},
        {"allowed_token_ids": list(range(40)), "min_tokens": 3, "frequency_penalty": 0.3},
        {"temperature": 1.0, "seed": 7, "logprobs": 0, "min_tokens": 2},
    ]
    rng = torch.Generator().manual_seed(9)
    logits = torch.randn(4, len(kinds), VOCAB, generator=rng)

    def alone(kind: int) -> list[tuple]:
        rig = Rig()
        rig.add(0, stop_token_ids=[3, 30], **kinds[kind])
        outputs = [rig.step(logits[step, kind : kind + 1], 0) for step in range(4)]
        return [(o.sampled_token_ids[0], o.logprobs and o.logprobs[0]) for o in outputs]

    rig = Rig()
    for kind, params in enumerate(kinds):
        rig.add(kind, stop_token_ids=[3, 30], **params)
    together: list[list[tuple]] = [[] for _ in kinds]
    orders = [torch.randperm(len(kinds), generator=rng).tolist() for _ in range(3)]
    orders.insert(1, orders[0])  # the same composition twice running
    for step in range(4):
        order = orders[step]
        output = rig.step(logits[step, order], *order)
        for i, kind in enumerate(order):
            together[kind].append((output.sampled_token_ids[i], (output.logprobs or {}).get(i)))
    assert together == [alone(kind) for kind in range(len(kinds))]
