"""The core: threads, errors, cancellation, stopping. Real threads, the checking executor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Stream, finish, limits, new_core, serve, tokens

from python_backend.core import EngineCore
from python_backend.executor.simulated import SimulatedExecutor
from python_backend.kv.groups import IntegrityError
from python_backend.request import Delta, FinishReason, Request, RequestError, SamplingParams
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan, StepResult

PATIENCE_S = 30.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.002)


@contextmanager
def running(core: EngineCore) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=core.run)
    thread.start()
    try:
        yield thread
    finally:
        core.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the core did not stop"


class Failing:
    """Fails in chosen steps, otherwise the checking executor."""

    def __init__(self, bounds: CoreLimits, fails_in: set[int]) -> None:
        self.checking = SimulatedExecutor(bounds)
        self.fails_in = fails_in
        self.num_runs = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_runs += 1
        if self.num_runs in self.fails_in:
            raise RuntimeError("the card fell out")
        return self.checking.run(plan)


# -- serving on a thread --------------------------------------------------------------------------


def test_many_threads_ask_and_everybody_is_answered() -> None:
    core = new_core(limits())
    streams = [Stream(str(i), tokens(i, 5 + 7 * i), 20) for i in range(24)]
    with running(core):
        senders = [
            threading.Thread(target=lambda part=part: [core.add_request(s.request) for s in part])
            for part in (streams[:8], streams[8:16], streams[16:])
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        wait_for(lambda: all(stream.finish_reason for stream in streams), "24 streams")
    for stream in streams:
        stream.assert_served()


def test_an_idle_core_sleeps_and_wakes_for_a_request() -> None:
    core = new_core(limits())
    with running(core) as thread:
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        time.sleep(0.3)
        before = time.clock_gettime(clock)
        time.sleep(0.5)
        assert time.clock_gettime(clock) - before < 0.05, "the idle core is busy"
        stream = Stream("a", tokens(1, 40), 5)
        core.add_request(stream.request)
        wait_for(lambda: stream.finish_reason is not None, "the request after the sleep")
    stream.assert_served()


def test_the_books_are_checked_when_idle() -> None:
    """A page that got lost stops the core, and whoever waits is told."""
    core = new_core(limits())
    failure: list[BaseException] = []

    def run() -> None:
        try:
            core.run()
        except IntegrityError as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    stream = Stream("a", tokens(2, 40), 5)
    core.add_request(stream.request)
    finish(core)
    core._unchecked = True
    core._scheduler.residency.window_pages._num_free -= 1
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "window page is lost" in str(failure[0])
    with pytest.raises(RequestError, match="shutting_down"):
        core.add_request(Stream("late", tokens(3, 5), 5).request)


def test_stop_tells_those_who_run_and_those_who_wait() -> None:
    core = new_core(limits(max_batch_size=1, max_seq_len=4096, num_global_pages=300))
    streams = [Stream(str(i), tokens(i, 20), 4000) for i in range(3)]
    with running(core):
        for stream in streams:
            core.add_request(stream.request)
        wait_for(lambda: len(streams[0].deltas) > 3, "the first tokens")
    for stream in streams:
        assert stream.finish_reason is FinishReason.ERROR
        error = stream.deltas[-1].error
        assert error is not None
        assert error.code == "shutting_down"
    with pytest.raises(RequestError, match="shutting_down"):
        core.add_request(Stream("late", tokens(4, 5), 5).request)


# -- cancellation ---------------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_pages_before_the_next_step() -> None:
    core = new_core(limits())
    kept, gone = Stream("kept", tokens(5, 40), 30), Stream("gone", tokens(6, 40), 30)
    core.add_request(kept.request)
    core.add_request(gone.request)
    for _ in range(6):
        core.step()
    used = core.statistics().num_global_pages_used
    core.cancel("gone")
    core.step()
    core.check_integrity()
    assert gone.finish_reason is FinishReason.CANCELLED
    assert gone.output == gone.alone()[: len(gone.output)]
    assert core.statistics().num_global_pages_used == used - 3
    finish(core)
    kept.assert_served()
    assert core.statistics().num_finished[FinishReason.CANCELLED] == 1


def test_a_waiting_request_can_be_cancelled_and_the_queue_moves_on() -> None:
    core = new_core(limits(num_global_pages=12, prefix_cache=False))
    streams = [Stream("a", tokens(7, 60), 30), Stream("b", tokens(8, 150), 3)]
    streams.append(Stream("c", tokens(9, 20), 3))
    for stream in streams:
        core.add_request(stream.request)
    for _ in range(3):
        core.step()
    assert core.statistics().num_waiting == 2  # b does not fit beside a
    core.cancel("b")
    core.step()
    assert streams[1].finish_reason is FinishReason.CANCELLED
    assert core.statistics().num_waiting == 0
    finish(core)
    streams[0].assert_served()
    streams[2].assert_served()


def test_who_is_cancelled_in_the_step_that_ends_it_is_counted_as_cancelled() -> None:
    """Its client was told so while the step ran."""

    class Leaving(SimulatedExecutor):
        def run(self, plan: StepPlan) -> StepResult:
            core.cancel("late", FinishReason.TIMEOUT)
            core.cancel("late")
            return super().run(plan)

    bounds = limits()
    core = EngineCore(Leaving(bounds), bounds)
    late, other = Stream("late", tokens(6, 10), 1), Stream("other", tokens(7, 10), 3)
    core.add_request(late.request)
    serve(core, other)
    other.assert_served()
    statistics = core.statistics()
    assert {reason: n for reason, n in statistics.num_finished.items() if n} == {
        FinishReason.TIMEOUT: 1,
        FinishReason.LENGTH: 1,
    }
    assert statistics.num_global_pages_used == 0


def test_a_receiver_that_sees_more_says_how_its_request_ended() -> None:
    """A stop string comes with the last token of one, and before the failed step of another; of a
    third nothing was said when the server stops."""
    bounds = limits()
    core = EngineCore(Failing(bounds, {4}), bounds)
    streams = [Stream("a", tokens(11, 20), 2), Stream("b", tokens(12, 20), 9)]
    streams.append(Stream("c", tokens(13, 20), 1))
    for stream in streams:
        core.add_request(replace(stream.request, receiver_tells_end=True))
    finish(core)
    reasons = [stream.finish_reason for stream in streams]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert sum(core.statistics().num_finished.values()) == 0
    for key, reason in (("a", FinishReason.STOP), ("b", FinishReason.STOP)):
        core.cancel(key, reason)
        core.cancel(key, FinishReason.ERROR)
    core.step()
    core.stop()
    core.run()
    statistics = core.statistics()
    assert {reason: n for reason, n in statistics.num_finished.items() if n} == {
        FinishReason.STOP: 2,
        FinishReason.LENGTH: 1,
    }
    assert sum(statistics.latencies.end_to_end.numbers) == 3


def test_late_and_unknown_cancels_are_ignored() -> None:
    core = new_core(limits())
    stream = Stream("a", tokens(10, 20), 3)
    serve(core, stream)
    core.cancel("a")
    core.cancel("nobody")
    core.step()
    assert len(stream.deltas) == 3


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_storm_of_cancellations_loses_nothing(data: st.DataObject) -> None:
    """Requests come and are cancelled at any step, running, waiting or preempted."""
    core = new_core(limits(num_global_pages=14, max_batch_size=3))
    streams = [
        Stream(str(i), tokens(i % 3, data.draw(st.integers(1, 90))), data.draw(st.integers(1, 60)))
        for i in range(8)
    ]
    cancelled = data.draw(st.sets(st.integers(0, 7)))
    arrival = [data.draw(st.integers(0, 30)) for _ in streams]
    leave = {i: arrival[i] + data.draw(st.integers(0, 40)) for i in sorted(cancelled)}
    step = 0
    while core.has_work or step <= max(arrival):
        for i, stream in enumerate(streams):
            if arrival[i] == step:
                core.add_request(stream.request)
            if leave.get(i) == step:
                core.cancel(str(i))
        core.step()
        core.check_integrity()
        step += 1
    for i, stream in enumerate(streams):
        if stream.finish_reason is FinishReason.CANCELLED:
            assert i in cancelled
            assert stream.output == stream.alone()[: len(stream.output)]
        else:
            stream.assert_served()
    statistics = core.statistics()
    assert statistics.num_global_pages_used == statistics.num_window_pages_used == 0
    assert sum(statistics.num_finished.values()) == len(streams)


# -- errors ---------------------------------------------------------------------------------------


def test_a_failed_step_ends_only_its_own_requests() -> None:
    bounds = limits(max_batch_size=2)
    core = EngineCore(Failing(bounds, {4}), bounds)
    hit = [Stream("a", tokens(11, 20), 20), Stream("b", tokens(12, 20), 20)]
    spared = Stream("c", tokens(13, 20), 20)
    for stream in (*hit, spared):
        core.add_request(stream.request)
    finish(core)
    for stream in hit:
        assert stream.finish_reason is FinishReason.ERROR
        error = stream.deltas[-1].error
        assert error is not None
        assert error.code == "executor_failed"
        assert "the card fell out" in str(error)
        assert stream.output == stream.alone()[: len(stream.output)]
    spared.assert_served()
    statistics = core.statistics()
    assert statistics.num_failed_steps == 1
    assert statistics.num_finished == {
        FinishReason.STOP: 0,
        FinishReason.LENGTH: 1,
        FinishReason.CANCELLED: 0,
        FinishReason.TIMEOUT: 0,
        FinishReason.ERROR: 2,
    }


def test_a_failed_step_publishes_nothing() -> None:
    """The prompt fits one step; the step fails; the resend must not find its pages."""
    bounds = limits(max_num_tokens=64)
    core = EngineCore(Failing(bounds, {1}), bounds)
    core.add_request(Stream("a", tokens(14, 60), 3).request)
    finish(core)
    again = Stream("b", tokens(14, 60), 3)
    serve(core, again)
    assert again.cached_tokens == 0


@pytest.mark.parametrize("answer", [[-1], [50], [3, 4], []])
def test_an_answer_that_is_no_token_fails_the_step(answer: list[int]) -> None:
    class Wrong:
        def run(self, plan: StepPlan) -> StepResult:
            return StepResult(np.array(answer, dtype=np.int32))

    core = EngineCore(Wrong(), limits())
    stream = Stream("a", tokens(15, 5), 3)
    core.add_request(stream.request)
    finish(core)
    assert stream.finish_reason is FinishReason.ERROR
    assert stream.output == []


def test_a_receiver_that_raises_is_cancelled_alone() -> None:
    core = new_core(limits())
    received: list[Delta] = []

    def receive(delta: Delta) -> None:
        received.append(delta)
        raise ConnectionError("the client is gone")

    sampling = SamplingParams()
    core.add_request(Request("gone", tokens(16, 10), 30, sampling, frozenset(), receive))
    other = Stream("other", tokens(17, 10), 30)
    serve(core, other)
    assert [delta.finish_reason for delta in received] == [None, FinishReason.CANCELLED]
