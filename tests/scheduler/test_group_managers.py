"""What full and sliding-window groups keep, find and give back."""

import random

import msgspec
import pytest

from octavo.scheduler.block_pool import NULL_BLOCK, BlockPool
from octavo.scheduler.group_managers import make_group_manager
from tests.scheduler.fake_worker import full_spec, sliding_spec

NAMES = [bytes([i]) * 16 for i in range(40)]


def cached_pool(indices: set[int]) -> BlockPool:
    """A pool where the blocks of these indices of a prefix are cached, in group 0."""
    pool = BlockPool(100, 1)
    for i in indices:
        pool.publish(pool.allocate(1)[0], 0, NAMES[i])
    return pool


def test_full_prefix_ends_at_the_first_gap() -> None:
    manager = make_group_manager(0, full_spec(4), cached_pool({0, 1, 2, 4}), 16)
    assert manager.longest_prefix(NAMES, 10) == 3
    assert manager.longest_prefix(NAMES, 2) == 2
    table = manager.prefix_table(NAMES, 3)
    assert len(set(table)) == 3 and NULL_BLOCK not in table


@pytest.mark.parametrize("seed", range(30))
def test_sliding_prefix_needs_exactly_the_window(seed: int) -> None:
    rng = random.Random(seed)
    window, limit = rng.randint(1, 20), rng.randint(0, 12)
    cached = {i for i in range(12) if rng.random() < 0.7}
    manager = make_group_manager(0, sliding_spec(window, 4), cached_pool(cached), 16)

    def visible_blocks(num_blocks: int) -> set[int]:
        # Positions that the next token sees, itself left out.
        end = num_blocks * 4
        return {p // 4 for p in range(max(0, end - window + 1), end)}

    expected = max(n for n in range(limit + 1) if visible_blocks(n) <= cached)
    assert manager.longest_prefix(NAMES, limit) == expected
    table = manager.prefix_table(NAMES, expected)
    assert {i for i, block in enumerate(table) if block != NULL_BLOCK} == visible_blocks(expected)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 7, 12])
@pytest.mark.parametrize("num_computed", [0, 1, 4, 11, 12, 13, 30])
def test_sliding_group_frees_all_that_no_later_token_sees_and_nothing_else(window: int, num_computed: int) -> None:
    pool = BlockPool(20, 1)
    manager = make_group_manager(0, sliding_spec(window, 4), pool, 16)
    table = pool.allocate(10)
    before = list(table)
    manager.release_unreachable(table, num_computed)
    first_visible = max(0, num_computed - window + 1)
    for i, block in enumerate(table):
        is_visible = i * 4 + 3 >= first_visible
        assert block == (before[i] if is_visible else NULL_BLOCK)
    pool.check_invariants(table)
    manager.release_unreachable(table, num_computed)
    pool.check_invariants(table)


@pytest.mark.parametrize("window", [1, 3, 8, 17])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_sliding_group_never_holds_more_than_it_says(window: int, chunk: int) -> None:
    rng = random.Random(window * 100 + chunk)
    pool = BlockPool(60, 1)
    manager = make_group_manager(0, sliding_spec(window, 4), pool, chunk)
    most = 0
    for _ in range(50):
        table: list[int] = []
        computed = 0
        while computed < 50:
            size = rng.randint(1, chunk)
            manager.release_unreachable(table, computed)
            table += pool.allocate(-(-(computed + size) // 4) - len(table))
            computed += size
            held = len(table) - table.count(NULL_BLOCK)
            assert held <= manager.max_blocks_held(computed)
            most = max(most, held)
        pool.release(table)
    assert manager.max_blocks_held(50) - most <= 1, "the bound is far from what is needed"


def test_full_group_holds_all() -> None:
    manager = make_group_manager(0, full_spec(4), BlockPool(10, 1), 16)
    assert [manager.max_blocks_held(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_unknown_spec_is_named() -> None:
    class OtherSpec(msgspec.Struct):
        block_size: int = 4

    with pytest.raises(TypeError, match="OtherSpec"):
        make_group_manager(0, OtherSpec(), BlockPool(10, 1), 16)  # type: ignore[arg-type]
