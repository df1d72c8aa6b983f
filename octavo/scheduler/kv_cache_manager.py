"""One pool of KV blocks for all groups: prefix lookup, allocation, publication and return of a request's blocks.

Everything is all or nothing over the groups. A request's tables have the same length in every group, so that one number
says how many tokens it has slots for. Groups of cross-attention come behind these: their blocks hold the output of the
request's encoder, are taken whole when it is admitted, and are shared by requests whose encoder reads the very same.

Publication happens when the step that fills a block is scheduled, not when it is done: steps run in order, so whoever
finds the block runs later or in the same step. A step therefore writes the keys and values of all its rows before any
row reads. Only blocks of known tokens are published. When a step fails, `withdraw` takes the names back.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.scheduler.block_hash import ROOT, BlockHasher, CacheSalt, EmbedsKey, ExtraKey
from octavo.scheduler.block_pool import NULL_BLOCK, BlockPool
from octavo.scheduler.group_managers import make_group_manager
from octavo.scheduler.request import Request
from octavo.types.kv_spec import CrossAttentionSpec, KVCacheConfig
from octavo.types.prompts import EMBEDS_DIGEST_BYTES
from octavo.types.step import NewBlocks


@dataclass(slots=True, frozen=True)
class PrefixHit:
    """A prefix that every group can supply from cached blocks."""

    num_tokens: int
    tables: list[list[int]]  # for each group, block ids with null blocks where nothing is read
    num_to_encode: int = 0  # positions of its encoder's output, when no earlier request had the same


class KVCacheManager:
    """Gives blocks to requests and takes them back. `max_chunk`: the most tokens of one request in one step."""

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_chunk: int,
        enable_prefix_caching: bool,
        max_encoder_len: int = 0,
        hash_key: bytes | None = None,
    ):
        block_sizes = {group.spec.block_size for group in config.groups}
        if len(block_sizes) != 1:
            raise ConfigError(f"all KV groups must have one block size, there are {sorted(block_sizes)}")
        self.block_size = block_sizes.pop()
        growing = [group.spec for group in config.groups if not isinstance(group.spec, CrossAttentionSpec)]
        self.num_groups = len(growing)
        self.num_tables = len(config.groups)
        self._cross_groups = range(self.num_groups, self.num_tables)
        self._max_encoder_len = max_encoder_len
        self.pool = BlockPool(config.num_blocks, self.num_tables)
        self._managers = [make_group_manager(i, spec, self.pool, max_chunk) for i, spec in enumerate(growing)]
        self._early_freeing = [m for m in self._managers if m.frees_early]
        self._enable_prefix_caching = enable_prefix_caching and not config.has_row_states
        self._hash_block = BlockHasher(self.block_size, hash_key)
        self._num_reserved = 0  # sum of all requests' num_reserved_blocks

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0…1; cached blocks nobody uses count as free."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def max_blocks_held(self, num_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at any time, over all groups that grow."""
        return sum(manager.max_blocks_held(num_tokens) for manager in self._managers)

    def max_request_tokens(self, limit: int) -> int:
        """The most tokens, up to `limit`, that one request alone can keep in the whole pool."""
        num_usable = self.pool.num_usable - self._num_encoder_blocks(self._max_encoder_len)
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_blocks_held(middle) <= num_usable:
                low = middle
            else:
                high = middle - 1
        return low

    def find_prefix(self, request: Request) -> PrefixHit:
        """Find the longest prefix that is cached in every group, at least one token short of the whole request.

        Shortening the prefix for one group may invalidate it for a group with a window, so go round until nothing
        changes.
        """
        if not self._enable_prefix_caching or not request.reads_prefix_cache:
            return PrefixHit(0, [[] for _ in range(self.num_tables)], request.num_encoder_positions)
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        names = self._names_of(request, num_blocks)
        before = -1
        while num_blocks != before:
            before = num_blocks
            for manager in self._managers:
                num_blocks = manager.longest_prefix(names, num_blocks)
        tables = [manager.prefix_table(names, num_blocks) for manager in self._managers]
        encoded = self._find_encoder_output(request)
        num_to_encode = 0 if any(encoded) else request.num_encoder_positions
        return PrefixHit(num_blocks * self.block_size, tables + encoded, num_to_encode)

    def _find_encoder_output(self, request: Request) -> list[list[int]]:
        """The tables of the cross-attention groups, when all that the encoder makes of the input is there; else empty ones."""
        names = self._encoder_names_of(request)
        tables = [[self.pool.find(group, name) for name in names] for group in self._cross_groups]
        return [[] for _ in tables] if any(NULL_BLOCK in table for table in tables) else tables

    def num_blocks_to_admit(self, request: Request, hit: PrefixHit) -> int:
        """Free blocks that the whole prefill of a waiting request takes, the part found in use by others left out."""
        ref_count = self.pool.ref_count
        num_shared = sum(ref_count(block) > 0 for table in hit.tables for block in table)
        num_needed = self.max_blocks_held(request.num_tokens) + self._num_encoder_blocks(request.num_encoder_positions)
        return num_needed - num_shared

    @property
    def num_unreserved(self) -> int:
        """Free blocks that no running prefill counts on."""
        return self.pool.num_free - self._num_reserved

    def admit(self, request: Request, num_new_tokens: int, hit: PrefixHit) -> None:
        """Give a waiting request its prefix and slots for its first chunk, and reserve the rest of its prefill.

        The caller checked `num_blocks_to_admit` against `num_unreserved`.
        """
        for table, hit_table in zip(request.block_ids, hit.tables, strict=True):
            self.pool.share(hit_table)
            table[:] = hit_table
        if hit.num_to_encode:
            self._allocate_encoder_output(request)
        request.num_computed_tokens = request.num_prefix_tokens = hit.num_tokens
        request.num_published_blocks = hit.num_tokens // self.block_size
        allocated = self.allocate(request, num_new_tokens)
        assert allocated is not None, f"admitted request {request.request_id} without the blocks for it"

    def allocate(self, request: Request, num_new_tokens: int) -> list[NewBlocks] | None:
        """Make slots for `num_new_tokens` tokens after the computed ones; None, and nothing taken, when there are too
        few.

        Also returns to the pool what the window has left behind, and publishes the blocks that the tokens fill.
        """
        num_computed = request.num_computed_tokens
        for manager in self._early_freeing:
            manager.release_unreachable(request.block_ids[manager.group], num_computed)
        num_tokens = num_computed + num_new_tokens
        start = len(request.block_ids[0])
        count = -(-num_tokens // self.block_size) - start
        new_blocks = []
        if count > 0:
            if count * self.num_groups > self.num_unreserved + request.num_reserved_blocks:
                return None
            for group in range(self.num_groups):
                blocks = self.pool.allocate(count)
                request.block_ids[group] += blocks
                new_blocks.append(NewBlocks(request.row, group, start, blocks))
        if request.num_reserved_blocks or num_tokens < request.num_tokens:
            self._reserve(request, self._num_blocks_left_to_take(request) if num_tokens < request.num_tokens else 0)
        if self._enable_prefix_caching:
            self._publish(request, num_tokens)
        return new_blocks

    def _allocate_encoder_output(self, request: Request) -> None:
        """Take the blocks that the encoder's output goes to in the step to come, and let others find them."""
        names = self._encoder_names_of(request) if self._enable_prefix_caching else []
        for group in self._cross_groups:
            blocks = self.pool.allocate(-(-request.num_encoder_positions // self.block_size))
            request.block_ids[group] += blocks
            for block, name in zip(blocks, names, strict=False):
                self.pool.publish(block, group, name)

    def num_slots(self, request: Request) -> int:
        """Tokens the request's blocks have room for."""
        return len(request.block_ids[0]) * self.block_size

    def num_blocks_held(self, request: Request) -> int:
        """Blocks in the request's tables, shared ones included."""
        return sum(len(table) - table.count(NULL_BLOCK) for table in request.block_ids)

    def free(self, request: Request) -> None:
        """Take back all blocks, the last ones to be evicted first. What is full and known stays findable."""
        if self._enable_prefix_caching:
            self._publish(request, request.num_computed_tokens)
        for table in request.block_ids:
            self.pool.release(reversed(table))
            table.clear()
        self._reserve(request, 0)
        request.num_computed_tokens = request.num_published_blocks = 0

    def withdraw(self, request: Request) -> None:
        """Make the blocks of a request unfindable, whoever filled them: their contents are in doubt."""
        for group in range(self.num_tables):
            for name in request.encoder_names if group in self._cross_groups else request.block_names:
                block = self.pool.find(group, name)
                if block != NULL_BLOCK:
                    self.pool.forget(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use."""
        return self.pool.reset()

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Check the pool against the tables of all requests that hold blocks."""
        holders: dict[int, tuple[int, int, Request]] = {}
        owned: list[int] = []
        reserved = 0
        for request in running:
            reserved += request.num_reserved_blocks
            lengths = {len(table) for table in request.block_ids[: self.num_groups]}
            assert len(lengths) == 1, f"request {request.request_id} has tables of lengths {lengths}"
            for group in self._cross_groups:
                assert len(request.block_ids[group]) == -(-request.num_encoder_positions // self.block_size)
            assert self.num_slots(request) >= request.num_computed_tokens
            for group, table in enumerate(request.block_ids):
                for index, block in enumerate(table):
                    if block == NULL_BLOCK:
                        continue
                    owned.append(block)
                    other_group, other_index, other = holders.setdefault(block, (group, index, request))
                    if other is not request:
                        assert (other_group, other_index) == (group, index), f"block {block} is in two places"
                        one, two = (
                            r.encoder_names if group in self._cross_groups else r.block_names for r in (request, other)
                        )
                        assert one[index] == two[index], f"block {block} has two contents"
                    else:
                        assert (other_group, other_index) == (group, index), f"block {block} is twice in one request"
        assert reserved == self._num_reserved, f"{self._num_reserved} blocks reserved, requests know of {reserved}"
        self.pool.check_invariants(owned)

    def _num_encoder_blocks(self, num_positions: int) -> int:
        """Blocks that an encoder's output takes, over all groups of cross-attention."""
        return -(-num_positions // self.block_size) * len(self._cross_groups)

    def _reserve(self, request: Request, count: int) -> None:
        self._num_reserved += count - request.num_reserved_blocks
        request.num_reserved_blocks = count

    def _num_blocks_left_to_take(self, request: Request) -> int:
        total = 0
        for manager, table in zip(self._managers, request.block_ids, strict=False):
            num_to_come = -(-request.num_tokens // self.block_size) - len(table)
            num_held = len(table) - table.count(NULL_BLOCK) if manager.frees_early else len(table)
            total += max(0, min(num_to_come, manager.max_blocks_held(request.num_tokens) - num_held))
        return total

    def _publish(self, request: Request, num_computed_tokens: int) -> None:
        num_full = min(num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.num_published_blocks
        if num_full <= first:
            return
        names = self._names_of(request, num_full)
        publish = self.pool.publish
        for group, table in enumerate(request.block_ids[: self.num_groups]):
            for i in range(first, num_full):
                if table[i] != NULL_BLOCK:
                    publish(table[i], group, names[i])
        request.num_published_blocks = num_full

    def _names_of(self, request: Request, num_blocks: int) -> list[bytes]:
        """The names of at least the first `num_blocks` blocks, all of known tokens; computed once and kept."""
        names = request.block_names
        if len(names) >= num_blocks:
            return names
        size, hash_block = self.block_size, self._hash_block
        token_ids = request.token_ids
        # What a decoder keeps follows from all that its encoder read.
        parent = names[-1] if names else ROOT if request.encoder_input is None else self._encoder_names_of(request)[0]
        extra_keys: tuple[ExtraKey, ...] = ()
        if request.cache_salt is not None and not names:
            extra_keys = (CacheSalt(request.cache_salt),)
        embeds = request.prompt_embeds
        for start in range(len(names) * size, num_blocks * size, size):
            if embeds is not None and start < embeds.num_tokens:
                digests = embeds.digests[start * EMBEDS_DIGEST_BYTES : (start + size) * EMBEDS_DIGEST_BYTES]
                extra_keys = (*extra_keys, EmbedsKey(digests))
            parent = hash_block(parent, token_ids[start : start + size], extra_keys)
            extra_keys = ()
            names.append(parent)
        return names

    def _encoder_names_of(self, request: Request) -> list[bytes]:
        """The names of the blocks of its encoder's output; computed once and kept."""
        if not request.encoder_names and request.encoder_input is not None:
            extra_keys = () if request.cache_salt is None else (CacheSalt(request.cache_salt),)
            name = self._hash_block.encoder_output(request.encoder_input, extra_keys)
            num_blocks = -(-request.num_encoder_positions // self.block_size)
            request.encoder_names = [name + i.to_bytes(4, "little") for i in range(num_blocks)]
        return request.encoder_names
