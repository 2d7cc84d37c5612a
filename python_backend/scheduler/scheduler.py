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

from python_backend.request import FinishReason, Request
from python_backend.scheduler.checks import check_request
from python_backend.scheduler.residency import Admission, Residency
from python_backend.scheduler.slots import NEVER, SlotTable
from python_backend.scheduler.statistics import Statistics
from python_backend.scheduler.tracked import NO_SLOT, TrackedRequest
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan, StepResult

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class StepOutcome(NamedTuple):
    """What a step produced: one token for each of `requests`, and for which of them it was the
    last. A finished request has left the scheduler."""

    requests: list[TrackedRequest]
    tokens: Int32Array
    finished: dict[int, FinishReason]  # index into `requests`


class _Rows(NamedTuple):
    """Rows of a step by slot. The first `num_decodes` slots run one row, their last token."""

    slots: Int64Array
    counts: Int64Array
    num_decodes: int


class _StepInFlight(NamedTuple):
    slots: Int64Array
    wants_logits: BoolArray


class Scheduler:
    """Owns the queue and the slots of one core; `residency` owns its pages."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.statistics = Statistics()
        self.residency = Residency(limits)
        num_slots = limits.max_batch_size
        self._slots = SlotTable(num_slots, limits.history_width)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Slots are int64 here: numpy indexes with them three times faster than with int32.
        self._running: Int64Array = np.empty(0, dtype=np.int64)  # in order of admission
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
        return TrackedRequest(request, self.residency.new_chain(request))

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
            slots=slots.astype(np.int32),
            fresh=self._slots.fresh[slots],
            tables=self.residency.tables,
            sampling=self._slots.sampling_arrays(slots),
        )
        self._count_rows(plan, num_decodes)
        ends = arrays.first_position + counts
        self.residency.window_pages.grow(slots, ends)
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
        self.residency.window_pages.retire(slots, processed)

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
        self.residency.check_integrity()

    # -- rows of running requests ----------------------------------------------------------------

    def _make_room(self) -> bool:
        """Give decoding requests the pages they grow into; True if somebody was preempted."""
        pages, preempted = self.residency.global_pages, False
        while True:
            slots = self._running
            num_tokens = self._slots.num_tokens[slots]
            growing = num_tokens > pages.capacity[slots]
            if not growing.any():
                return preempted
            slots = slots[growing]
            missing = -(-num_tokens[growing] // pages.group.page_tokens) - pages.num_held[slots]
            if missing.sum() <= pages.num_free:
                pages.extend(slots, missing)
                return preempted
            self._preempt(int(self._running[-1]))
            preempted = True

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
        self._running = np.append(self._running, np.array(slots, dtype=np.int64))
        return _Rows(
            np.append(rows.slots, np.array(slots, dtype=np.int64)),
            np.append(rows.counts, np.array(counts, dtype=np.int64)),
            rows.num_decodes,
        )

    def _plan_admission(self, tracked: TrackedRequest) -> Admission | None:
        """`Residency.plan` for the head of the queue, not asked again while nothing changed."""
        version = self.residency.global_pages.version
        if version == self._blocked_at:
            return None
        admission = self.residency.plan(tracked)
        if admission is None:
            self._blocked_at = version
        return admission

    def _start(self, tracked: TrackedRequest, admission: Admission) -> None:
        slot, replay = self._free_slots.pop(), admission.replay
        self.residency.enter(slot, tracked, admission)
        self._slots.load(slot, tracked, replay)
        publishes = tracked.chain is not None
        next_publish = replay.hit + self.limits.global_page_tokens if publishes else NEVER
        self._slots.next_publish[slot] = next_publish
        if not tracked.num_admissions:
            tracked.cached_tokens = replay.hit
            self.statistics.num_cached_tokens += replay.hit
        tracked.num_admissions += 1
        self.statistics.num_dropped_short_hits += admission.dropped_hit

    # -- after a step ----------------------------------------------------------------------------

    def _publish(self, slot: int) -> None:
        """Publish the slot's blocks that became full; all their tokens are final and written."""
        table, page_tokens = self._slots, self.limits.global_page_tokens
        start = int(table.next_publish[slot]) // page_tokens - 1
        stop = int(table.num_processed[slot]) // page_tokens
        self.residency.publish(slot, table.sync(slot), start, stop)
        table.next_publish[slot] = (stop + 1) * page_tokens

    def _finished(self, slots: Int64Array, tokens: Int32Array) -> dict[int, FinishReason]:
        ends = self._slots.is_end(slots, tokens)
        full = self._slots.num_tokens[slots] >= self._slots.token_limit[slots]
        return {
            i: FinishReason.STOP if ends[i] else FinishReason.LENGTH
            for i in np.flatnonzero(ends | full).tolist()
        }

    def _vacate(self, slot: int) -> TrackedRequest:
        self.residency.leave(slot)
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
