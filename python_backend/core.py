"""The core: one thread that turns requests into tokens, step by step.

Requests and cancellations come from any thread through an inbox; everything else happens on the
thread that calls `run` (or `step`). While there is nothing to do the thread sleeps on the inbox.
It knows scheduling and delivery, not what an executor computes.

    core = EngineCore(executor, settings.resolve(config, available_bytes))
    threading.Thread(target=core.run).start()
    core.add_request(request)       # deltas arrive at request.on_delta
    core.stop()
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from python_backend.arrivals import Arrivals
from python_backend.drafting.verification import check_drafts
from python_backend.kv.groups import IntegrityError
from python_backend.kv.listener import CacheListener
from python_backend.request import STOPPED, Delta, FinishReason, Request, RequestError
from python_backend.scheduler.outcome import StepOutcome
from python_backend.scheduler.scheduler import Scheduler
from python_backend.scheduler.statistics import Statistics
from python_backend.scheduler.tracked import TrackedRequest
from python_backend.settings import CoreLimits
from python_backend.step_plan import Executor, StepPlan, StepResult

if TYPE_CHECKING:  # the library behind it is optional
    from python_backend.grammar.grammar import Grammar

logger = logging.getLogger(__name__)

QUIET_SECONDS = 0.2  # idle time before the books are checked, so that a check delays nobody
# A step may fail by chance; an executor that fails so often in a row will fail for ever.
MAX_FAILED_STEPS = 3
NO_TOKENS: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)


class _Cancellation(NamedTuple):
    request_id: str
    reason: FinishReason


class _Reset(NamedTuple):
    done: Callable[[], None]


# A message is a request to add, one to cancel, a grammar that is compiled or refused, a reset, or
# None to wake up.
Message = TrackedRequest | _Cancellation | Future["Grammar"] | _Reset | None


class EngineCore:
    """Serves requests on one executor. `limits` must be those that the executor's memory has.
    `listener` hears of the prefix cache."""

    def __init__(
        self,
        executor: Executor,
        limits: CoreLimits,
        clock: Callable[[], float] = time.monotonic,
        listener: CacheListener | None = None,
    ) -> None:
        self._executor = executor
        self._limits = limits
        self._clock = clock
        self._scheduler = Scheduler(limits, clock, listener)
        self._live: dict[str, TrackedRequest] = {}
        # Of the live ones, those without a grammar yet.
        self._compiling: dict[Future[Grammar], TrackedRequest] = {}
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._arrivals = Arrivals(limits, self._scheduler)
        self._closed = False  # changed, and the inbox then left alone, behind the arrivals' door
        # Why requests were cancelled, until that is received: a running step may still end them
        # otherwise, but this is what their clients were told, so it is how they are counted.
        self._cancelled: dict[str, FinishReason] = {}
        # Ended here, and not yet told how their clients saw them end.
        self._unsettled: dict[str, tuple[TrackedRequest, FinishReason]] = {}
        self._failed_in_a_row = 0
        self._unchecked = False  # something happened since the books were checked

    # -- from any thread -------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and calls nothing, for what can never be served and
        when the queue is full.

        The tokens are copied; the caller's buffer is free when this returns.
        """
        tracked = self._scheduler.track(request)
        with self._arrivals.door:
            self._check_open()
            self._arrivals.enter(tracked)
            self._inbox.put(tracked)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request before the next step, and count it by the first reason given. Unknown and
        counted ids are ignored: a cancel races with the end of its request. STOP is the reason
        where the receiver has all that it wants, because of a stop string. For a request with
        `receiver_tells_end` this comes behind its last delta, too."""
        self._cancelled.setdefault(request_id, reason)
        self._inbox.put(_Cancellation(request_id, reason))

    def reset_prefix_cache(self, done: Callable[[], None]) -> None:
        """Forget all published pages before the next step; running requests keep theirs. `done` is
        called on the core's thread afterwards, also when it stops. Raises RequestError when it has
        stopped."""
        with self._arrivals.door:
            self._check_open()
            self._inbox.put(_Reset(done))

    def stop(self) -> None:
        """Make `run` return after its current step; what still runs ends with an error."""
        with self._arrivals.door:
            self._closed = True
        self._inbox.put(None)

    def statistics(self) -> Statistics:
        """A copy of the counters, with the gauges of this moment."""
        scheduler, residency = self._scheduler, self._scheduler.residency
        return replace(
            scheduler.statistics.copy(),
            num_running=scheduler.num_running,
            num_prefilling=scheduler.num_prefilling,
            num_waiting=scheduler.num_waiting + len(self._compiling),
            num_compiling=len(self._compiling),
            waiting_for=scheduler.waiting_for,
            num_global_pages_used=residency.global_pages.num_used,
            num_global_pages=residency.global_pages.num_pages - 1,
            num_window_pages_used=residency.window_pages.num_used,
            num_window_pages=residency.window_pages.num_pages - 1,
            num_published_pages=residency.cache.num_published if residency.cache else 0,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError(
                "shutting_down", "expected a running server, got one that stops; try another"
            )

    # -- on the core's thread --------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`. An error of the core itself ends every request and is raised."""
        try:
            while not self._closed:
                if not self.has_work:
                    self.run_when_idle()
                self.step()
            self._end_all(*STOPPED)
        except BaseException:
            with self._arrivals.door:
                self._closed = True
            self._end_all("core_failed", "expected to finish, but the serving core failed")
            raise

    @property
    def has_work(self) -> bool:
        return len(self._live) > len(self._compiling) or not self._inbox.empty()

    def step(self) -> bool:
        """One step: take in, schedule, run, commit, deliver. False when nothing ran."""
        self._take_in()
        begun = self._clock()
        plan = self._scheduler.schedule()
        if plan is None:
            # Looping over it would burn the thread and answer nobody.
            if len(self._live) > len(self._compiling):
                raise IntegrityError(
                    "requests wait, none runs, and none of them fits an empty pool"
                )
            return False
        self._unchecked = True
        scheduled = self._clock()
        result = self._run_step(plan)
        if result is not None:
            executed = self._clock()
            outcome = self._scheduler.commit(result)
            committed = self._clock()
            self._deliver(outcome, result)
            seconds = {
                "schedule": scheduled - begun,
                "execute": executed - scheduled,
                "commit": committed - executed,
                "deliver": self._clock() - committed,
                **result.seconds,
            }
            self._scheduler.statistics.latencies.stepped(plan.arrays.num_rows, seconds)
        return True

    def run_when_idle(self) -> None:
        """Wait for a message; when none comes soon, check the books first."""
        try:
            message = self._inbox.get(timeout=QUIET_SECONDS)
        except queue.Empty:
            if self._unchecked:
                self.check_integrity()
                self._unchecked = False
            message = self._inbox.get()
        self._receive(message)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pools, tables and prefix cache agree. Between steps only."""
        self._scheduler.check_integrity()

    def _take_in(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._receive(message)

    def _receive(self, message: Message) -> None:
        if isinstance(message, TrackedRequest):
            self._enqueue(message)
        elif isinstance(message, _Reset):
            self._scheduler.reset_prefix_cache()
            message.done()
        elif isinstance(message, Future):
            self._settle_grammar(message)
        elif message is not None:
            if message.request_id in self._live:
                self._remove(self._live[message.request_id], message.reason)
            elif message.request_id in self._unsettled:
                self._count(self._unsettled.pop(message.request_id)[0], message.reason)
            self._cancelled.pop(message.request_id, None)

    def _remove(self, tracked: TrackedRequest, reason: FinishReason) -> None:
        grammar = tracked.request.grammar
        if grammar is not None and grammar in self._compiling:
            del self._compiling[grammar]
            self._arrived(tracked, waits=False)
        else:
            self._scheduler.remove(tracked)
        self._finish(tracked, Delta(NO_TOKENS, tracked.cached_tokens, reason))

    def _arrived(self, tracked: TrackedRequest, waits: bool) -> None:
        """It waits with the scheduler now, or has ended before."""
        with self._arrivals.door:
            self._arrivals.leave(tracked)
            if waits:
                self._scheduler.add(tracked)

    def _enqueue(self, tracked: TrackedRequest) -> None:
        request_id = tracked.request.request_id
        if request_id in self._live:
            self._arrived(tracked, waits=False)
            error = RequestError(
                "duplicate_request_id",
                f"expected a new request id, got {request_id!r}, which is being served",
            )
            self._send(tracked, Delta(NO_TOKENS, 0, FinishReason.ERROR, error))
            return
        self._live[request_id] = tracked
        if tracked.request.grammar is None:
            self._arrived(tracked, waits=True)
            return
        self._compiling[tracked.request.grammar] = tracked
        # Which the future keeps, so it must not lead back to the request, which keeps the future.
        tracked.request.grammar.add_done_callback(self._inbox.put)

    def _settle_grammar(self, grammar: Future[Grammar]) -> None:
        """Queue the request that waited for it, unless it was cancelled meanwhile."""
        tracked = self._compiling.pop(grammar, None)
        if tracked is None:
            return
        problem = grammar.exception()
        self._arrived(tracked, waits=problem is None)
        if problem is not None:
            error = problem if isinstance(problem, RequestError) else None
            error = error or RequestError("internal", f"expected a grammar, but {problem}")
            self._finish(tracked, Delta(NO_TOKENS, 0, FinishReason.ERROR, error))

    def _run_step(self, plan: StepPlan) -> StepResult | None:
        """The executor's result; None when it failed, and then only its requests have ended. One
        that fails again and again raises, which ends the core: somebody else must start anew."""
        try:
            result = self._executor.run(plan)
            self._check_result(plan, result)
        except Exception as problem:
            logger.exception("a step of %d requests failed", plan.arrays.num_requests)
            for tracked in self._scheduler.fail():
                error = RequestError(
                    "executor_failed",
                    f"expected a step to run, but it failed: {problem}; try again",
                )
                self._finish(
                    tracked, Delta(NO_TOKENS, tracked.cached_tokens, FinishReason.ERROR, error)
                )
            self._failed_in_a_row += 1
            if self._failed_in_a_row == MAX_FAILED_STEPS:
                raise
            return None
        self._failed_in_a_row = 0
        return result

    def _check_result(self, plan: StepPlan, result: StepResult) -> None:
        """One token of the vocabulary wherever one was wanted, and drafts of it, or the next step
        reads nonsense."""
        wanted = plan.arrays.wants_logits
        if result.tokens.shape != wanted.shape:
            raise ValueError(f"expected {len(wanted)} tokens, got {result.tokens.shape}")
        tokens = result.tokens[wanted].view(np.uint32)
        if len(tokens) and int(tokens.max()) >= self._limits.vocab_size:
            raise ValueError(
                f"expected token ids from 0 to {self._limits.vocab_size - 1}, got "
                f"{result.tokens[wanted].tolist()}"
            )
        judged = [len(logprobs.chosen) for logprobs in result.prompt_logprobs]
        if judged != [len(piece.targets) for piece in plan.prompt_pieces]:
            raise ValueError(f"expected log probabilities of every prompt piece, got {judged}")
        check_drafts(plan, result, self._limits.vocab_size)

    def _deliver(self, outcome: StepOutcome, result: StepResult) -> None:
        for tracked, judged in outcome.judged:
            self._send(tracked, Delta(NO_TOKENS, tracked.cached_tokens, prompt_logprobs=judged))
        tokens, finished = outcome.tokens, outcome.finished
        logprobs, failures = result.logprobs, result.failures
        ends = [1] * len(tokens) if outcome.counts is None else outcome.counts.tolist()
        for i, tracked in enumerate(outcome.requests):
            delta = Delta(tokens[i, : ends[i]], tracked.cached_tokens, finished.get(i))
            if outcome.num_drafts is not None:
                delta = delta._replace(num_drafts=int(outcome.num_drafts[i]))
            if i in logprobs:
                delta = delta._replace(logprobs=logprobs[i].first(ends[i]))
            if i in failures:
                if i not in finished:
                    self._scheduler.remove(tracked)
                error = RequestError("grammar_exhausted", _exhausted(failures[i]))
                delta = Delta(NO_TOKENS, tracked.cached_tokens, FinishReason.ERROR, error)
            if delta.finish_reason is not None:
                self._finish(tracked, delta)
            else:
                self._send(tracked, delta)

    def _finish(self, tracked: TrackedRequest, last: Delta) -> None:
        """Send the last delta of a request that has left the scheduler."""
        assert last.finish_reason is not None
        request_id = tracked.request.request_id
        del self._live[request_id]
        told = self._cancelled.get(request_id)
        if told is None and tracked.request.receiver_tells_end:
            self._unsettled[request_id] = tracked, last.finish_reason
        else:
            self._count(tracked, told or last.finish_reason)
        self._send(tracked, last)

    def _count(self, tracked: TrackedRequest, reason: FinishReason) -> None:
        statistics = self._scheduler.statistics
        statistics.num_finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            num_output_tokens = tracked.num_tokens - tracked.num_prompt_tokens
            statistics.latencies.answered(
                tracked.moments, tracked.num_prompt_tokens, num_output_tokens
            )

    def _send(self, tracked: TrackedRequest, delta: Delta) -> None:
        """A receiver that raises has lost its stream; it must not take the others with it."""
        try:
            tracked.request.on_delta(delta)
        except Exception:
            request_id = tracked.request.request_id
            logger.exception("the receiver of request %r failed; cancelling it", request_id)
            if delta.finish_reason is None:
                self.cancel(request_id)

    def _end_all(self, code: str, message: str) -> None:
        """Tell everybody who still waits, also in the inbox. The pools are not touched."""
        waiting = list(self._live.values())
        self._live.clear()
        while not self._inbox.empty():
            pending = self._inbox.get()
            if isinstance(pending, _Reset):
                pending.done()
            elif isinstance(pending, TrackedRequest):
                waiting.append(pending)
        for request_id, (tracked, reason) in self._unsettled.items():
            self._count(tracked, self._cancelled.get(request_id, reason))
        for tracked in waiting:
            reason = self._cancelled.get(tracked.request.request_id, FinishReason.ERROR)
            self._scheduler.statistics.num_finished[reason] += 1
            error = RequestError(code, message)
            self._send(tracked, Delta(NO_TOKENS, tracked.cached_tokens, FinishReason.ERROR, error))


def _exhausted(reason: str) -> str:
    return f"expected a guide that can be followed to the end, but {reason}; simplify it"
