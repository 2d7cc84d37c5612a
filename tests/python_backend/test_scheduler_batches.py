"""On the checking executor: a batch equals its requests alone, and wrong plans are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import VOCAB_SIZE, Driver, Stream, finish, limits, new_core, tokens

from python_backend.executor.simulated import PlanError
from python_backend.replay import ReplayRule
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepResult

# -- a batch equals its requests alone ------------------------------------------------------------


@st.composite
def workloads(draw: st.DrawFn) -> tuple[CoreLimits, list[tuple[int, Stream]]]:
    window = draw(st.sampled_from([2, 5, 8]))
    page_tokens = draw(st.sampled_from([2, 6, 16]))
    exact = draw(st.booleans())
    length = 3 * (window - 1) if exact else draw(st.sampled_from([0, 1, window // 2, window]))
    bounds = limits(
        window=window,
        history_width=draw(st.integers(0, 3)),
        global_page_tokens=page_tokens,
        window_page_tokens=draw(st.sampled_from([1, 2, 3, 8])),
        max_num_tokens=2 * window + draw(st.integers(0, 20)),
        max_batch_size=draw(st.integers(1, 4)),
        num_global_pages=1 + -(-130 // page_tokens) + draw(st.integers(0, 12)),
        replay=ReplayRule(window, length, None if exact else max(length, 1), page_tokens),
        prefix_cache=draw(st.booleans()),
    )
    streams = []
    for i in range(draw(st.integers(1, 7))):
        shared = tokens(draw(st.integers(0, 1)), draw(st.integers(0, 60)))
        own = tokens(100 + i, draw(st.integers(1, 30)))
        stream = Stream(
            str(i),
            np.concatenate([shared, own]),
            draw(st.integers(1, 40)),
            end_ids=frozenset(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2))),
            seed=draw(st.integers(0, 2**64 - 1)),
            use_prefix_cache=draw(st.integers(0, 4)) > 0,
        )
        streams.append((draw(st.integers(0, 60)), stream))
    return bounds, streams


@settings(deadline=None, max_examples=120)
@given(workloads())
def test_a_batch_equals_its_requests_alone(
    workload: tuple[CoreLimits, list[tuple[int, Stream]]],
) -> None:
    """Any arrivals, chunk sizes, page sizes, hits and preemptions; the books are checked after
    every step and the executor checks every plan."""
    bounds, arrivals = workload
    bounds = dataclasses.replace(
        bounds, max_num_tokens=max(bounds.max_num_tokens, bounds.max_batch_size)
    )
    core = new_core(bounds)
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in range(100_000):
        while pending and pending[0][0] <= step:
            core.add_request(pending.pop(0)[1].request)
        if not pending and not core.has_work:
            break
        core.step()
        core.check_integrity()
    for _, stream in arrivals:
        stream.assert_served()
    statistics = core.statistics()
    assert statistics.num_global_pages_used == statistics.num_window_pages_used == 0
    assert statistics.num_failed_steps == 0


# -- the checking executor can fail ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda plan: plan.tables.window_pages.__setitem__((0, 0), 0), "no window page"),
        (lambda plan: plan.tables.window_pages.__setitem__((0, 1), 1), "belongs to two"),
        (lambda plan: plan.tables.global_pages.__setitem__((0, 0), 0), "no global page"),
        (lambda plan: plan.tables.global_pages.__setitem__((0, 1), 1), "shared global page"),
        (lambda plan: plan.arrays.first_position.__setitem__(0, 1), "not at its replay start"),
        (lambda plan: plan.arrays.history.__setitem__((0, 0), 7), "n-gram history"),
    ],
)
def test_the_checking_executor_refuses_a_wrong_plan(damage: object, sentence: str) -> None:
    driver = Driver(limits())
    driver.add(Stream("a", tokens(29, 40), 3))
    plan = driver.plan()
    assert callable(damage)
    damage(plan)
    with pytest.raises(PlanError, match=sentence):
        driver.executor.run(plan)


def test_the_checking_executor_sees_a_window_of_another_life() -> None:
    """A slot that is not announced as fresh continues with the rows of its former owner."""
    driver = Driver(limits(max_batch_size=1))
    driver.add(Stream("a", tokens(30, 20), 1))
    driver.step()
    driver.add(Stream("b", tokens(31, 20), 1))
    plan = driver.plan()
    stale = dataclasses.replace(plan, fresh=np.zeros(1, dtype=bool))
    with pytest.raises(PlanError, match="runs 0 where 20 comes next"):
        driver.executor.run(stale)


def test_a_result_is_booked_once_per_step() -> None:
    driver = Driver(limits())
    driver.add(Stream("a", tokens(32, 5), 3))
    driver.plan()
    with pytest.raises(AssertionError):
        driver.scheduler.schedule()
    driver.scheduler.commit(StepResult(np.array([3], dtype=np.int32)))
    with pytest.raises(AssertionError):
        driver.scheduler.commit(StepResult(np.array([3], dtype=np.int32)))


def test_finish_counts_steps() -> None:
    """40 prompt tokens in chunks of 32 and 8, then 4 more outputs: 6 steps."""
    core = new_core(limits())
    core.add_request(Stream("a", tokens(33, 40), 5).request)
    assert finish(core) == 6
