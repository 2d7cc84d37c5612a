"""The pool of global pages: main KV and index keys, shared between requests and never rewritten.

Owns page ids, reference counts and the table of every slot; the bytes belong to the executor.
Row `slot` of the table is the only record of what the slot holds, in token order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from python_backend.kv.block_hash import BlockChain
from python_backend.kv.free_pages import FreePages
from python_backend.kv.groups import CacheGroup, IntegrityError, ragged_columns
from python_backend.kv.prefix_cache import ChainLink, PrefixCache

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class GlobalPages:
    """`num_pages` counts the null page 0. `cache` is None when nothing is ever published.

    Ask `num_free` and `num_needed` before acting: an action never answers "no". `version` changes
    whenever a request that did not fit might fit now. `capacity[slot]` is the number of tokens
    that the slot's pages have room for.
    """

    def __init__(
        self,
        *,
        group: CacheGroup,
        num_pages: int,
        num_slots: int,
        columns: int,
        cache: PrefixCache | None,
    ) -> None:
        self.group = group
        self.num_pages = num_pages
        self.cache = cache
        self.table: Int32Array = np.zeros((num_slots, columns), dtype=np.int32)
        self.num_held: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.capacity: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.version = 0
        self._references = np.zeros(num_pages, dtype=np.int32)
        self._free = FreePages(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be handed out, published ones that nobody uses included."""
        return self._free.num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self._free.num_free

    def num_needed(self, hit_pages: Int32Array, num_new: int) -> int:
        """Free pages that adopting `hit_pages` and taking `num_new` more would use up.

        A hit page that nobody holds leaves the free list when it is adopted, so it counts.
        """
        return num_new + int(np.count_nonzero(self._references[hit_pages] == 0))

    def adopt(self, slot: int, pages: Int32Array) -> None:
        """Give published `pages` to an empty slot, as its first pages."""
        unused = pages[self._references[pages] == 0]
        self._free.remove_hashed(unused)
        self._references[pages] += 1
        self.table[slot, : len(pages)] = pages
        self._set_held(slot, len(pages))

    def extend(self, slots: Int64Array, counts: Int64Array) -> None:
        """Give counts[i] ≥ 0 fresh pages to each slot, after those that it holds."""
        taken = self._free.take(int(counts.sum()))
        if len(taken.hashed):
            assert self.cache is not None  # only published pages are filed as hashed
            self.cache.drop(taken.hashed)
        pages = np.concatenate(taken)
        self._references[pages] = 1
        self.table[np.repeat(slots, counts), ragged_columns(self.num_held[slots], counts)] = pages
        self._set_held(slots, self.num_held[slots] + counts)

    def release(self, slot: int) -> None:
        """Take all pages from a slot, the deepest first so that it is reused first."""
        held = int(self.num_held[slot])
        pages = self.table[slot, :held][::-1].copy()
        self.table[slot, :held] = 0
        self._set_held(slot, 0)
        self._references[pages] -= 1
        unused = pages[self._references[pages] == 0]
        if self.cache is None:
            self._free.push_blank(unused)
        else:
            published = self.cache.is_published(unused)
            self._free.push_hashed(unused[published])
            self._free.push_blank(unused[~published])
        self.version += 1

    def publish(
        self, slot: int, chain: BlockChain, blocks: Int32Array, start: int, parent: ChainLink
    ) -> ChainLink:
        """Publish the slot's pages of blocks [start, len(blocks)), which are written and final.

        Returns the link that the slot's next block continues.
        """
        assert self.cache is not None
        pages = self.table[slot, start : len(blocks)].copy()
        link, displaced = self.cache.publish(chain, blocks, start, pages, parent)
        if len(displaced):
            unused = displaced[self._references[displaced] == 0]
            self._free.remove_hashed(unused)
            self._free.push_blank(unused)
        self.version += 1
        return link

    def unpublish_all(self) -> None:
        assert self.cache is not None
        self.cache.clear()
        free = self._free.hashed_pages()
        self._free.remove_hashed(free)
        self._free.push_blank(free)
        self.version += 1

    def _set_held(self, slots: int | Int64Array, num_held: int | Int64Array) -> None:
        self.num_held[slots] = num_held
        self.capacity[slots] = num_held * self.group.page_tokens

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page is owned or free, exactly once, and counted."""
        columns = np.arange(self.table.shape[1])
        held = columns < self.num_held[:, None]
        if ((self.table != 0) != held).any():
            raise IntegrityError("a global table has a null page inside or a page beyond its end")
        in_order = np.sort(self.table[self.num_held > 0], axis=1)
        if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != 0)).any():
            raise IntegrityError("a slot holds a global page twice")
        owners = np.bincount(self.table[held], minlength=self.num_pages)
        wrong = np.flatnonzero(owners != self._references)
        if len(wrong):
            page = int(wrong[0])
            raise IntegrityError(
                f"global page {page} has {owners[page]} owners and "
                f"{self._references[page]} references"
            )
        blank, hashed = self._free.blank_pages(), self._free.hashed_pages()
        free = np.sort(np.concatenate([blank, hashed]))
        if not np.array_equal(free, np.flatnonzero(self._references[1:] == 0) + 1):
            raise IntegrityError("free global pages are not the pages without references")
        if len(blank) != self._free.num_blank or len(hashed) != self._free.num_hashed:
            raise IntegrityError("the free list miscounts its pages")
        if self.cache is not None:
            self.cache.check_integrity()
            if self.cache.is_published(blank).any() or not self.cache.is_published(hashed).all():
                raise IntegrityError("a free page stands in the wrong half of the free list")
        elif len(hashed):
            raise IntegrityError("a page is filed as published without a prefix cache")
