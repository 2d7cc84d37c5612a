"""What kind of state a pool holds. Two facts decide everything that may be done with its pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class IntegrityError(RuntimeError):
    """The books of a pool or of the prefix cache do not balance: a bug, never bad input."""


@dataclass(frozen=True)
class CacheGroup:
    """One class of cache state.

    `replayable` state is private to a request, approximate after a hit and rebuilt by replay; it
    is never hashed, shared or published. It has no default on purpose: a group that forgot to say
    so would silently cache windows (TokenSpeed PR 1593).
    """

    name: str
    page_tokens: int
    replayable: bool


def ragged_columns(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """starts[i], starts[i] + 1, … (counts[i] numbers) for every i, laid end to end."""
    if (counts == 1).all():  # what decoding asks for
        return starts
    total = int(counts.sum())
    offsets = np.cumsum(counts) - counts
    columns: Int64Array = np.arange(total, dtype=np.int64) + np.repeat(starts - offsets, counts)
    return columns
