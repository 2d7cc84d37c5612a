"""The free list of a pool: which page is handed out next.

Order: pages without a hash first, the latest freed first; then hashed pages, the one freed longest
ago first (least recently used). So the prefix cache lives as long as memory allows, and its
deepest blocks die first because a request frees its pages in reverse.

Both halves are arrays and every operation takes an array of pages: a stack, and a queue that
deletes lazily. A queue entry counts only while its stamp is the page's current one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)
MIN_QUEUE_READ = 32  # entries looked at per round, so that a run of deleted ones costs one round


class TakenPages(NamedTuple):
    """Pages handed out. The owner must drop the hashes of `hashed` before using them."""

    blank: Int32Array
    hashed: Int32Array


class FreePages:
    """Free pages of `num_pages` ids; page 0 is the null page and never free.

    Pages of one call are distinct. Pushing a page that is already free corrupts the list; the
    owner's reference counts must rule that out.
    """

    def __init__(self, num_pages: int) -> None:
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_blank = num_pages - 1
        self._queue = np.zeros(2 * num_pages, dtype=np.int32)
        self._queue_stamps = np.zeros(2 * num_pages, dtype=np.int64)
        self._head = 0
        self._tail = 0
        self._stamp_of = np.zeros(num_pages, dtype=np.int64)  # 0: not in the queue
        self._next_stamp = 1
        self._num_hashed = 0

    @property
    def num_blank(self) -> int:
        return self._num_blank

    @property
    def num_hashed(self) -> int:
        return self._num_hashed

    @property
    def num_free(self) -> int:
        return self._num_blank + self._num_hashed

    def take(self, count: int) -> TakenPages:
        """Hand out `count` pages in list order. Ask `num_free` first: raises IndexError."""
        if count > self.num_free:
            raise IndexError(f"expected at most {self.num_free} pages to be taken, got {count}")
        num_blank = min(count, self._num_blank)
        top = self._num_blank
        blank = self._stack[top - num_blank : top][::-1].copy()
        self._num_blank -= num_blank
        hashed = self._take_oldest(count - num_blank) if count > num_blank else NO_PAGES
        return TakenPages(blank, hashed)

    def push_blank(self, pages: Int32Array) -> None:
        """Free pages without a hash; the last of `pages` is handed out first."""
        self._stack[self._num_blank : self._num_blank + len(pages)] = pages
        self._num_blank += len(pages)

    def push_hashed(self, pages: Int32Array) -> None:
        """Free hashed pages; the first of `pages` is handed out before the others."""
        count = len(pages)
        if self._tail + count > len(self._queue):
            self._compact()
        stamps = np.arange(self._next_stamp, self._next_stamp + count, dtype=np.int64)
        self._next_stamp += count
        self._queue[self._tail : self._tail + count] = pages
        self._queue_stamps[self._tail : self._tail + count] = stamps
        self._stamp_of[pages] = stamps
        self._tail += count
        self._num_hashed += count

    def remove_hashed(self, pages: Int32Array) -> None:
        """Take these free hashed pages out of the list, wherever they stand."""
        self._stamp_of[pages] = 0
        self._num_hashed -= len(pages)

    def blank_pages(self) -> Int32Array:
        return self._stack[: self._num_blank].copy()

    def hashed_pages(self) -> Int32Array:
        """Free hashed pages, the next to be handed out first."""
        entries = self._queue[self._head : self._tail]
        current = self._stamp_of[entries] == self._queue_stamps[self._head : self._tail]
        pages: Int32Array = entries[current]
        return pages

    def _take_oldest(self, count: int) -> Int32Array:
        parts: list[Int32Array] = []
        while count:
            stop = min(self._head + max(count, MIN_QUEUE_READ), self._tail)
            entries = self._queue[self._head : stop]
            current = np.flatnonzero(
                self._stamp_of[entries] == self._queue_stamps[self._head : stop]
            )[:count]
            parts.append(entries[current])
            count -= len(current)
            self._head = stop if count else self._head + int(current[-1]) + 1
        pages = np.concatenate(parts)
        self.remove_hashed(pages)
        return pages

    def _compact(self) -> None:
        # At most num_pages entries are current, so half of the queue is free afterwards and the
        # next compaction is num_pages pushes away.
        entries = self._queue[self._head : self._tail]
        stamps = self._queue_stamps[self._head : self._tail]
        current = self._stamp_of[entries] == stamps
        count = int(np.count_nonzero(current))
        self._queue[:count], self._queue_stamps[:count] = entries[current], stamps[current]
        self._head, self._tail = 0, count
