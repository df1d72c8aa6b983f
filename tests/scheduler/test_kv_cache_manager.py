"""Allocation over several groups: all or nothing, prefixes that every group can supply, publication, reservation."""

import pytest

from octavo.errors import ConfigError
from octavo.scheduler.block_pool import NULL_BLOCK
from octavo.scheduler.kv_cache_manager import KVCacheManager
from octavo.scheduler.request import Request
from octavo.types.kv_spec import FullAttentionSpec, SlidingWindowSpec
from tests.scheduler.fake_worker import full_spec, kv_config, make_request, sliding_spec


def make_manager(
    num_blocks: int, *specs: FullAttentionSpec | SlidingWindowSpec, caching: bool = True
) -> KVCacheManager:
    return KVCacheManager(kv_config(num_blocks, *specs), max_chunk=64, enable_prefix_caching=caching)


def make(manager: KVCacheManager, prompt: list[int], arrival: int = 0, **options: object) -> Request:
    request = Request(make_request(f"r{arrival}", prompt, **options), arrival, 0, 1000, manager.num_groups)
    request.row = arrival
    return request


def admit(manager: KVCacheManager, request: Request, num_new: int | None = None) -> int:
    """Admit a request and compute `num_new` tokens (default: all). Returns the number of tokens found."""
    hit = manager.find_prefix(request)
    num_new = request.num_tokens - hit.num_tokens if num_new is None else num_new
    manager.admit(request, num_new, hit)
    request.num_computed_tokens += num_new
    return hit.num_tokens


def test_groups_of_different_block_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[4, 8\]"):
        make_manager(10, full_spec(4), full_spec(8))


@pytest.mark.parametrize("length", [7, 8, 9])
def test_at_least_one_token_is_left_to_compute(length: int) -> None:
    manager = make_manager(20)
    prompt = list(range(1, length + 1))
    assert admit(manager, make(manager, prompt)) == 0
    assert admit(manager, make(manager, prompt, 1)) == (length - 1) // 4 * 4


def test_allocation_is_all_or_nothing() -> None:
    manager = make_manager(1 + 5, full_spec(), full_spec())
    request = make(manager, list(range(9)))
    admit(manager, request, 8)
    assert manager.pool.num_free == 1
    assert manager.allocate(request, 1) is None
    assert manager.pool.num_free == 1 and [len(t) for t in request.block_ids] == [2, 2]
    manager.check_invariants([request])


def test_new_blocks_say_where_they_go() -> None:
    manager = make_manager(20, full_spec(), full_spec())
    request = make(manager, list(range(30)), 3)
    admit(manager, request, 5)
    new_blocks = manager.allocate(request, 8)
    assert new_blocks is not None
    assert [(b.row, b.group, b.start, b.block_ids) for b in new_blocks] == [
        (3, group, 2, request.block_ids[group][2:]) for group in (0, 1)
    ]
    assert manager.allocate(request, 7) == []


def test_tokens_in_flight_are_not_published() -> None:
    manager = make_manager(20)
    request = make(manager, list(range(6)))
    admit(manager, request)
    request.num_tokens = 9  # three sampled tokens nobody knows yet
    manager.allocate(request, 2)
    request.num_computed_tokens = 8
    assert request.num_published_blocks == 1
    request.token_ids += [50, 51, 52]
    manager.allocate(request, 1)
    assert request.num_published_blocks == 2
    assert admit(manager, make(manager, [*range(6), 50, 51, 99], 1)) == 8


def test_prefix_must_suit_every_group() -> None:
    manager = make_manager(60, full_spec(), sliding_spec(5))
    request = make(manager, list(range(40)))
    admit(manager, request, 20)
    manager.allocate(request, 20)  # positions up to 15 are out of sight of position 20
    request.num_computed_tokens += 20
    table = request.block_ids[1]
    assert table[:4] == [NULL_BLOCK] * 4 and NULL_BLOCK not in table[4:]
    manager.free(request)
    # Evict what the window dropped first: then only prefixes that end where the window's blocks are left can be found.
    for index in range(4):
        manager.pool.forget(manager.pool.find(1, request.block_names[index]))
    assert manager.find_prefix(make(manager, list(range(24)), 1)).num_tokens == 20
    assert manager.find_prefix(make(manager, list(range(16)), 2)).num_tokens == 0
    hit = manager.find_prefix(make(manager, [*range(24), 9], 3))
    assert hit.num_tokens == 24
    assert hit.tables[1][:5] == [NULL_BLOCK] * 5 and NULL_BLOCK not in hit.tables[0]


