"""The pool of window pages: the private rows of the last positions of each request.

Never hashed, shared or published. A slot's pages cover consecutive positions; page block
b = position // page_rows stands in column b % columns of the slot's row, so the table is as wide
as a request can be, whatever its length.

**One formula sizes and admits.** Before a step of q rows at position c the live rows are
c − W + 1 … c + q − 1: W − 1 + q consecutive positions, which touch at most
ceil((W − 1 + q) / P) + 1 pages of P rows (`pages_per_request`). A pool of
R · (ceil((W − 1) / P) + 2) + ceil(T / P) pages (`pages_for`) therefore always suffices for R
requests and T rows a step, the rows of drafts among them:

    Σ (ceil((W − 1 + q) / P) + 1) ≤ Σ (ceil((W − 1) / P) + ceil(q / P) + 1), and
    Σ ceil(q / P) ≤ Σ (q + P − 1) / P ≤ T / P + R · (P − 1) / P < T / P + R,

and an integer below T / P + R is at most ceil(T / P) + R − 1. A request without rows in the step
counts with q = 0. Pages of rejected drafts go back after their step (`roll_back`), so that no page
is held beyond c. So window pages never delay or preempt anybody, and the length of a prompt or of a
hit does not enter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from python_backend.kv.groups import CacheGroup, IntegrityError, ragged_columns
from python_backend.replay import first_live

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def pages_per_request(window: int, page_rows: int, num_rows: int) -> int:
    """Most window pages that a request holds while `num_rows` of its rows are in flight."""
    return -(-(window - 1 + num_rows) // page_rows) + 1


def pages_for(window: int, page_rows: int, max_requests: int, max_rows: int) -> int:
    """Window pages, the null page included, that suffice for `max_requests` requests and
    `max_rows` rows a step."""
    per_request = pages_per_request(window, page_rows, 0) + 1
    return max_requests * per_request + -(-max_rows // page_rows) + 1


class WindowPages:
    """Pages of `group.page_tokens` rows; `num_pages` counts the null page 0.

    A slot goes through `start`, then `grow` before each step and `retire` after it, `roll_back`
    too if the step verified drafts, then `release`.
    """

    def __init__(
        self, *, group: CacheGroup, window: int, num_pages: int, num_slots: int, columns: int
    ) -> None:
        if not group.replayable:
            raise ValueError(
                f"expected a group of private state for the window pool, got {group.name!r}, which "
                "is not replayable; shared state belongs to the global pool"
            )
        self.group = group
        self.window = window
        self.num_pages = num_pages
        self.table: Int32Array = np.zeros((num_slots, columns), dtype=np.int32)
        self._first: Int64Array = np.zeros(num_slots, dtype=np.int64)  # lowest block held
        self._next: Int64Array = np.zeros(num_slots, dtype=np.int64)  # lowest block not held yet
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self._num_free

    def num_held(self, slot: int) -> int:
        return int(self._next[slot] - self._first[slot])

    def start(self, slot: int, position: int) -> None:
        """Begin a life of the slot whose first row is `position`."""
        self._first[slot] = self._next[slot] = position // self.group.page_tokens

    def grow(self, slots: Int64Array, ends: Int64Array) -> None:
        """Cover the rows below ends[i] of each slot. No page is needed for most decode rows."""
        growing = ends > self._next[slots] * self.group.page_tokens
        if not growing.any():
            return
        slots = slots[growing]
        counts = -(-ends[growing] // self.group.page_tokens) - self._next[slots]
        total = int(counts.sum())
        if total > self._num_free:
            raise IntegrityError(
                f"expected at most {self._num_free} window pages to be needed, got {total}; "
                "the pool is smaller than `pages_for` says"
            )
        self._num_free -= total
        pages = self._free[self._num_free : self._num_free + total][::-1]
        self._put(slots, self._next[slots], counts, pages)
        self._next[slots] += counts

    def retire(self, slots: Int64Array, processed: Int64Array) -> None:
        """Free the pages that no row from `processed[i]` on reads.

        `processed` must not count rows of a step that is still running: it reads old pages.
        """
        live = first_live(processed, self.window)
        dead = live >= (self._first[slots] + 1) * self.group.page_tokens
        if dead.any():
            slots = slots[dead]
            first = self._first[slots]
            counts = live[dead] // self.group.page_tokens - first
            self._give_back(slots, first, counts)
            self._first[slots] = first + counts

    def roll_back(self, slots: Int64Array, ends: Int64Array) -> None:
        """Free the pages that hold no row below `ends[i]`: rejected drafts alone wrote there."""
        needed = -(-ends // self.group.page_tokens)
        beyond = self._next[slots] > needed
        if beyond.any():
            slots, needed = slots[beyond], needed[beyond]
            self._give_back(slots, needed, self._next[slots] - needed)
            self._next[slots] = needed

    def release(self, slot: int) -> None:
        slots = np.array([slot], dtype=np.int64)
        self._give_back(slots, self._first[slots], self._next[slots] - self._first[slots])
        self._first[slots] = self._next[slots]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page is held by one slot or free."""
        counts = self._next - self._first
        if (counts < 0).any() or (counts > self.table.shape[1]).any():
            raise IntegrityError("a slot holds more window pages than its table has columns")
        expected = np.zeros(self.table.shape, dtype=bool)
        columns = ragged_columns(self._first, counts) % self.table.shape[1]
        expected[np.repeat(np.arange(len(counts)), counts), columns] = True
        if ((self.table != 0) != expected).any():
            raise IntegrityError("a window table does not name the pages of its live rows")
        owned_or_free = np.concatenate([self.table[expected], self._free[: self._num_free]])
        if not np.array_equal(np.sort(owned_or_free), np.arange(1, self.num_pages)):
            raise IntegrityError("a window page is lost, or owned twice, or owned and free")

    def _give_back(self, slots: Int64Array, starts: Int64Array, counts: Int64Array) -> None:
        rows, columns = self._cells(slots, starts, counts)
        self._free[self._num_free : self._num_free + len(rows)] = self.table[rows, columns]
        self._num_free += len(rows)
        self.table[rows, columns] = 0

    def _put(
        self, slots: Int64Array, starts: Int64Array, counts: Int64Array, pages: Int32Array
    ) -> None:
        rows, columns = self._cells(slots, starts, counts)
        self.table[rows, columns] = pages

    def _cells(
        self, slots: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        rows = np.repeat(slots, counts)
        return rows, ragged_columns(starts, counts) % self.table.shape[1]
