"""More requests than a core can take, and an executor that fails again and again."""

from __future__ import annotations

import contextlib
import threading

import pytest

from python_backend import wire
from python_backend.arrivals import check_sequences
from python_backend.core import EngineCore
from python_backend.executor.simulated import SimulatedExecutor
from python_backend.request import FinishReason, RequestError
from python_backend.scheduler.scheduler import Scheduler
from python_backend.scheduler.tracked import TrackedRequest
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan, StepResult
from tests.python_backend.serving import Stream, finish, limits, new_core, serve, tokens


class Failing(SimulatedExecutor):
    """Fails in chosen steps."""

    def __init__(self, bounds: CoreLimits, fails_in: set[int]) -> None:
        super().__init__(bounds)
        self.fails_in = fails_in
        self.num_runs = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_runs += 1
        if self.num_runs in self.fails_in:
            raise RuntimeError("the card fell out")
        return super().run(plan)


def refused(core: EngineCore, stream: Stream) -> str:
    with pytest.raises(RequestError) as caught:
        core.add_request(stream.request)
    assert caught.value.code == "queue_full"
    assert not stream.deltas
    return str(caught.value)


def test_a_full_queue_refuses_and_takes_again_when_one_has_left() -> None:
    """One runs, two may wait, wherever they are: in the inbox or in the scheduler's queue."""
    core = new_core(limits(max_batch_size=1, max_queued_requests=2))
    first, second, third, late = (Stream(name, tokens(20, 5), 3) for name in "abcd")
    for stream in (first, second, third):
        core.add_request(stream.request)
    assert "fewer than 2 requests" in refused(core, late)
    core.step()  # the first one runs, the others wait
    refused(core, late)
    core.cancel("b")
    core.step()
    serve(core, late)
    first.assert_served()
    third.assert_served()
    assert second.finish_reason is FinishReason.CANCELLED


def test_tokens_in_the_queue_are_bounded_too_but_an_empty_queue_takes_any_request() -> None:
    """Requests of 30 + 10 tokens; 90 may wait, and 300 wait alone."""
    core = new_core(limits(max_batch_size=1, max_queued_tokens=90))
    large = Stream("large", tokens(21, 280), 20)
    core.add_request(large.request)
    core.step()
    waiting = [Stream(str(i), tokens(i, 30), 10) for i in range(2)]
    for stream in waiting:
        core.add_request(stream.request)
    assert "at most 90 tokens in the queue, got 80 and a request of 40" in refused(
        core, Stream("more", tokens(3, 30), 10)
    )
    finish(core)
    for stream in (large, *waiting):
        stream.assert_served()
    again = Stream("again", tokens(3, 30), 10)
    serve(core, again)


@pytest.mark.parametrize("queue", [{"max_queued_requests": 3}, {"max_queued_tokens": 200}])
@pytest.mark.parametrize("num_sequences", range(1, 9))
def test_sequences_that_an_idle_core_refuses_are_refused_before(
    queue: dict[str, int], num_sequences: int
) -> None:
    """Two places. Three may wait, or 200 tokens where each has 40: who comes before the others run
    is counted among them, so that five may come at once."""
    bounds = limits(max_batch_size=2, **queue)
    core = new_core(bounds)
    refuses = num_sequences > 5
    with pytest.raises(RequestError) if refuses else contextlib.nullcontext() as full:
        for i in range(num_sequences):
            core.add_request(Stream(str(i), tokens(7, 30), 10).request)
    with pytest.raises(RequestError) if refuses else contextlib.nullcontext() as never:
        check_sequences(bounds, num_sequences, 40)
    if full is not None and never is not None:
        assert full.value.code == "queue_full"
        assert wire.to_wire(never.value).code == wire.OVER_CAPACITY


