"""Which global pages hold which token prefix.

A page is published under its block's chained key together with its tokens, a serial number of its
own and the serial number of the block before it. A hit is taken only when tokens and serials
agree, from the first block on; serial numbers are never reused, so by induction a hit is a true
prefix whatever the hash does (a collision would be another tenant's KV).

The cache owns no pages and counts no references: `GlobalPages` does, and tells it which pages are
handed out again. It is not thread-safe.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from python_backend.kv.block_hash import BlockChain, random_seed
from python_backend.kv.groups import CacheGroup, IntegrityError
from python_backend.kv.listener import CacheListener

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

FIRST_WALK = 16  # blocks guessed at first; wrong guesses must stay cheap
WALK_GROWTH = 8
LONG_RUN = 256  # consecutive pages that are worth a walk of their own
COMPARED_BLOCKS = 256  # blocks compared at a time: the copies stay in the processor's cache


class ChainLink(NamedTuple):
    """The published block that ends a known prefix; `ROOT` is the empty prefix."""

    serial: int
    page: int


ROOT = ChainLink(0, 0)


class PrefixMatch(NamedTuple):
    """The longest published prefix: its pages in order, and the link to publish after it."""

    pages: Int32Array
    link: ChainLink


class Publication(NamedTuple):
    """`link` ends the published prefix. `displaced` pages lost their hash: they continued a
    prefix that is no longer there and stood in the way of one that is."""

    link: ChainLink
    displaced: Int32Array


class PrefixCache:
    """Published blocks of `num_pages` pages. Refuses a group of private (replayable) state."""

    def __init__(
        self,
        num_pages: int,
        group: CacheGroup,
        *,
        seed: bytes | None = None,
        listener: CacheListener | None = None,
    ) -> None:
        if group.replayable:
            raise ValueError(
                f"expected a group of shared state to cache, got the replayable group "
                f"{group.name!r}; private state is rebuilt, never published"
            )
        self._seed = random_seed() if seed is None else seed
        self._listener = listener
        self._page_of: dict[bytes, int] = {}
        self._keys = np.full(num_pages, None, dtype=object)
        self._serial = np.zeros(num_pages, dtype=np.int64)  # 0: not published
        self._parent = np.full(num_pages, -1, dtype=np.int64)  # serial before it, −1: not published
        self._next_serial = 1
        # Pairs of tokens: half as many numbers to compare. Pages hold an even number of tokens.
        self._token_pairs = np.zeros((num_pages, group.page_tokens // 2), dtype=np.int64)
        # The block published last after each page. Only a guess: a walk is verified afterwards.
        # One memory seen twice, because a walk wants plain ints and publishing wants vectors.
        self._successor_ints = array("i", bytes(4 * num_pages))
        self._successor = np.frombuffer(self._successor_ints, dtype=np.int32)

    @property
    def num_published(self) -> int:
        return len(self._page_of)

    def new_chain(self, salt: bytes) -> BlockChain:
        return BlockChain(self._seed, salt)

    def is_published(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        published: npt.NDArray[np.bool_] = self._serial[pages] != 0
        return published

    def find(self, chain: BlockChain, blocks: Int32Array) -> PrefixMatch:
        """The longest published prefix of `blocks`, int32 [n, page tokens] from the first token on.

        Changes nothing but the chain. The pages are safe only until the next page is handed out:
        adopt them first.
        """
        found: list[Int32Array] = []
        done, link, reach = 0, ROOT, FIRST_WALK
        while done < len(blocks):
            page = self._page_of.get(chain.keys(blocks, done, done + 1)[0])
            if page is None:
                break
            walk = self._walk(page, min(reach, len(blocks) - done))
            pages = walk[: self._num_agreeing(walk, blocks[done:], link)]
            if not len(pages):
                break
            found.append(pages)
            chain.adopt(blocks, done, self._keys[pages].tolist())
            done += len(pages)
            link = self._link(pages[-1])
            reach = reach * WALK_GROWTH if len(pages) == len(walk) else FIRST_WALK
        pages = np.concatenate(found) if found else np.empty(0, dtype=np.int32)
        return PrefixMatch(pages, link)

    def publish(
        self,
        chain: BlockChain,
        blocks: Int32Array,
        start: int,
        pages: Int32Array,
        parent: ChainLink,
    ) -> Publication:
        """Publish `pages` as the blocks [start, start + len(pages)) of a request.

        The pages must be full of final tokens, written, and not published yet. Where the cache
        already holds the same prefix, that page stays and ours remains private.
        """
        stop = start + len(pages)
        keys = chain.keys(blocks, start, stop)
        num_known, link = self._known_prefix(keys, blocks[start:stop], parent)
        if num_known == len(pages):
            return Publication(link, np.empty(0, dtype=np.int32))
        keys, pages, tokens = keys[num_known:], pages[num_known:], blocks[start + num_known : stop]
        holders = np.fromiter(
            map(self._page_of.setdefault, keys, pages.tolist()), dtype=np.int32, count=len(pages)
        )
        # Our first page is new, so nothing that stands after it can continue it: such a page
        # belongs to a prefix that was evicted, and would hide ours.
        others = np.flatnonzero(holders != pages)
        displaced = holders[others]
        if len(others):
            if self._listener is not None:
                self._listener.removed(self._keys[displaced].tolist())
            self._clear(displaced)
            for i in others.tolist():
                self._page_of[keys[i]] = int(pages[i])

        serials = np.arange(self._next_serial, self._next_serial + len(pages), dtype=np.int64)
        self._next_serial += len(pages)
        self._serial[pages] = serials
        self._parent[pages[0]] = link.serial
        self._parent[pages[1:]] = serials[:-1]
        self._keys[pages] = keys
        if self._listener is not None:
            parent_key = self._keys[link.page] if link.serial else None
            self._listener.stored(keys, parent_key, tokens)
        self._token_pairs[pages] = tokens.view(np.int64)
        self._successor[link.page] = pages[0]
        self._successor[pages[:-1]] = pages[1:]
        self._successor[0] = 0  # a walk that fell off stays off; the root has no page
        return Publication(self._link(pages[-1]), displaced)

    def drop(self, pages: Int32Array) -> None:
        """Forget published pages because they are handed out again."""
        keys = self._keys[pages].tolist()
        for key in keys:
            del self._page_of[key]
        if self._listener is not None:
            self._listener.removed(keys)
        self._clear(pages)

    def clear(self) -> None:
        """Forget all published pages. Serial numbers go on: what was published before is never
        taken for the beginning of what comes."""
        self._page_of.clear()
        if self._listener is not None:
            self._listener.cleared()
        self._clear(np.arange(len(self._serial), dtype=np.int32))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless keys, pages and serials describe one and the same set."""
        pages = np.fromiter(self._page_of.values(), dtype=np.int32, count=len(self._page_of))
        published = np.flatnonzero(self._serial)
        if not np.array_equal(np.sort(pages), published):
            raise IntegrityError(
                f"{len(pages)} keys point to pages, {len(published)} pages have a serial number"
            )
        if self._keys[pages].tolist() != list(self._page_of):
            raise IntegrityError("a published page carries another key than the one it is under")
        if (self._parent[published] >= self._serial[published]).any():
            raise IntegrityError("a block is older than the block before it")
        hidden = np.flatnonzero((self._serial == 0) & (self._parent != -1))
        if len(hidden):
            raise IntegrityError(f"page {hidden[0]} is not published but has a parent")

    def _link(self, page: int) -> ChainLink:
        return ChainLink(int(self._serial[page]), int(page))

    def _clear(self, pages: Int32Array) -> None:
        self._serial[pages] = 0
        self._parent[pages] = -1
        self._keys[pages] = None

    def _walk(self, page: int, count: int) -> Int32Array:
        """`page` and its guessed successors, at most `count` pages."""
        ahead = self._successor[page : page + count - 1]
        run = 1 + _num_leading(ahead == np.arange(page + 1, page + 1 + len(ahead)))
        if run >= min(count, LONG_RUN):
            return np.arange(page, page + run, dtype=np.int32)
        successor = self._successor_ints
        walk = array("i", [page, *[page := successor[page] for _ in range(count - 1)]])
        pages = np.frombuffer(walk, dtype=np.int32)
        return pages[: _num_leading(pages != 0)]

    def _known_prefix(
        self, keys: list[bytes], blocks: Int32Array, parent: ChainLink
    ) -> tuple[int, ChainLink]:
        """How many leading keys are published as continuations of `parent`, and where they end."""
        holders: list[int] = []
        for holder in map(self._page_of.get, keys):
            if holder is None:
                break
            holders.append(holder)
        if not holders:
            return 0, parent
        pages = np.array(holders, dtype=np.int32)
        count = self._num_agreeing(pages, blocks, parent)
        return count, self._link(pages[count - 1]) if count else parent

    def _num_agreeing(self, pages: Int32Array, blocks: Int32Array, parent: ChainLink) -> int:
        """How many leading `pages` continue `parent` one after the other with these tokens."""
        if not len(pages):
            return 0
        expected = np.empty(len(pages), dtype=np.int64)
        expected[0] = parent.serial
        expected[1:] = self._serial[pages[:-1]]
        count = _num_leading(self._parent[pages] == expected)
        pages, pairs = pages[:count], blocks[:count].view(np.int64)
        # Pages handed out together are usually consecutive; then nothing is gathered.
        consecutive = bool(count) and bool((np.diff(pages) == 1).all())
        for i in range(0, count, COMPARED_BLOCKS):
            wanted = pairs[i : i + COMPARED_BLOCKS]
            if consecutive:
                stored = self._token_pairs[pages[i] : pages[i] + len(wanted)]
            else:
                stored = self._token_pairs[pages[i : i + COMPARED_BLOCKS]]
            equal = stored == wanted
            if not equal.all():
                return i + _num_leading(equal.all(axis=1))
        return count


def _num_leading(flags: npt.NDArray[np.bool_]) -> int:
    """Length of the leading run of True."""
    return len(flags) if flags.all() else int(flags.argmin())
