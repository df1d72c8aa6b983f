"""The memory plan's arithmetic."""

import pytest

from octavo.worker.memory import kv_cache_bytes


@pytest.mark.parametrize(
    ("share", "needed", "room", "expected"),
    [
        (90, 30, None, 60),
        (90, 100, None, 0),
        (90, 30, 100, 60),  # room enough: what others hold does not matter
        (90, 30, 20, 20),  # others hold more than they left to this share
        (90, 30, -5, 0),
    ],
)
def test_kv_cache_gets_its_share_or_the_room_there_is(share, needed, room, expected):
    assert kv_cache_bytes(share, needed, room) == expected
