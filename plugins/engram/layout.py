"""Where an Engram layer's hash heads lie in its table: multipliers, prime moduli, row offsets.

layout = engram_layout([1, 14], max_ngram_size=4, n_heads=8, vocab_size=16_000_000,
                       compressed_vocab_size=99_092)[1]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_SEED = 10007
_SIEVE_SPAN = 1 << 14


@dataclass(frozen=True, eq=False)  # hashed by identity: arrays have no hash
class EngramLayout:
    """One layer's hash. Columns are (n-gram size 2 … n, head), head fastest."""

    multipliers: Int64Array  # [n] odd; the product with any class stays below 2^63
    primes: Int64Array  # [columns] rows of each column's section
    offsets: Int64Array  # [columns] first row of each column's section

    @property
    def num_rows(self) -> int:
        """Rows of the layer's table."""
        return int(self.primes.sum())

    @property
    def max_ngram_size(self) -> int:
        return len(self.multipliers)


def engram_layout(
    layer_ids: Sequence[int],
    *,
    max_ngram_size: int,
    n_heads: int,
    vocab_size: int,
    compressed_vocab_size: int,
) -> dict[int, EngramLayout]:
    """The layouts of all Engram layers, by layer id.

    vocab_size is where the prime search starts. Each column of each layer takes the next prime
    that no column before it took, so layers must be given in the model's order.
    """
    columns = (max_ngram_size - 1) * n_heads
    primes = _primes_from(vocab_size)
    bound = max(1, np.iinfo(np.int64).max // compressed_vocab_size // 2)
    layouts = {}
    for layer in layer_ids:
        draws = np.random.default_rng(_SEED * layer).integers(
            0, bound, size=max_ngram_size, dtype=np.int64
        )
        moduli = np.array([next(primes) for _ in range(columns)], dtype=np.int64)
        layouts[layer] = EngramLayout(
            multipliers=2 * draws + 1, primes=moduli, offsets=np.cumsum(moduli) - moduli
        )
    return layouts


def _primes_from(start: int) -> Iterator[int]:
    """The primes at or above `start`, ascending: a sieve of Eratosthenes by segments."""
    low = max(start, 2)
    while True:
        high = low + _SIEVE_SPAN
        is_prime = np.ones(_SIEVE_SPAN, dtype=np.bool_)
        for divisor in _small_primes(math.isqrt(high)):
            first = max(divisor * divisor, -(-low // divisor) * divisor)
            is_prime[first - low :: divisor] = False
        yield from (low + np.flatnonzero(is_prime)).tolist()
        low = high


def _small_primes(limit: int) -> list[int]:
    """The primes up to and including `limit`."""
    is_prime = np.ones(limit + 1, dtype=np.bool_)
    is_prime[:2] = False
    for divisor in range(2, math.isqrt(limit) + 1):
        if is_prime[divisor]:
            is_prime[divisor * divisor :: divisor] = False
    result: list[int] = np.flatnonzero(is_prime).tolist()
    return result
