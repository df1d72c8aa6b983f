"""The block pool: ref counts, order of eviction, names."""

import pytest

from octavo.scheduler.block_pool import NULL_BLOCK, BlockPool


def name(i: int) -> bytes:
    return i.to_bytes(16, "big")


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5, 1)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.release([NULL_BLOCK])
    pool.share([NULL_BLOCK])
    pool.check_invariants([1, 2, 3, 4])


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 1 blocks"):
        BlockPool(1, 1)


def test_blank_blocks_go_before_cached_ones_and_oldest_cached_first() -> None:
    pool = BlockPool(6, 1)
    a, b, c, d, e = pool.allocate(5)
    for i, block in enumerate((a, b, c)):
        pool.publish(block, 0, name(i))
    pool.release([b])
    pool.release([a])
    pool.release([d])
    pool.release([c])
    pool.check_invariants([e])
    assert pool.allocate(1) == [d]
    assert pool.allocate(2) == [b, a]
    assert pool.find(0, name(1)) == NULL_BLOCK and pool.find(0, name(0)) == NULL_BLOCK
    assert pool.find(0, name(2)) == c
    pool.check_invariants([e, d, b, a])


def test_request_freed_in_reverse_loses_its_tail_first() -> None:
    pool = BlockPool(5, 1)
    table = pool.allocate(4)
    for i, block in enumerate(table):
        pool.publish(block, 0, name(i))
    pool.release(reversed(table))
    pool.allocate(2)
    assert [pool.find(0, name(i)) != NULL_BLOCK for i in range(4)] == [True, True, False, False]


def test_shared_block_leaves_the_free_list_and_returns_with_its_last_owner() -> None:
    pool = BlockPool(4, 1)
    (block,) = pool.allocate(1)
    pool.publish(block, 0, name(0))
    pool.release([block])
    assert pool.num_free == 3
    pool.share([block])
    pool.share([block])
    assert pool.num_free == 2 and pool.ref_count(block) == 2
    pool.check_invariants([block, block])
    pool.release([block])
    assert pool.num_free == 2
    assert block not in pool.allocate(2)
    pool.release([block])
    assert pool.num_free == 1


def test_second_block_of_the_same_name_stays_private() -> None:
    pool = BlockPool(4, 2)
    a, b, c = pool.allocate(3)
    pool.publish(a, 0, name(0))
    pool.publish(b, 0, name(0))
    pool.publish(c, 1, name(0))
    assert pool.find(0, name(0)) == a
    assert pool.find(1, name(0)) == c
    pool.release([b])
    pool.check_invariants([a, c])
    pool.forget(a)
    assert pool.find(0, name(0)) == NULL_BLOCK and pool.find(1, name(0)) == c


def test_reset_is_refused_while_in_use() -> None:
    pool = BlockPool(4, 1)
    table = pool.allocate(2)
    pool.publish(table[0], 0, name(0))
    assert not pool.reset()
    assert pool.find(0, name(0)) == table[0]
    pool.release(table)
    assert pool.reset()
    assert pool.find(0, name(0)) == NULL_BLOCK
    pool.check_invariants([])


def test_giving_back_twice_is_caught() -> None:
    pool = BlockPool(4, 1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release(table)


@pytest.mark.parametrize("owned", [[], [1, 1], [1, 2]], ids=["leaked", "two owners", "free but owned"])
def test_invariants_see_wrong_ownership(owned: list[int]) -> None:
    pool = BlockPool(4, 1)
    assert pool.allocate(1) == [1]
    with pytest.raises(AssertionError, match="ref count"):
        pool.check_invariants(owned)


def test_invariants_see_a_broken_index() -> None:
    pool = BlockPool(4, 1)
    (block,) = pool.allocate(1)
    pool.publish(block, 0, name(0))
    pool._index[0][name(1)] = block
    with pytest.raises(AssertionError, match="name"):
        pool.check_invariants([block])
