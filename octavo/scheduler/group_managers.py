"""What each kind of KV group that grows with a request keeps: one manager a spec type, one row in `MANAGERS`.

A manager decides which blocks a prefix needs and which a running request no longer does. It keeps no state of requests.
Block tables are lists of block ids, index i for positions i * block_size …; null blocks stand where nothing is read.
"""

from abc import ABC, abstractmethod

from octavo.scheduler.block_pool import NULL_BLOCK, BlockPool
from octavo.types.kv_spec import FullAttentionSpec, KVSpec, LatentSpec, SlidingWindowSpec, max_blocks_held


class GroupManager(ABC):
    """Rules of one KV group over the shared pool."""

    frees_early = False  # whether blocks are given back before the request ends

    def __init__(self, group: int, spec: KVSpec, pool: BlockPool, max_chunk: int):
        self.group = group
        self.block_size = spec.block_size
        self._spec = spec
        self._pool = pool
        self._max_chunk = max_chunk  # most tokens of one request in one step

    def max_blocks_held(self, num_tokens: int) -> int:
        """Most blocks a request of `num_tokens` tokens holds at any time, however it is cut into chunks."""
        return max_blocks_held(self._spec, num_tokens, self._max_chunk)

    @abstractmethod
    def longest_prefix(self, names: list[bytes], max_blocks: int) -> int:
        """Number of leading blocks, at most `max_blocks`, after which a request can go on from cached blocks alone."""

    @abstractmethod
    def prefix_table(self, names: list[bytes], num_blocks: int) -> list[int]:
        """The block table for a prefix that `longest_prefix` allows."""

    @abstractmethod
    def release_unreachable(self, table: list[int], num_computed_tokens: int) -> None:
        """Give back the blocks that no token from `num_computed_tokens` on can see, leaving null blocks."""


class FullAttentionManager(GroupManager):
    """Every token sees all before it: every block is needed to the end."""

    def longest_prefix(self, names: list[bytes], max_blocks: int) -> int:
        find, group = self._pool.find, self.group
        for i in range(max_blocks):
            if find(group, names[i]) == NULL_BLOCK:
                return i
        return max_blocks

    def prefix_table(self, names: list[bytes], num_blocks: int) -> list[int]:
        return [self._pool.find(self.group, names[i]) for i in range(num_blocks)]

    def release_unreachable(self, table: list[int], num_computed_tokens: int) -> None:
        return  # a later token sees everything


class SlidingWindowManager(GroupManager):
    """A token sees itself and the `window - 1` before it: older blocks go back to the pool while the request runs."""

    frees_early = True

    def __init__(self, group: int, spec: SlidingWindowSpec, pool: BlockPool, max_chunk: int):
        super().__init__(group, spec, pool, max_chunk)
        self._window = spec.window

    def _first_visible_block(self, position: int) -> int:
        return max(0, position - self._window + 1) // self.block_size

    def longest_prefix(self, names: list[bytes], max_blocks: int) -> int:
        # Walk back from the end until a run of cached blocks covers the window before its end, or reaches the
        # beginning.
        find, group = self._pool.find, self.group
        end = max_blocks
        first = self._first_visible_block(end * self.block_size)
        i = max_blocks
        while i > first:
            i -= 1
            if find(group, names[i]) == NULL_BLOCK:
                end = i
                first = self._first_visible_block(end * self.block_size)
        return end

    def prefix_table(self, names: list[bytes], num_blocks: int) -> list[int]:
        first = self._first_visible_block(num_blocks * self.block_size)
        return [NULL_BLOCK] * first + [self._pool.find(self.group, names[i]) for i in range(first, num_blocks)]

    def release_unreachable(self, table: list[int], num_computed_tokens: int) -> None:
        end = min(self._first_visible_block(num_computed_tokens), len(table))
        start = end
        while start > 0 and table[start - 1] != NULL_BLOCK:
            start -= 1
        if start == end:
            return
        self._pool.release(reversed(table[start:end]))
        table[start:end] = [NULL_BLOCK] * (end - start)


MANAGERS: dict[type, type[GroupManager]] = {
    FullAttentionSpec: FullAttentionManager,
    LatentSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
}


def make_group_manager(group: int, spec: KVSpec, pool: BlockPool, max_chunk: int) -> GroupManager:
    """Build the manager of a spec; a spec without one is a programming error that names it."""
    try:
        manager = MANAGERS[type(spec)]
    except KeyError:
        raise TypeError(f"KV group {group}: no manager for {type(spec).__name__}; there are {list(MANAGERS)}") from None
    return manager(group, spec, pool, max_chunk)
