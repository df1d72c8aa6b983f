"""Names of blocks: equal exactly when everything that makes the keys and values is equal."""

import itertools

import pytest

from octavo.scheduler.block_hash import DIGEST_BYTES, ROOT, AdapterKey, BlockHasher, CacheSalt, MediaKey

IDS = [1, 2, 3, 4]


def test_same_content_same_name() -> None:
    name = BlockHasher(4, b"key")
    assert name(ROOT, IDS) == name(ROOT, list(IDS))
    assert len(name(ROOT, IDS)) == DIGEST_BYTES


def test_each_part_counts() -> None:
    name = BlockHasher(4, b"key")
    first = name(ROOT, IDS)
    names = [
        first,
        name(ROOT, [1, 2, 4, 3]),
        name(first, IDS),
        name(ROOT, IDS, (CacheSalt("a"),)),
        name(ROOT, IDS, (CacheSalt("b"),)),
        name(ROOT, IDS, (CacheSalt(""),)),
        name(ROOT, IDS, (AdapterKey("a", 0),)),
        name(ROOT, IDS, (AdapterKey("a", 1),)),
        name(ROOT, IDS, (AdapterKey("a1", 0),)),
        name(ROOT, IDS, (MediaKey("a", 0),)),
        name(ROOT, IDS, (MediaKey("a", 4),)),
        name(ROOT, IDS, (AdapterKey("a", 0), CacheSalt("a"))),
        name(ROOT, IDS, (AdapterKey("a", 0), MediaKey("a", 0))),
    ]
    for a, b in itertools.combinations(names, 2):
        assert a != b


def test_key_is_secret_and_random() -> None:
    assert BlockHasher(4)(ROOT, IDS) != BlockHasher(4)(ROOT, IDS)
    assert BlockHasher(4, b"a")(ROOT, IDS) != BlockHasher(4, b"b")(ROOT, IDS)


def test_only_whole_blocks_have_names() -> None:
    with pytest.raises(Exception, match="4 items"):
        BlockHasher(4)(ROOT, IDS[:3])
