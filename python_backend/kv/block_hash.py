"""Chained keys of the full token blocks of one request.

Key i is the xxh3-128 of (process seed, salt, every token up to the end of block i): the digest of
a running hash at each block boundary, so a key names a whole prefix and the salt isolates the
whole chain. The seed is random per process. The hash is fast, not cryptographic: whoever adopts
pages by key must compare the tokens too (see `prefix_cache`).
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import xxhash

Int32Array = npt.NDArray[np.int32]

SEED_BYTES = 16


def random_seed() -> bytes:
    return os.urandom(SEED_BYTES)


class BlockChain:
    """Keys of the blocks [0, num_hashed) of one token buffer that only ever grows.

    A request whose tokens are rewritten needs a new chain.
    """

    def __init__(self, seed: bytes, salt: bytes) -> None:
        # The length keeps (seed, salt, tokens) from being read in two ways.
        self._running = xxhash.xxh3_128(seed + len(salt).to_bytes(8, "little") + salt)
        self._keys: list[bytes] = []

    @property
    def num_hashed(self) -> int:
        return len(self._keys)

    def keys(self, blocks: Int32Array, start: int, stop: int) -> list[bytes]:
        """Keys of the blocks [start, stop). `blocks` is int32 [≥ stop, block tokens], C order,
        from the first token of the request on."""
        update, digest, append = self._running.update, self._running.digest, self._keys.append
        for row in blocks[len(self._keys) : stop]:
            update(row)
            append(digest())
        return self._keys[start:stop]

    def adopt(self, blocks: Int32Array, start: int, keys: list[bytes]) -> None:
        """Take over the known keys of blocks [start, start + len(keys)), whose tokens were found
        equal. One update over all of them costs a fifth of a digest per block."""
        known = len(self._keys) - start
        if known < len(keys):
            self._running.update(blocks[len(self._keys) : start + len(keys)].data)
            self._keys.extend(keys[known:])
