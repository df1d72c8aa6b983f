"""What each layer keeps in the KV cache, and how layers share the block pool.

A layer states a `KVSpec`. Layers with equal specs form groups of equal size; every group owns a block table of its own,
and all groups draw on one pool of blocks of equal byte size: block `b` is `group_size` pages, one in each of `group_size`
buffers, and belongs to one group at a time.

        buffer 0        buffer 1        ...  buffer (group_size - 1)
        [page][page]..  [page][page]..       [page][page]..         page index = block id

The largest spec sets the size of a buffer's page. Of smaller ones as many layers share it as have room.
"""

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}


class FullAttentionSpec(msgspec.Struct, frozen=True, tag="full"):
    """Keys and values of every token. A page is [2, block_size, num_kv_heads, head_dim]: keys, then values."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int

    @property
    def page_shape(self) -> tuple[int, ...]:
        """One layer's share of one block."""
        return (2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's share of one block."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


class SlidingWindowSpec(msgspec.Struct, frozen=True, tag="sliding"):
    """Like `FullAttentionSpec`, but a query sees only the last `window` tokens (itself included); older blocks are freed."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    window: int

    @property
    def page_shape(self) -> tuple[int, ...]:
        """One layer's share of one block."""
        return (2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's share of one block."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


class LatentSpec(msgspec.Struct, frozen=True, tag="latent"):
    """One latent of `width` numbers for every token, from which all heads' keys and values follow (DeepSeek-V2)."""

    width: int
    dtype: str
    block_size: int

    @property
    def page_shape(self) -> tuple[int, ...]:
        """One layer's share of one block."""
        return (self.block_size, self.width)

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's share of one block."""
        return self.block_size * self.width * DTYPE_BYTES[self.dtype]


class CrossAttentionSpec(FullAttentionSpec, frozen=True, tag="cross"):
    """Keys and values of every position of the encoder, written once, before the request's own tokens, which all read them."""


KVSpec = FullAttentionSpec | SlidingWindowSpec | LatentSpec | CrossAttentionSpec


def max_blocks_held(spec: KVSpec, num_tokens: int, max_chunk: int) -> int:
    """Most blocks of a group that a request of `num_tokens` tokens holds at any time, in chunks of up to `max_chunk`."""
    blocks = -(-num_tokens // spec.block_size)
    if not isinstance(spec, SlidingWindowSpec):
        return blocks
    # A chunk and the window before it, lying across block borders at worst.
    span = spec.window - 1 + max_chunk
    return min(blocks, -(-(span - 1) // spec.block_size) + 1)


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table. They fill the buffers in order, see `KVCacheConfig.place`."""

    layer_names: list[str]
    spec: KVSpec


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The outcome of memory planning: what the worker allocates and the scheduler hands out."""

    num_blocks: int
    groups: list[KVGroup]
    has_row_states: bool = False  # recurrent layers keep states in the worker's rows, so prefixes cannot be shared

    @property
    def group_size(self) -> int:
        """Number of buffers: those that the layers of the largest group take."""
        return max((self.place(g, len(g.layer_names) - 1)[0] + 1 for g in self.groups if g.layer_names), default=0)

    @property
    def page_bytes(self) -> int:
        """Bytes of one buffer's share of one block."""
        return max((g.spec.page_bytes for g in self.groups), default=0)

    def place(self, group: KVGroup, layer: int) -> tuple[int, int]:
        """Where the pages of a group's layer lie: the buffer, and the byte of its pages at which they begin."""
        buffer, part = divmod(layer, self.page_bytes // group.spec.page_bytes)
        return buffer, part * group.spec.page_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes over all buffers."""
        return self.group_size * self.page_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def make_kv_groups(specs: dict[str, KVSpec]) -> list[KVGroup]:
    """Cut the layers into groups of equal specs that fill about equally many buffers.

    A group takes as many buffers as the layers of that spec which needs fewest, so that a model with 5 sliding layers for
    each full one gets five sliding groups and one full group and wastes at most one page a group. Groups of
    cross-attention come last: those before them grow with a request's tokens.
    """
    by_spec: dict[KVSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    if not by_spec:
        return []
    page_bytes = max(spec.page_bytes for spec in by_spec)
    per_buffer = {spec: page_bytes // spec.page_bytes for spec in by_spec}
    size = min(-(-len(names) // per_buffer[spec]) for spec, names in by_spec.items())
    groups = []
    for spec, names in sorted(by_spec.items(), key=lambda item: isinstance(item[0], CrossAttentionSpec)):
        # Spread the remainder: groups whose sizes differ by at most one would leave pages of the larger buffers unused, so
        # fill groups and leave the slack in the last one.
        count = size * per_buffer[spec]
        groups += [KVGroup(names[start : start + count], spec) for start in range(0, len(names), count)]
    return groups
