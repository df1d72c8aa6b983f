"""Who is blamed for the death of a core."""

import random

import pytest

from octavo.engine.quarantine import Quarantine


def test_one_death_proves_nothing():
    quarantine = Quarantine()
    assert quarantine.judge({"a"}, {"a": 0}) is None
    assert not quarantine.is_trying


def test_a_request_that_ran_alone_twice_is_the_culprit():
    quarantine = Quarantine()
    quarantine.judge({"a", "b"}, {"a": 3, "b": 4})
    assert quarantine.judge({"a"}, {"a": 3, "b": 4, "c": 0}) == "a"
    assert not quarantine.is_trying


def test_progress_clears():
    quarantine = Quarantine()
    for num_tokens in range(10):
        assert quarantine.judge({"a"}, {"a": num_tokens}) is None


def test_deaths_before_anything_ran_say_nothing():
    quarantine = Quarantine()
    quarantine.judge({"a"}, {"a": 0})
    for _ in range(5):
        assert quarantine.judge(set(), {"a": 0}) is None
    assert quarantine.judge({"a"}, {"a": 0}) == "a"


def test_a_death_that_a_suspect_attends_in_company_proves_nothing():
    """Somebody kills the core again and again, always before the same request has got on."""
    quarantine = Quarantine()
    for cleared in range(1, 10):
        quarantine.judge({"a", "b"}, {"a": 5, "b": cleared})
        assert quarantine.choose({"a": 5, "b": cleared + 1}) in (None, "a")
    assert quarantine.choose({"a": 6, "b": 99}) is None


def test_aborted_suspects_are_forgotten():
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.judge({"a", "b"}, {"a": 0, "b": 0})
    assert quarantine.choose({"a": 0, "b": 0}) == "a"
    assert quarantine.choose({"b": 0}) == "b"
    assert quarantine.choose({}) is None
    assert not quarantine.is_trying


@pytest.mark.parametrize("seed", range(20))
def test_culprits_among_many_are_found_and_nobody_else(seed):
    """A model of cores: a batch with a poison in it dies before its first token; trials follow the quarantine's word."""
    rng = random.Random(seed)
    num_tokens = {f"r{i}": rng.randrange(9) for i in range(rng.randrange(1, 17))}
    poisons = set(rng.sample(sorted(num_tokens), rng.randrange(1, min(4, len(num_tokens)) + 1)))
    quarantine, failed, num_deaths = Quarantine(), set(), 0
    while True:
        running = set()
        while (chosen := quarantine.choose(num_tokens)) is not None and chosen not in poisons:
            running.add(chosen)
            num_tokens[chosen] += 1
        running |= set(num_tokens) if chosen is None else {chosen}
        if not running & poisons:
            break
        num_deaths += 1
        culprit = quarantine.judge(running, num_tokens)
        if culprit is not None:
            failed.add(culprit)
            del num_tokens[culprit]
    assert failed == poisons
    assert num_deaths <= 4 * len(poisons)
