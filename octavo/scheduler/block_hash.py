"""Names of full blocks: a hash chained over everything that decides what the block's keys and values are.

`H(parent name, token ids, extra keys)`: two blocks have the same name exactly when the whole text before and in them
is the same, under the same adapter, the same media and the same salt. The root of every chain is a constant of the
process.

The hash is BLAKE2b with 128 bits of output and a secret key drawn at start. A fast non-cryptographic hash would let a
client craft a prompt that collides with another client's and read an answer computed from foreign keys and values;
with the key not even a birthday search is possible from outside. It costs about a microsecond a block, less than
SHA-256.
"""

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

DIGEST_BYTES = 16


class CacheSalt(msgspec.Struct, frozen=True, array_like=True, tag="salt"):
    """Separates the caches of clients that must not learn of each other through timing. First block only."""

    salt: str


class AdapterKey(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """The adapter whose weights made the keys and values; `version` changes when other weights take the name."""

    name: str
    version: int


class MediaKey(msgspec.Struct, frozen=True, array_like=True, tag="media"):
    """A media item that lies in the block: the digest of its content and where in the item the block begins."""

    digest: str
    offset: int


ExtraKey = CacheSalt | AdapterKey | MediaKey


class BlockHasher:
    """Computes the names of blocks under one secret key.

    Pass `key` only where several processes must agree on names.
    """

    def __init__(self, key: bytes | None = None):
        self._key = os.urandom(32) if key is None else key
        self._root = bytes(DIGEST_BYTES)

    def __call__(self, parent: bytes | None, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()) -> bytes:
        """Return the name of the block that follows `parent` (None: the first block) and holds `token_ids`.

        All blocks of a chain hold the same number of tokens, so nothing has to mark where the ids end and the keys
        begin.
        """
        digest = blake2b(parent or self._root, digest_size=DIGEST_BYTES, key=self._key)
        digest.update(array("i", token_ids).tobytes())
        if extra_keys:
            digest.update(msgspec.msgpack.encode(extra_keys))
        return digest.digest()
