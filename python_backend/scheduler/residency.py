"""What a request needs to live in a slot: pages in both pools and a place in the prefix cache.

Asks and acts for one request at a time; when and for whom is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from python_backend.kv.block_hash import BlockChain
from python_backend.kv.global_pool import GlobalPages
from python_backend.kv.groups import CacheGroup
from python_backend.kv.listener import CacheListener
from python_backend.kv.prefix_cache import ROOT, ChainLink, PrefixCache
from python_backend.kv.window_pool import WindowPages
from python_backend.replay import ReplayPlan, longest_hit, plan_replay
from python_backend.request import Request
from python_backend.scheduler.tracked import TrackedRequest
from python_backend.settings import CoreLimits
from python_backend.step_plan import PageTables

Int32Array = npt.NDArray[np.int32]

NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)


class Admission(NamedTuple):
    """How a request that fits enters: pages to adopt, pages to add, rows to recompute.

    Holds only until the next page is handed out. `dropped_hit` is set when a hit was found that
    is not longer than its replay.
    """

    hit_pages: Int32Array
    link: ChainLink
    num_new_pages: int
    replay: ReplayPlan
    dropped_hit: bool


class Residency:
    """The pools, tables and prefix cache of one core."""

    def __init__(self, limits: CoreLimits, listener: CacheListener | None = None) -> None:
        self._limits = limits
        self._page_tokens = limits.global_page_tokens
        self._untrimmed = replace(limits.replay, decoder_tail=None)
        shared = CacheGroup("global", limits.global_page_tokens, replayable=False)
        private = CacheGroup("window", limits.window_page_tokens, replayable=True)
        num_slots = limits.max_batch_size
        self.cache: PrefixCache | None = None
        if limits.prefix_cache:
            self.cache = PrefixCache(limits.num_global_pages, shared, listener=listener)
        self.global_pages = GlobalPages(
            group=shared,
            num_pages=limits.num_global_pages,
            num_slots=num_slots,
            columns=limits.global_columns,
            cache=self.cache,
        )
        self.window_pages = WindowPages(
            group=private,
            window=limits.window,
            num_pages=limits.num_window_pages,
            num_slots=num_slots,
            columns=limits.window_columns,
        )
        self.tables = PageTables(
            global_pages=self.global_pages.table,
            window_pages=self.window_pages.table,
            global_page_tokens=limits.global_page_tokens,
            window_page_tokens=limits.window_page_tokens,
        )

    def new_chain(self, request: Request) -> BlockChain | None:
        """The request's part in prefix caching, if it takes one. Safe from any thread."""
        if self.cache is None or not request.use_prefix_cache:
            return None
        return self.cache.new_chain(request.cache_salt)

    def plan(self, tracked: TrackedRequest) -> Admission | None:
        """How the request would enter now; None when its whole known sequence does not fit.

        Published pages that nobody holds count as needed when they are hit: they leave the free
        list. Window pages are not asked for, they always suffice.
        """
        hit_pages, link = NO_PAGES, ROOT
        judged = tracked.wants_prompt_judged
        if self.cache is not None and tracked.chain is not None and not judged:
            limit = longest_hit(tracked.num_tokens, self._page_tokens) // self._page_tokens
            blocks = tracked.blocks(limit, self._page_tokens)
            hit_pages, link = self.cache.find(tracked.chain, blocks)
        num_found = len(hit_pages) * self._page_tokens
        replay = plan_replay(
            self._untrimmed if judged else self._limits.replay,
            num_tokens=tracked.num_tokens,
            num_prompt_tokens=tracked.num_prompt_tokens,
            hit=num_found,
        )
        if not replay.hit:
            hit_pages, link = NO_PAGES, ROOT
        num_new_pages = -(-tracked.num_tokens // self._page_tokens) - len(hit_pages)
        pages = self.global_pages
        if pages.num_needed(hit_pages, num_new_pages) > pages.num_free:
            return None
        return Admission(hit_pages, link, num_new_pages, replay, num_found > replay.hit)

    def enter(self, slot: int, tracked: TrackedRequest, admission: Admission) -> None:
        """Give an empty slot all global pages of the known sequence."""
        self.global_pages.adopt(slot, admission.hit_pages)
        self.global_pages.extend(np.array([slot]), np.array([admission.num_new_pages]))
        self.window_pages.start(slot, admission.replay.replay_start)
        tracked.link = admission.link

    def publish(self, slot: int, tracked: TrackedRequest, start: int, stop: int) -> None:
        """Publish the slot's blocks [start, stop): full, final, written, and next in its chain."""
        assert tracked.chain is not None
        blocks = tracked.blocks(stop, self._page_tokens)
        tracked.link = self.global_pages.publish(slot, tracked.chain, blocks, start, tracked.link)

    def reset_prefix_cache(self) -> None:
        """Forget every published page; pages that are held stay with their slots."""
        if self.cache is not None:
            self.global_pages.unpublish_all()

    def leave(self, slot: int) -> None:
        self.global_pages.release(slot)
        self.window_pages.release(slot)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pools, tables and prefix cache agree."""
        self.global_pages.check_integrity()
        self.window_pages.check_integrity()
