"""Observations by bucket, cheap enough for every step of a core."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


class Histogram:
    """Number and sum of observations in each bucket; bucket i holds edges[i − 1] < x ≤ edges[i],
    the last one what is above all edges.

    One thread observes; another may copy at any time. It then sees a sum at most one observation
    ahead of its number. Plain lists, because numpy takes microseconds to change one element.
    """

    __slots__ = ("edges", "numbers", "sums")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.numbers = [0] * (len(edges) + 1)
        self.sums = [0.0] * (len(edges) + 1)

    def observe(self, value: float) -> None:
        self._add(bisect_left(self.edges, value), 1, value)

    def observe_all(self, values: Float64Array) -> None:
        """Observe each of `values` [n]."""
        if not len(values):
            return
        # Requests that decode together wait equally long: most steps fill one bucket.
        lowest = bisect_left(self.edges, float(np.minimum.reduce(values)))
        if lowest == bisect_left(self.edges, float(np.maximum.reduce(values))):
            self._add(lowest, len(values), float(np.add.reduce(values)))
            return
        buckets = np.searchsorted(self.edges, values)
        numbers = np.bincount(buckets).tolist()
        sums = np.bincount(buckets, weights=values).tolist()
        for bucket, number in enumerate(numbers):
            if number:
                self._add(bucket, number, sums[bucket])

    def within(self, bucket: int, value: float) -> float:
        """The value, moved into the bucket where rounding put it outside."""
        low = self.edges[bucket - 1] if bucket else -math.inf
        high = self.edges[bucket] if bucket < len(self.edges) else math.inf
        return min(max(value, math.nextafter(low, math.inf)), high)

    def copy(self) -> Histogram:
        """The observations so far."""
        other = Histogram(self.edges)
        other.numbers, other.sums = self.numbers.copy(), self.sums.copy()
        return other

    def _add(self, bucket: int, number: int, total: float) -> None:
        self.sums[bucket] += total
        self.numbers[bucket] += number


def one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, … up to `most`: vLLM's edges for numbers of tokens."""
    edges: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return edges
            edges.append(float(digit * power))
        power *= 10
