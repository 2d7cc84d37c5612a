"""Who runs first, who is preempted, and what a reset of the prefix cache leaves."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Driver, Stream, finish, limits, new_core, serve, tokens

from python_backend.core import EngineCore
from python_backend.request import Delta, FinishReason
from python_backend.scheduler.tracked import TrackedRequest
from python_backend.scheduler.waiting import WaitingQueue


def with_priority(name: str, priority: int, length: int = 20, max_tokens: int = 3) -> Stream:
    stream = Stream(name, tokens(len(name), length), max_tokens)
    stream.request = dataclasses.replace(stream.request, priority=priority)
    return stream


def order_of_ends(core: EngineCore, *streams: Stream) -> list[str]:
    ended = list[str]()

    def watch(stream: Stream) -> None:
        def on_delta(delta: Delta) -> None:
            stream.deltas.append(delta)
            if delta.finish_reason is not None:
                ended.append(stream.request.request_id)

        stream.request = dataclasses.replace(stream.request, on_delta=on_delta)

    for stream in streams:
        watch(stream)
    serve(core, *streams)
    return ended


def test_priority_comes_before_arrival() -> None:
    core = new_core(limits(max_batch_size=1))
    running, *others = [
        with_priority("running", 0),
        with_priority("late", 5),
        with_priority("first", 0),
        with_priority("second", 0),
        with_priority("urgent", -1),
    ]
    core.add_request(running.request)
    core.step()
    assert order_of_ends(core, *others) == ["urgent", "first", "second", "late"]


def test_an_urgent_request_passes_one_that_does_not_fit() -> None:
    """Ten pages, eight held: a prompt of four pages waits for them, an urgent one of one page does
    not wait for it."""
    core = new_core(limits(num_global_pages=11, max_num_tokens=256))
    holder = with_priority("holder", 0, length=120, max_tokens=8)
    core.add_request(holder.request)
    core.step()
    large = with_priority("large", 0, length=60)
    core.add_request(large.request)
    core.step()
    assert core.statistics().waiting_for == "pages"
    assert order_of_ends(core, with_priority("urgent", -1, length=10)) == ["urgent"]
    large.assert_served()
    holder.assert_served()


def test_the_lowest_priority_is_preempted() -> None:
    """Two outgrow four pages; the one admitted first has the lower priority and gives way, where
    equal priorities take the one admitted last."""
    for priority, victim in ((1, "a"), (0, "b")):
        bounds = limits(num_global_pages=5, max_num_tokens=64)
        driver = Driver(bounds)
        streams = [with_priority("a", priority, 20, 40), with_priority("b", 0, 21, 40)]
        for stream in streams:
            driver.add(stream)
        while not driver.scheduler.statistics.num_preemptions:
            driver.step()
        head = driver.scheduler._waiting.head
        assert head.request.request_id == victim


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=40))
def test_the_queue_is_a_sorted_list(steps: list[tuple[int, bool]]) -> None:
    """Against a list that is sorted anew each time; a request that was taken may come back."""
    waiting, expected = WaitingQueue(), list[TrackedRequest]()
    taken = list[TrackedRequest]()
    for number, (priority, takes) in enumerate(steps):
        if takes and expected:
            expected.sort(key=lambda t: (t.request.priority, t.arrival))
            assert waiting.head is expected[0]
            taken.append(expected.pop(0))
            waiting.remove(taken[-1])
        elif takes and taken:
            expected.append(taken.pop())
            waiting.add(expected[-1])
        else:
            stream = with_priority(str(number), priority, length=1 + number)
            expected.append(TrackedRequest(stream.request, None))
            waiting.add(expected[-1])
        assert len(waiting) == len(expected)
        assert waiting.num_tokens == sum(t.token_limit for t in expected)


# -- reset of the prefix cache -------------------------------------------------------------------


def test_a_reset_forgets_everything_and_disturbs_nobody() -> None:
    core = new_core(limits())
    prompt, done = tokens(1, 60), list[str]()
    serve(core, Stream("first", prompt, 3))
    running = Stream("running", prompt, 60)
    core.add_request(running.request)
    core.step()
    assert core.statistics().num_published_pages == 3
    core.reset_prefix_cache(lambda: done.append("reset"))
    core.step()
    core.check_integrity()
    assert done == ["reset"]
    assert core.statistics().num_published_pages == 0
    finish(core)
    running.assert_served()
    assert core.statistics().num_published_pages == 0  # what it added continues a forgotten prefix
    again, once_more = Stream("again", prompt, 3), Stream("once more", prompt, 3)
    serve(core, again)
    serve(core, once_more)
    assert (running.cached_tokens, again.cached_tokens, once_more.cached_tokens) == (48, 0, 48)


def test_a_reset_is_answered_also_by_a_core_that_stops() -> None:
    core, done = new_core(limits()), list[str]()
    core.reset_prefix_cache(lambda: done.append("reset"))
    core.stop()
    core.run()
    assert done == ["reset"]


def test_a_reset_and_requests_that_were_preempted() -> None:
    """Who comes back after a reset hits nothing of before, and publishes anew."""
    core = new_core(limits(num_global_pages=7, max_num_tokens=16))
    streams = [Stream(name, tokens(i, 20), 40) for i, name in enumerate("abc")]
    for stream in streams:
        core.add_request(stream.request)
    while not core.statistics().num_preemptions:
        core.step()
    core.reset_prefix_cache(lambda: None)
    finish(core)
    for stream in streams:
        stream.assert_served()
    assert core.statistics().num_finished[FinishReason.LENGTH] == 3
    assert core.statistics().num_published_pages > 0
