"""Draws from a `random.Random` that cost one call to `random()` each."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

Option = TypeVar("Option")


def pick(rng: Random, options: Sequence[Option]) -> Option:
    """One of `options`, uniformly."""
    return options[int(rng.random() * len(options))]


def between(rng: Random, low: int, high: int) -> int:
    """An integer from `low` to `high`, both included, uniformly."""
    return low + int(rng.random() * (high - low + 1))
