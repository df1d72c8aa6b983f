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
import struct
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from octavo.types.request import EncoderInput

DIGEST_BYTES = 16
ROOT = bytes(DIGEST_BYTES)  # the parent of first blocks


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


class EmbedsKey(msgspec.Struct, frozen=True, array_like=True, tag="embeds"):
    """The digests of the embeddings that the block begins with; their token ids say nothing."""

    digests: bytes


ExtraKey = CacheSalt | AdapterKey | MediaKey | EmbedsKey


class BlockHasher:
    """Computes the names of blocks of `block_size` tokens under one secret key.

    Pass `key` (up to 64 bytes) only where several processes must agree on names.
    """

    def __init__(self, block_size: int, key: bytes | None = None):
        # Copying a keyed state is several times cheaper than keying a new one.
        self._keyed = blake2b(digest_size=DIGEST_BYTES, key=os.urandom(32) if key is None else key)
        self._pack = struct.Struct(f"={block_size}i").pack

    def __call__(self, parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()) -> bytes:
        """Return the name of the block that follows `parent` (`ROOT` before the first) and holds `token_ids`.

        Parent and ids have fixed lengths, so nothing has to mark where they end and the extra keys begin.
        """
        digest = self._keyed.copy()
        digest.update(parent + self._pack(*token_ids))
        if extra_keys:
            digest.update(msgspec.msgpack.encode(extra_keys))
        return digest.digest()

    def encoder_output(self, encoder_input: EncoderInput, extra_keys: Sequence[ExtraKey] = ()) -> bytes:
        """The name of all that an encoder makes of an input: no part of it is the same for another input."""
        digest = self._keyed.copy()
        digest.update(msgspec.msgpack.encode((encoder_input, extra_keys)))
        return digest.digest()
