"""The queue of waiting requests."""

import random

import pytest

from octavo.scheduler.queue import RequestQueue
from octavo.scheduler.request import Request
from tests.scheduler.fake_worker import make_request


def make(arrival: int, priority: int = 0) -> Request:
    return Request(make_request(f"r{arrival}", [1, 2]), arrival, priority, 100, 1)


def test_order_is_priority_then_arrival() -> None:
    queue = RequestQueue()
    for arrival, priority in enumerate([0, 1, -1, 0, -1]):
        queue.push(make(arrival, priority))
    assert [queue.pop().arrival for _ in range(5)] == [2, 4, 0, 3, 1]
    assert not queue and queue.num_prompt_tokens == 0


def test_who_comes_back_stands_before_later_arrivals() -> None:
    queue = RequestQueue()
    requests = [make(i) for i in range(4)]
    for request in requests:
        queue.push(request)
    first = queue.pop()
    second = queue.pop()
    queue.push(second)
    queue.push(first)
    assert [queue.pop() for _ in range(4)] == requests


@pytest.mark.parametrize("seed", range(5))
def test_random_removals_match_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    queue = RequestQueue()
    members: list[Request] = []
    outside: list[Request] = []
    for arrival in range(600):
        action = rng.random()
        if action < 0.45 or not members:
            request = outside.pop() if outside and rng.random() < 0.3 else make(arrival, rng.randint(0, 2))
            queue.push(request)
            members.append(request)
        elif action < 0.8:
            request = members.pop(rng.randrange(len(members)))
            queue.remove(request)
            outside.append(request)
        else:
            request = queue.pop()
            assert request is min(members, key=lambda r: r.order)
            members.remove(request)
        assert len(queue) == len(members)
        assert sorted(r.arrival for r in queue) == sorted(r.arrival for r in members)
        assert queue.num_prompt_tokens == 2 * len(members)
        if members:
            assert queue.peek() is min(members, key=lambda r: r.order)


def test_removed_entries_do_not_pile_up() -> None:
    queue = RequestQueue()
    keep = make(0)
    queue.push(keep)
    for arrival in range(1, 2000):
        request = make(arrival)
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) < 100 and queue.pop() is keep
