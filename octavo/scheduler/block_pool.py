"""The pool of KV blocks: who holds each one, which are free, and which free ones still hold something worth finding.

A block is in one of three states:

    in use           ref count > 0, not in the free list; may have a name, under which other requests find it
    free, cached     ref count 0, in the free list, has a name: a hit takes it back, eviction forgets the name
    free, blank      ref count 0, in the free list, no name

The free list is in order of eviction: blank blocks in front, cached ones behind them, least recently freed first. It is
doubly linked through two integer arrays, so that a hit in the middle costs as little as a pop.

Block 0 is the null block: it stands in tables where a position is never read, is never handed out and never counted.
"""

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Hands out blocks 1 … num_blocks - 1. Knows no requests: owners hold ids and give back each one they took."""

    def __init__(self, num_blocks: int, num_groups: int):
        if num_blocks < 2:
            raise ValueError(
                f"a pool of {num_blocks} blocks has none to hand out; it needs the null block and one more"
            )
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._ref_counts = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks  # of named blocks: the KV group whose index has the name
        self._index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # Circular list 0 -> 1 -> … -> num_blocks - 1 -> 0; the null block, never free, is its sentinel.
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out in all."""
        return self.num_blocks - 1

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with unknown contents, evicting cached ones where needed.

        The caller checked `num_free`.
        """
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        following, names = self._next, self._names
        blocks = []
        block = 0
        for _ in range(count):
            block = following[block]
            blocks.append(block)
            if names[block] is not None:
                self.forget(block)
            self._ref_counts[block] = 1
        if blocks:
            first_left = following[block]
            following[0] = first_left
            self._prev[first_left] = 0
            self.num_free -= count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of `blocks` (found by name); null blocks are passed over."""
        ref_counts, following, previous = self._ref_counts, self._next, self._prev
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if ref_counts[block] == 0:
                before, after = previous[block], following[block]
                following[before], previous[after] = after, before
                self.num_free -= 1
            ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one ownership of each block, in the order in which they should be evicted; skips null blocks."""
        ref_counts, following, previous = self._ref_counts, self._next, self._prev
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            left = ref_counts[block] - 1
            assert left >= 0, f"block {block} was given back more often than taken"
            ref_counts[block] = left
            if left:
                continue
            if self._names[block] is None:
                before, after = 0, following[0]
            else:
                before, after = previous[0], 0
            previous[block], following[block] = before, after
            following[before] = previous[after] = block
            self.num_free += 1

    def find(self, group: int, name: bytes) -> int:
        """Return the block that holds what `name` stands for in this group, or the null block."""
        return self._index[group].get(name, NULL_BLOCK)

    def publish(self, block: int, group: int, name: bytes) -> None:
        """Let others find `block` by `name`. When another block already has the name, this one stays private."""
        index = self._index[group]
        if self._names[block] is None and name not in index:
            index[name] = block
            self._names[block] = name
            self._groups[block] = group

    def forget(self, block: int) -> None:
        """Take the block's name away; its owners keep it."""
        name = self._names[block]
        assert name is not None
        del self._index[self._groups[block]][name]
        self._names[block] = None

    def reset(self) -> bool:
        """Forget every name. Refused (False) while any block is in use, since its owner goes on relying on it."""
        if self.num_free != self.num_usable:
            return False
        for index in self._index:
            index.clear()
        self._names = [None] * self.num_blocks
        return True

    def check_invariants(self, owned: Sequence[int]) -> None:
        """Compare the accounting with the truth: `owned` lists every block of every owner, once for each ownership."""
        counts = [0] * self.num_blocks
        for block in owned:
            counts[block] += 1
        counts[NULL_BLOCK] = 0
        for block, count in enumerate(counts):
            assert self._ref_counts[block] == count, (
                f"block {block} has ref count {self._ref_counts[block]} but {count} owners"
            )
        free = set()
        block = self._next[0]
        while block != NULL_BLOCK:
            assert block not in free, f"the free list runs in a circle at block {block}"
            assert self._prev[self._next[block]] == block and self._next[self._prev[block]] == block
            free.add(block)
            block = self._next[block]
        assert len(free) == self.num_free, f"{len(free)} blocks in the free list, counted {self.num_free}"
        assert free == {b for b in range(1, self.num_blocks) if counts[b] == 0}, "free list and ref counts disagree"
        named = {b for b, name in enumerate(self._names) if name is not None}
        indexed = [block for index in self._index for block in index.values()]
        assert len(indexed) == len(named) and set(indexed) == named, "a block has a name that does not lead to it"
        for group, index in enumerate(self._index):
            for name, block in index.items():
                assert self._names[block] == name and self._groups[block] == group, (
                    f"block {block} is found by a wrong name"
                )