def test_shortening_for_one_group_goes_round_to_the_others() -> None:
    manager = make_manager(60, sliding_spec(5), full_spec())
    request = make(manager, list(range(25)))
    admit(manager, request)
    names = request.block_names
    # Full attention ends at 5 blocks; there the window lacks block 4, so both must go back to 3.
    manager.pool.forget(manager.pool.find(1, names[5]))
    for index in (3, 4):
        manager.pool.forget(manager.pool.find(0, names[index]))
    assert manager.find_prefix(make(manager, list(range(25)), 1)).num_tokens == 12


def test_salt_separates_caches() -> None:
    manager = make_manager(40)
    prompt = list(range(9))
    assert admit(manager, make(manager, prompt, 0, cache_salt="a")) == 0
    assert admit(manager, make(manager, prompt, 1)) == 0
    assert admit(manager, make(manager, prompt, 2, cache_salt="b")) == 0
    assert admit(manager, make(manager, prompt, 3, cache_salt="a")) == 8


def test_who_does_not_read_the_cache_still_fills_it() -> None:
    manager = make_manager(60)
    prompt = list(range(9))
    assert admit(manager, make(manager, prompt, 0, skip_reading_prefix_cache=True)) == 0
    assert admit(manager, make(manager, prompt, 1, prompt_logprobs=0)) == 0
    assert admit(manager, make(manager, prompt, 2)) == 8


def test_without_caching_nothing_is_found() -> None:
    manager = make_manager(20, caching=False)
    request = make(manager, list(range(9)))
    admit(manager, request)
    manager.free(request)
    assert admit(manager, make(manager, list(range(9)), 1)) == 0


def test_withdrawn_blocks_are_not_found() -> None:
    manager = make_manager(20)
    request = make(manager, list(range(9)))
    admit(manager, request)
    manager.free(request)
    manager.withdraw(request)
    assert manager.find_prefix(make(manager, list(range(9)), 1)).num_tokens == 0
    manager.check_invariants([])


def test_rest_of_a_prefill_is_reserved() -> None:
    manager = make_manager(1 + 10)
    long = make(manager, list(range(30)))
    assert manager.num_blocks_to_admit(long, manager.find_prefix(long)) == 8
    admit(manager, long, 4)
    assert (manager.pool.num_free, manager.num_unreserved) == (9, 2)
    other = make(manager, [90, 91], 1)
    admit(manager, other)
    assert manager.allocate(other, 4) is not None
    other.num_computed_tokens += 4
    assert manager.allocate(other, 4) is None, "the reserve of a prefill was given away"
    assert manager.allocate(long, 26) is not None
    assert long.num_reserved_blocks == 0 and manager.num_unreserved == manager.pool.num_free == 0
    manager.free(long)
    manager.free(other)
    assert manager.usage == 0.0


def test_shared_blocks_cost_nothing_to_admit() -> None:
    manager = make_manager(20)
    prompt = list(range(17))
    first = make(manager, prompt)
    admit(manager, first)
    second = make(manager, prompt, 1)
    assert manager.num_blocks_to_admit(second, manager.find_prefix(second)) == 1
    manager.free(first)
    assert manager.num_blocks_to_admit(second, manager.find_prefix(second)) == 5


@pytest.mark.parametrize(
    ("specs", "expected"), [((), 36), ((full_spec(), full_spec()), 16), ((sliding_spec(3),), 1000)]
)
def test_most_tokens_of_one_request(specs: tuple[FullAttentionSpec | SlidingWindowSpec, ...], expected: int) -> None:
    manager = KVCacheManager(kv_config(10, *specs), max_chunk=8, enable_prefix_caching=True)
    assert manager.max_request_tokens(1000) == expected