@pytest.mark.parametrize("num_taken_in", range(1, 5))
def test_as_many_as_places_and_queue_hold_may_come_at_any_moment(num_taken_in: int) -> None:
    """Two places and a queue of three. The others come when the core has taken some of the five in
    and schedules none yet: that it looks at its clock before tells when that is."""
    streams = [Stream(str(i), tokens(i, 30), 10) for i in range(5)]
    late = streams[num_taken_in:]

    def clock() -> float:
        while late and core.statistics().num_waiting == num_taken_in:
            core.add_request(late.pop(0).request)
        return 0.0

    bounds = limits(max_batch_size=2, max_queued_requests=3)
    core = EngineCore(SimulatedExecutor(bounds), bounds, clock)
    for stream in streams[:num_taken_in]:
        core.add_request(stream.request)
    core.step()
    assert not late
    refused(core, Stream("sixth", tokens(9, 5), 2))
    finish(core)
    for stream in streams:
        stream.assert_served()


def test_nobody_counts_twice_while_the_core_takes_him_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """One place and a queue of one. The second comes in the middle of the first's taking in."""
    core = new_core(limits(max_batch_size=1, max_queued_requests=1))
    first, second = (Stream(name, tokens(20, 5), 3) for name in "ab")
    problems: list[RequestError] = []

    def come() -> None:
        try:
            core.add_request(second.request)
        except RequestError as problem:
            problems.append(problem)

    comes = threading.Thread(target=come)

    def add(scheduler: Scheduler, tracked: TrackedRequest) -> None:
        taken_in(scheduler, tracked)
        if tracked.request is first.request:
            comes.start()
            comes.join(0.1)  # for as long as it is let in now, or waits at the door

    taken_in = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", add)
    core.add_request(first.request)
    core.step()
    comes.join()
    assert not problems
    finish(core)
    second.assert_served()


def test_preempted_requests_do_not_corrupt_the_count_of_the_queue() -> None:
    core = new_core(limits(num_global_pages=6, prefix_cache=False, max_queued_requests=2))
    streams = [Stream(str(i), tokens(i, 30), 30) for i in range(2)]
    for stream in streams:
        core.add_request(stream.request)
    finish(core)
    assert core.statistics().num_preemptions > 0
    for i in range(4 + 2):
        core.add_request(Stream(f"next {i}", tokens(9, 5), 2).request)
    refused(core, Stream("seventh", tokens(9, 5), 2))
    finish(core)


def test_who_comes_at_once_for_free_places_does_not_queue() -> None:
    """Four places and a queue of one, of requests of 40 tokens where 40 may wait: four of five
    need no queue, though no step has run since they came."""
    core = new_core(limits(max_queued_requests=1, max_queued_tokens=40))
    streams = [Stream(str(i), tokens(i, 30), 10) for i in range(5)]
    for stream in streams:
        core.add_request(stream.request)
    refused(core, Stream("sixth", tokens(9, 5), 2))
    finish(core)
    for stream in streams:
        stream.assert_served()


def test_an_executor_that_fails_three_times_in_a_row_ends_the_core() -> None:
    """A step may fail by chance, one in two even; then the core goes on."""
    bounds = limits(max_batch_size=1)
    core = EngineCore(Failing(bounds, {1, 3, 4, 6, 7}), bounds)
    streams = [Stream(str(i), tokens(i, 5), 1) for i in range(8)]
    for stream in streams:
        core.add_request(stream.request)
    finish(core)
    assert [s.finish_reason for s in streams].count(FinishReason.ERROR) == 5

    core = EngineCore(Failing(bounds, {2, 3, 4}), bounds)
    streams = [Stream(str(i), tokens(i, 5), 1) for i in range(5)]
    for stream in streams:
        core.add_request(stream.request)
    with pytest.raises(RuntimeError, match="the card fell out"):
        core.run()
    codes = [None if s.deltas[-1].error is None else s.deltas[-1].error.code for s in streams]
    assert codes == [None, *["executor_failed"] * 3, "core_failed"]
    with pytest.raises(RequestError, match="shutting_down"):
        core.add_request(Stream("late", tokens(0, 5), 1).request)
