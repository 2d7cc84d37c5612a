"""Continuous batching with chunked prefill over two paged pools.

Order of a step: every decoding request runs its one row, then prefill chunks of running requests,
first come first served, then admissions, as far as the token budget goes. A request is admitted
when the whole sequence that it knows fits now, and gets all those global pages at once; so only
decoding can run out of pages, and then the request admitted last is preempted by recompute. The
oldest request is never preempted, so everything that was admitted ends.

Not thread-safe and knows no executor: `schedule` gives a plan, `commit` or `fail` ends it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from python_backend.kv.global_pool import GlobalPages
from python_backend.kv.groups import CacheGroup
from python_backend.kv.prefix_cache import ROOT, ChainLink, PrefixCache
from python_backend.kv.window_pool import WindowPages
from python_backend.replay import ReplayPlan, longest_hit, plan_replay
from python_backend.request import FinishReason, Request
from python_backend.scheduler.checks import check_request
from python_backend.scheduler.slots import NEVER, SlotTable
from python_backend.scheduler.statistics import Statistics
from python_backend.scheduler.tracked import NO_SLOT, TrackedRequest
from python_backend.settings import CoreLimits
from python_backend.step_plan import PageTables, StepPlan, StepResult

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class StepOutcome(NamedTuple):
    """What a step produced: one token for each of `requests`, and for which of them it was the
    last. A finished request has left the scheduler."""

    requests: list[TrackedRequest]
    tokens: Int32Array
    finished: dict[int, FinishReason]  # index into `requests`


class _Admission(NamedTuple):
    """A request that fits: the pages to adopt, how many to add, and what to recompute."""

    hit_pages: Int32Array
    link: ChainLink
    num_new_pages: int
    replay: ReplayPlan
    num_found: int  # tokens that were found; more than the hit when a short one was dropped


class _Rows(NamedTuple):
    """Rows of a step by slot. The first `num_decodes` slots run one row, their last token."""

    slots: Int32Array
    counts: Int64Array
    num_decodes: int


class _StepInFlight(NamedTuple):
    slots: Int32Array
    wants_logits: BoolArray


class Scheduler:
    """Owns the pools, the tables, the prefix cache and the queue of one core."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.statistics = Statistics()
        shared = CacheGroup("global", limits.global_page_tokens, replayable=False)
        private = CacheGroup("window", limits.window_page_tokens, replayable=True)
        num_slots = limits.max_batch_size
        self.cache = PrefixCache(limits.num_global_pages, shared) if limits.prefix_cache else None
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
        self._tables = PageTables(
            global_pages=self.global_pages.table,
            window_pages=self.window_pages.table,
            global_page_tokens=limits.global_page_tokens,
            window_page_tokens=limits.window_page_tokens,
        )
        self._slots = SlotTable(num_slots, limits.history_width)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._running: Int32Array = np.empty(0, dtype=np.int32)  # slots in order of admission
        self._waiting: OrderedDict[TrackedRequest, None] = OrderedDict()
        self._blocked_at = -1  # pool version at which the head of the queue did not fit
        self._in_flight: _StepInFlight | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def track(self, request: Request) -> TrackedRequest:
        """Check a request and copy its tokens. Safe from any thread; raises RequestError."""
        check_request(request, self.limits)
        participates = self.cache is not None and request.use_prefix_cache
        chain = self.cache.new_chain(request.cache_salt) if self.cache and participates else None
        return TrackedRequest(request, chain)

    def add(self, tracked: TrackedRequest) -> None:
        """Queue a new request behind all others."""
        self._waiting[tracked] = None
        self.statistics.num_prompt_tokens += tracked.num_prompt_tokens

    def remove(self, tracked: TrackedRequest) -> None:
        """Take a request out, wherever it is; its pages are free at once. Not during a step."""
        assert self._in_flight is None
        if tracked.slot == NO_SLOT:
            del self._waiting[tracked]
            self._blocked_at = -1
        else:
            self._vacate(tracked.slot)

    def schedule(self) -> StepPlan | None:
        """Choose the rows of the next step; None when nothing can run."""
        assert self._in_flight is None
        preempted = self._make_room()
        rows = self._running_rows()
        budget = self.limits.max_num_tokens - int(rows.counts.sum())
        if not preempted and budget and self._waiting:
            rows = self._admit(rows, budget)
        if not len(rows.slots):
            return None
        slots, counts, num_decodes = rows
        arrays = self._slots.step_arrays(slots, counts, num_decodes)
        plan = StepPlan(
            arrays=arrays,
            slots=slots,
            fresh=self._slots.fresh[slots],
            tables=self._tables,
            sampling=self._slots.sampling_arrays(slots),
        )
        self._count_rows(plan, num_decodes)
        ends = arrays.first_position + counts
        self.window_pages.grow(slots, ends)
        self._slots.num_computed[slots] = ends
        self._in_flight = _StepInFlight(slots, arrays.wants_logits)
        return plan

    def commit(self, result: StepResult) -> StepOutcome:
        """Book the result of the running step: its rows are written, its tokens are final."""
        assert self._in_flight is not None
        slots, wants_logits = self._in_flight
        self._in_flight = None
        table = self._slots
        processed = table.num_computed[slots]
        table.num_processed[slots] = processed
        table.fresh[slots] = False
        self.window_pages.retire(slots, processed)

        tokens = result.tokens[wants_logits]
        sampled = slots[wants_logits]
        table.append(sampled, tokens)
        for slot in slots[processed >= table.next_publish[slots]].tolist():
            self._publish(slot)

        requests: list[TrackedRequest] = table.requests[sampled].tolist()
        finished = self._finished(sampled, tokens)
        for i in finished:
            self._vacate(int(sampled[i]))
        self.statistics.num_output_tokens += len(tokens)
        return StepOutcome(requests, tokens, finished)

    def fail(self) -> list[TrackedRequest]:
        """End the running step without a result: its requests leave, nothing is published."""
        assert self._in_flight is not None
        slots = self._in_flight.slots
        self._in_flight = None
        self.statistics.num_failed_steps += 1
        return [self._vacate(slot) for slot in slots.tolist()]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pools, tables and prefix cache agree."""
        self.global_pages.check_integrity()
        self.window_pages.check_integrity()

    # -- rows of running requests ----------------------------------------------------------------

    def _make_room(self) -> bool:
        """Give decoding requests the pages they grow into; True if somebody was preempted."""
        pages, preempted = self.global_pages, False
        while True:
            slots = self._running
            missing = -(-self._slots.num_tokens[slots] // pages.group.page_tokens)
            missing -= pages.num_held[slots]
            needed = int(missing.sum())
            if needed <= pages.num_free:
                break
            self._preempt(int(slots[-1]))
            preempted = True
        if needed:
            pages.extend(slots, missing)
        return preempted

    def _running_rows(self) -> _Rows:
        slots = self._running
        remaining = self._slots.num_tokens[slots] - self._slots.num_computed[slots]
        decoding = remaining == 1
        decodes, prefills, wanted = slots[decoding], slots[~decoding], remaining[~decoding]
        budget = self.limits.max_num_tokens - len(decodes)
        granted = np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
        runs = granted > 0
        return _Rows(
            np.concatenate([decodes, prefills[runs]]),
            np.concatenate([remaining[decoding], granted[runs]]),
            len(decodes),
        )

    def _preempt(self, slot: int) -> None:
        tracked = self._vacate(slot)
        self._waiting[tracked] = None
        self._waiting.move_to_end(tracked, last=False)
        self.statistics.num_preemptions += 1

    # -- admission -------------------------------------------------------------------------------

    def _admit(self, rows: _Rows, budget: int) -> _Rows:
        slots: list[int] = []
        counts: list[int] = []
        while budget and self._waiting and self._free_slots:
            tracked = next(iter(self._waiting))
            admission = self._plan_admission(tracked)
            if admission is None:
                break
            del self._waiting[tracked]
            self._start(tracked, admission)
            counts.append(min(tracked.num_tokens - admission.replay.replay_start, budget))
            slots.append(tracked.slot)
            budget -= counts[-1]
        if not slots:
            return rows
        self._running = np.append(self._running, np.array(slots, dtype=np.int32))
        return _Rows(
            np.append(rows.slots, np.array(slots, dtype=np.int32)),
            np.append(rows.counts, np.array(counts, dtype=np.int64)),
            rows.num_decodes,
        )

    def _plan_admission(self, tracked: TrackedRequest) -> _Admission | None:
        """How the request would enter now; None when its whole known sequence does not fit."""
        pages, page_tokens = self.global_pages, self.limits.global_page_tokens
        if pages.version == self._blocked_at:
            return None
        hit_pages, link = np.empty(0, dtype=np.int32), ROOT
        num_found = 0
        if self.cache is not None and tracked.chain is not None:
            limit = longest_hit(tracked.num_tokens, page_tokens) // page_tokens
            match = self.cache.find(tracked.chain, tracked.blocks(limit, page_tokens))
            num_found = len(match.pages) * page_tokens
        replay = plan_replay(
            self.limits.replay,
            num_tokens=tracked.num_tokens,
            num_prompt_tokens=tracked.num_prompt_tokens,
            hit=num_found,
        )
        if replay.hit:
            hit_pages, link = match.pages, match.link
        num_new_pages = -(-tracked.num_tokens // page_tokens) - len(hit_pages)
        if pages.num_needed(hit_pages, num_new_pages) > pages.num_free:
            self._blocked_at = pages.version
            return None
        return _Admission(hit_pages, link, num_new_pages, replay, num_found)

    def _start(self, tracked: TrackedRequest, admission: _Admission) -> None:
        """Give the request a slot and all pages of its known sequence."""
        slot, replay = self._free_slots.pop(), admission.replay
        if replay.hit:
            self.global_pages.adopt(slot, admission.hit_pages)
        self.global_pages.extend(
            np.array([slot], dtype=np.int32), np.array([admission.num_new_pages], dtype=np.int64)
        )
        self.window_pages.start(slot, replay.replay_start)
        self._slots.load(slot, tracked, replay)
        publishes = tracked.chain is not None
        self._slots.next_publish[slot] = (
            replay.hit + self.limits.global_page_tokens if publishes else NEVER
        )
        tracked.link = admission.link
        if not tracked.num_admissions:
            tracked.cached_tokens = replay.hit
            self.statistics.num_cached_tokens += replay.hit
        tracked.num_admissions += 1
        if admission.num_found > replay.hit:
            self.statistics.num_dropped_short_hits += 1

    # -- after a step ----------------------------------------------------------------------------

    def _publish(self, slot: int) -> None:
        """Publish the slot's blocks that became full; all their tokens are final and written."""
        table, page_tokens = self._slots, self.limits.global_page_tokens
        tracked = table.sync(slot)
        assert tracked.chain is not None
        start = int(table.next_publish[slot]) // page_tokens - 1
        stop = int(table.num_processed[slot]) // page_tokens
        tracked.link = self.global_pages.publish(
            slot, tracked.chain, tracked.blocks(stop, page_tokens), start, tracked.link
        )
        table.next_publish[slot] = (stop + 1) * page_tokens

    def _finished(self, slots: Int32Array, tokens: Int32Array) -> dict[int, FinishReason]:
        ends = self._slots.is_end(slots, tokens)
        full = self._slots.num_tokens[slots] >= self._slots.token_limit[slots]
        return {
            i: FinishReason.STOP if ends[i] else FinishReason.LENGTH
            for i in np.flatnonzero(ends | full).tolist()
        }

    def _vacate(self, slot: int) -> TrackedRequest:
        self.global_pages.release(slot)
        self.window_pages.release(slot)
        self._free_slots.append(slot)
        self._running = self._running[self._running != slot]
        return self._slots.unload(slot)

    def _count_rows(self, plan: StepPlan, num_decodes: int) -> None:
        """A decode row is never replayed and never trimmed, so only the others are looked at."""
        arrays, statistics = plan.arrays, self.statistics
        statistics.num_steps += 1
        statistics.num_rows += arrays.num_rows
        if num_decodes < arrays.num_requests:
            first, counts = arrays.first_position[num_decodes:], np.diff(arrays.query_start)
            counts = counts[num_decodes:]
            replayed = np.clip(arrays.write_floor[num_decodes:] - first, 0, counts)
            trimmed = np.clip(arrays.decoder_floor[num_decodes:] - first, 0, counts)
            statistics.num_replayed_rows += int(replayed.sum())
            statistics.num_trimmed_rows += int(trimmed.sum())
