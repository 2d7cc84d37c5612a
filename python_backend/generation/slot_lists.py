"""Short lists that belong to slots, gathered for many slots at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from python_backend.kv.groups import ragged_columns

Int64Array = npt.NDArray[np.int64]
Entries = tuple[npt.NDArray[np.generic], ...]


class SlotLists:
    """For each slot a list of entries; an entry has one element in each of `empty`'s columns.

    Setting a list costs the size of all lists, gathering what is gathered: lists are set when a
    request begins, and gathered every step.
    """

    def __init__(self, num_slots: int, empty: Entries) -> None:
        self._lists: dict[int, Entries] = {}
        self._empty = empty
        self._columns = empty
        self._starts = np.zeros(num_slots, dtype=np.int64)
        self._counts = np.zeros(num_slots, dtype=np.int64)

    def set(self, slot: int, entries: Entries) -> None:
        """Replace the slot's list; empty columns clear it."""
        if not len(entries[0]):
            if self._lists.pop(slot, None) is None:
                return
        else:
            self._lists[slot] = entries
        self._counts[slot] = 0
        slots = np.array(list(self._lists), dtype=np.int64)
        counts = np.array([len(e[0]) for e in self._lists.values()], dtype=np.int64)
        self._starts[slots], self._counts[slots] = np.cumsum(counts) - counts, counts
        self._columns = tuple(
            np.concatenate([empty, *(e[i] for e in self._lists.values())])
            for i, empty in enumerate(self._empty)
        )

    def gather(self, slots: Int64Array) -> tuple[Int64Array, Entries]:
        """All entries of `slots` [L]: for each the index into `slots`, and its columns."""
        counts = self._counts[slots]
        at = ragged_columns(self._starts[slots], counts)
        return np.repeat(np.arange(len(slots)), counts), tuple(c[at] for c in self._columns)
