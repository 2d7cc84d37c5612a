"""Continuous batching with chunked prefill over two paged pools.

Order of a step: every decoding request runs its last token, then drafts are verified behind some of
them, then prefill chunks of running requests, first come first served, then admissions by priority
and arrival, as far as the token budget goes. A request is admitted when the whole sequence that it
knows fits now, and gets all those global pages at once; so only decoding can run out of pages, and
then the request of the lowest priority, admitted last, is preempted by recompute. The oldest of the
highest priority never is, so something always ends; of one priority, everything does.

Drafts take from nobody: no page that a token needs, and at most half of the budget that prompts
wait for. Lengths are committed ones everywhere: rejected drafts are in no count, no hash and no
published page.

Not thread-safe and knows no executor: `schedule` gives a plan, `commit` or `fail` ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from python_backend.drafting.rule import granted
from python_backend.drafting.schedule import DraftSchedule
from python_backend.kv.listener import CacheListener
from python_backend.metrics.latency import Latencies
from python_backend.request import FinishReason, Request
from python_backend.scheduler.checks import check_request
from python_backend.scheduler.judging import Judging
from python_backend.scheduler.outcome import StepOutcome
from python_backend.scheduler.residency import Admission, Residency
from python_backend.scheduler.slots import NEVER, SlotTable
from python_backend.scheduler.statistics import Statistics
from python_backend.scheduler.step_budget import StepBudget
from python_backend.scheduler.tracked import NO_SLOT, TrackedRequest
from python_backend.scheduler.waiting import WaitingQueue
from python_backend.settings import CoreLimits
from python_backend.step_plan import Beginning, StepPlan, StepResult

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class _Rows(NamedTuple):
    """Rows of a step by slot. The first `num_decodes` slots run their last token and drafts."""

    slots: Int64Array
    counts: Int64Array
    num_decodes: int


class _StepInFlight(NamedTuple):
    slots: Int64Array
    plan: StepPlan
    num_decodes: int
    begun: float  # of the clock


class Scheduler:
    """Owns the queue and the slots of one core; `residency` owns its pages."""

    def __init__(
        self,
        limits: CoreLimits,
        clock: Callable[[], float] = time.monotonic,
        listener: CacheListener | None = None,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.statistics = Statistics(
            num_drafted=np.zeros(limits.most_drafts, dtype=np.int64),
            num_accepted=np.zeros(limits.most_drafts, dtype=np.int64),
            latencies=Latencies(limits.max_seq_len),
        )
        self.residency = Residency(limits, listener)
        self._budget = StepBudget(limits)
        self._drafting = DraftSchedule()
        num_slots = limits.max_batch_size
        self._slots = SlotTable(num_slots, limits.history_width, limits.most_drafts)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Slots are int64 here: numpy indexes with them three times faster than with int32.
        self._running: Int64Array = np.empty(0, dtype=np.int64)  # in order of admission
        self._waiting = WaitingQueue()
        self._judging = Judging(limits.max_judged_rows)
        self._blocked_at = -1  # pool version at which the head of the queue did not fit
        self._in_flight: _StepInFlight | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_prefilling(self) -> int:
        """Running requests that have more than their newest token to run."""
        remaining = self._slots.num_tokens - self._slots.num_computed
        return int(np.count_nonzero(remaining[self._running] > 1))

    @property
    def waiting_for(self) -> str:
        """What the first in the queue needs: slots, pages or rows; empty when nobody waits."""
        if not self._waiting:
            return ""
        if not self._free_slots:
            return "slots"
        return "pages" if self._blocked_at == self.residency.global_pages.version else "rows"

    def track(self, request: Request) -> TrackedRequest:
        """Check a request and copy its tokens. Safe from any thread; raises RequestError."""
        check_request(request, self.limits)
        return TrackedRequest(request, self.residency.new_chain(request), self.clock())

    def add(self, tracked: TrackedRequest) -> None:
        """Queue a new request behind all others of its priority."""
        self._waiting.add(tracked)
        if self._waiting.head is tracked:
            self._blocked_at = -1
        self.statistics.num_prompt_tokens += tracked.num_prompt_tokens

    def remove(self, tracked: TrackedRequest) -> None:
        """Take a request out, wherever it is; its pages are free at once. Not during a step."""
        assert self._in_flight is None
        if tracked.slot == NO_SLOT:
            self._waiting.remove(tracked)
            self._blocked_at = -1
        else:
            self._vacate(tracked.slot)

    def schedule(self) -> StepPlan | None:
        """Choose the rows of the next step; None when nothing can run."""
        assert self._in_flight is None
        preempted = self._make_room()
        rows = self._running_rows()
        budget = self._budget.rows(rows.num_decodes, len(self._waiting)) - int(rows.counts.sum())
        if not preempted and budget and self._waiting:
            rows = self._admit(rows, budget)
        if not len(rows.slots):
            return None
        slots, counts, num_decodes = rows
        arrays = self._slots.step_arrays(slots, counts, num_decodes)
        num_drafts = np.zeros(len(slots), dtype=np.int64)
        num_drafts[:num_decodes] = counts[:num_decodes] - 1
        fresh = self._slots.fresh[slots]
        pieces = self._judging.pieces(slots, arrays) if self._judging else []
        plan = StepPlan(
            arrays=arrays,
            slots=slots.astype(np.int32),
            fresh=fresh,
            tables=self.residency.tables,
            sampling=self._slots.sampling_arrays(slots),
            beginnings=[self._beginning(slot) for slot in slots[fresh].tolist()],
            num_drafts=num_drafts,
            wants_drafts=self._wants_drafts(slots),
            prompt_pieces=pieces,
        )
        self.statistics.count_rows(plan.arrays, num_decodes)
        ends = arrays.first_position + counts
        self.residency.window_pages.grow(slots, ends)
        self._slots.num_computed[slots] = ends
        self._in_flight = _StepInFlight(slots, plan, num_decodes, self.clock())
        return plan

    def commit(self, result: StepResult) -> StepOutcome:
        """Book the result of the running step: its rows are written, except those of rejected
        drafts, and its tokens are final."""
        assert self._in_flight is not None
        slots, plan, num_decodes, begun = self._in_flight
        self._in_flight = None
        now = self.clock()
        self._budget.ran(num_decodes, plan.arrays.num_rows, now - begun)
        rule = self.limits.draft
        if rule is not None and rule.by_cost and num_decodes == len(slots):
            self._drafting.ran(plan.arrays.num_rows, now - begun)
        wants_logits, num_drafts = plan.arrays.wants_logits, plan.num_drafts
        table, window_pages = self._slots, self.residency.window_pages
        sampled = slots[wants_logits]
        accepted = None if result.num_accepted is None else result.num_accepted[wants_logits]
        appended = table.append(sampled, accepted, result.tokens[wants_logits])
        self.statistics.latencies.made_tokens(now, sampled, table.last_token_at, table.requests)

        drafted = bool(num_drafts.any())
        if drafted:  # the row of the newest token never ran, all before it did
            table.num_computed[sampled] = table.num_tokens[sampled] - 1
        processed = table.num_computed[slots]
        table.num_processed[slots] = processed
        table.fresh[slots] = False
        window_pages.retire(slots, processed)
        if drafted:
            window_pages.roll_back(slots, processed)
            self.statistics.count_drafts(num_drafts, result.num_accepted)
        for slot in slots[processed >= table.next_publish[slots]].tolist():
            self._publish(slot)
        if rule is not None:
            table.propose(sampled, wants_logits, result.drafts, rule)

        judged = self._judging.book(slots, plan.prompt_pieces, result.prompt_logprobs)
        requests: list[TrackedRequest] = table.requests[sampled].tolist()
        finished = self._finished(sampled, appended.last)
        for i in finished:
            self._vacate(int(sampled[i]))
        tokens, counts, num_kept, _ = appended
        self.statistics.num_output_tokens += int(len(tokens) if counts is None else counts.sum())
        return StepOutcome(requests, tokens, counts, num_kept, finished, judged)

    def fail(self) -> list[TrackedRequest]:
        """End the running step without a result: its requests leave, nothing is published."""
        assert self._in_flight is not None
        slots = self._in_flight.slots
        self._in_flight = None
        self.statistics.num_failed_steps += 1
        return [self._vacate(slot) for slot in slots.tolist()]

    def reset_prefix_cache(self) -> None:
        """Forget all published pages. Who runs keeps its pages and publishes no more of them: what
        they continue is no longer there. Not during a step."""
        assert self._in_flight is None
        self.residency.reset_prefix_cache()
        self._slots.next_publish[self._running] = NEVER

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pools, tables and prefix cache agree."""
        self.residency.check_integrity()

    # -- rows of running requests ----------------------------------------------------------------

    def _make_room(self) -> bool:
        """Give decoding requests the pages they grow into, and their drafts the pages that are
        left; True if somebody was preempted."""
        pages, table, preempted = self.residency.global_pages, self._slots, False
        while True:
            slots = self._running
            num_tokens = table.num_tokens[slots]
            with_drafts = num_tokens + table.num_drafts[slots]
            growing = with_drafts > pages.capacity[slots]
            if not growing.any():
                return preempted
            slots = slots[growing]
            for ends in (with_drafts[growing], num_tokens[growing]):
                held = pages.num_held[slots]  # drafts of another step may have grown a slot ahead
                missing = np.maximum(-(-ends // pages.group.page_tokens) - held, 0)
                if missing.sum() <= pages.num_free:
                    pages.extend(slots, missing)
                    return preempted
            self._preempt(self._victim())
            preempted = True

    def _running_rows(self) -> _Rows:
        slots = self._running
        remaining = self._slots.num_tokens[slots] - self._slots.num_computed[slots]
        decoding = remaining == 1
        decodes, prefills = slots[decoding], slots[~decoding]
        most = self._budget.rows(len(decodes), len(self._waiting))
        budget = most - len(decodes)
        counts = remaining[decoding]
        if self.limits.draft is not None:
            waited_for = len(prefills) > 0 or len(self._waiting) > 0
            counts = counts + self._granted_drafts(decodes, budget // 2 if waited_for else budget)
            budget = most - int(counts.sum())
        wanted = remaining[~decoding]
        if self._judging:
            wanted = self._judging.limited(prefills, wanted)
        rows = granted(wanted, budget)
        runs = rows > 0
        return _Rows(
            np.concatenate([decodes, prefills[runs]]),
            np.concatenate([counts, rows[runs]]),
            len(decodes),
        )

    def _granted_drafts(self, slots: Int64Array, budget: int) -> Int64Array:
        """How many of their drafts the decoding slots verify: no more than their pages hold."""
        assert self.limits.draft is not None
        table = self._slots
        room = self.residency.global_pages.capacity[slots] - table.num_tokens[slots]
        wanted = np.minimum(table.num_drafts[slots], room)
        if self.limits.draft.by_cost and wanted.any():
            return self._drafting.worthwhile(table.survival[slots], wanted, budget)
        return granted(wanted, budget)

    def _wants_drafts(self, slots: Int64Array) -> BoolArray:
        """Who can use a draft after this step, which appends one token at least."""
        if self.limits.draft is None:
            return np.zeros(len(slots), dtype=bool)
        wants: BoolArray = self._slots.draft_room(slots) >= 2
        return wants

    def _beginning(self, slot: int) -> Beginning:
        tracked: TrackedRequest = self._slots.requests[slot]
        return Beginning(slot, tracked.request, tracked.tokens[: tracked.num_tokens])

    def _victim(self) -> int:
        """The slot of the lowest priority, of several the one admitted last."""
        priority = self._slots.priority[self._running]
        return int(self._running[np.flatnonzero(priority == priority.max())[-1]])

    def _preempt(self, slot: int) -> None:
        self._waiting.add(self._vacate(slot))
        self.statistics.num_preemptions += 1

    # -- admission -------------------------------------------------------------------------------

    def _admit(self, rows: _Rows, budget: int) -> _Rows:
        slots: list[int] = []
        counts: list[int] = []
        to_judge = self._judging.room(rows.slots, rows.counts)
        while budget and self._waiting and self._free_slots:
            tracked = self._waiting.head
            admission = self._plan_admission(tracked)
            if admission is None:
                break
            self._waiting.remove(tracked)
            self._start(tracked, admission)
            count = min(tracked.num_tokens - admission.replay.replay_start, budget)
            if tracked.is_judging:
                count = min(count, to_judge)
                to_judge -= count
            counts.append(count)
            slots.append(tracked.slot)
            budget -= count
        if not slots:
            return rows
        added, wanted = np.array(slots, dtype=np.int64), np.array(counts, dtype=np.int64)
        self._running = np.append(self._running, added)
        runs = wanted > 0
        return _Rows(
            np.append(rows.slots, added[runs]),
            np.append(rows.counts, wanted[runs]),
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
            if publishes and not tracked.wants_prompt_judged:
                self.statistics.num_prefix_queries += tracked.num_prompt_tokens
            tracked.moments.scheduled = self.clock()
        tracked.num_admissions += 1
        self._judging.add(slot, tracked)
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
        self._judging.discard(slot)
        self._running = self._running[self._running != slot]
        return self._slots.unload(slot)
