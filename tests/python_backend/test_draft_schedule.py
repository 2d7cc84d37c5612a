"""As many drafts as pay: the choice against all others, and what is learned of steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Stream, limits, serve, tokens

from python_backend.core import EngineCore
from python_backend.drafting.rule import DraftRule
from python_backend.drafting.schedule import DraftSchedule
from python_backend.executor.simulated import SimulatedExecutor
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan, StepResult

CHANCE = st.floats(0, 1, width=32)


def learned(seconds: float, per_row: float, rows: tuple[int, ...] = (1, 7, 30)) -> DraftSchedule:
    schedule = DraftSchedule()
    for num_rows in itertools.islice(itertools.cycle(rows), 60):
        schedule.ran(num_rows, seconds + per_row * num_rows)
    return schedule


# -- the choice -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(*[CHANCE] * 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.integers(0, 9),
    st.floats(0.01, 2),
    st.floats(0, 1),
)
def test_no_other_choice_makes_more_tokens_a_second(
    confidence: list[tuple[float, ...]],
    wanted: list[int],
    budget: int,
    fixed: float,
    per_row: float,
) -> None:
    survival = np.cumprod(np.array(confidence, dtype=np.float32), axis=1)
    most = np.array(wanted[: len(survival)])

    def rate(lengths: tuple[int, ...]) -> float:
        expected = sum(row[:n].sum(dtype=float) for row, n in zip(survival, lengths, strict=True))
        return (len(survival) + expected) / (fixed + per_row * (len(survival) + sum(lengths)))

    chosen = learned(fixed, per_row).worthwhile(survival, most, budget)
    assert (chosen <= most).all()
    assert chosen.sum() <= budget
    choices = itertools.product(*(range(n + 1) for n in most.tolist()))
    best = max(rate(lengths) for lengths in choices if sum(lengths) <= budget)
    assert rate(tuple(chosen.tolist())) == pytest.approx(best, rel=1e-5)


def test_by_hand() -> None:
    """A step of 10 ms and 1 ms a row: two requests make 2 / 12 tokens a millisecond without drafts.
    Drafts of survival 0.9, 0.8 and 0.2 make that 2.9 / 13, 3.7 / 14 and 3.9 / 15, which is less."""
    survival = np.array([[0.9, 0.2], [0.8, 0.1]], dtype=np.float32)
    schedule, two = learned(0.01, 0.001), np.array([2, 2])
    assert schedule.worthwhile(survival, two, 9).tolist() == [1, 1]
    assert schedule.worthwhile(survival, two, 1).tolist() == [1, 0]
    assert schedule.worthwhile(survival, np.array([0, 2]), 9).tolist() == [0, 1]
    assert learned(0.01, 0.0).worthwhile(survival, two, 9).tolist() == [2, 2]
    assert learned(0.0, 0.001).worthwhile(survival, two, 9).tolist() == [0, 0]


def test_where_nothing_is_known_the_likeliest_and_half_of_them_are_tried_in_turn() -> None:
    survival, two = np.array([[0.5, 0.1], [0.9, 0.8]], dtype=np.float32), np.array([2, 2])
    for schedule in (DraftSchedule(), learned(0.01, 0.001, rows=(4,))):
        assert schedule.seconds(np.array([4])) is None
        assert schedule.worthwhile(survival, two, 9).tolist() == [2, 2]
        assert schedule.worthwhile(survival, two, 3).tolist() == [1, 2]
        schedule.ran(4, 0.014)
        assert schedule.worthwhile(survival, two, 9).tolist() == [0, 2]


def test_all_drafts_are_verified_where_nothing_can_be_learned() -> None:
    schedule, survival = DraftSchedule(), np.full((1, 4), 0.5, dtype=np.float32)
    schedule.ran(1, 0.01)
    counts = [int(schedule.worthwhile(survival, np.array([4]), 9)[0]) for _ in range(4)]
    assert counts == [2, 4, 4, 4]


def test_equal_drafts_of_a_request_stay_in_order() -> None:
    ones = np.ones((3, 4), dtype=np.float32)
    chosen = learned(0.01, 0.0).worthwhile(ones, np.array([4, 2, 4]), 7)
    assert chosen.tolist() == [4, 2, 1]


# -- what is learned ------------------------------------------------------------------------------


def test_the_line_is_found_whatever_the_first_steps_were() -> None:
    schedule = DraftSchedule()
    for _ in range(8):
        schedule.ran(1, 30.0)
    for num_rows in itertools.islice(itertools.cycle((2, 12, 20)), 30):
        schedule.ran(num_rows, 0.1 + 0.004 * num_rows)
    found = schedule.seconds(np.array([1, 50]))
    assert found is not None
    assert found == pytest.approx([0.104, 0.3])


def test_a_hiccup_moves_little_and_another_machine_is_noticed() -> None:
    schedule = learned(0.1, 0.004)
    schedule.ran(7, 60.0)  # counts as twice 0.128 s
    after = schedule.seconds(np.array([7]))
    assert after is not None
    assert after[0] == pytest.approx(0.128, rel=0.03)
    for num_rows in itertools.islice(itertools.cycle((1, 7, 30)), 400):
        schedule.ran(num_rows, 0.5 + 0.02 * num_rows)
    slower = schedule.seconds(np.array([1, 30]))
    assert slower is not None
    assert slower == pytest.approx([0.52, 1.1], rel=0.01)


def test_few_rows_are_never_free_however_steep_the_first_steps_were() -> None:
    """By noise 60 rows take half as long again, and 40 little: the line through these is below 0 at
    16 rows. Steps of so many are believed all the same, and soon drafts are verified again."""
    schedule, survival = DraftSchedule(), np.full((16, 5), 0.8, dtype=np.float32)
    for num_rows, seconds in [(60, 0.5), (40, 0.16)] * 6:
        schedule.ran(num_rows, seconds)
    found = schedule.seconds(np.array([16]))
    assert found is not None
    assert found[0] > 0.05
    counts = []
    for _ in range(60):
        num_rows = 16 + int(schedule.worthwhile(survival, np.full(16, 5), 99).sum())
        schedule.ran(num_rows, 0.1 + 0.004 * num_rows)
        counts.append(num_rows)
    assert counts[0] == 16
    assert min(counts[20:]) > 16
    again = schedule.seconds(np.array([16, 60]))
    assert again == pytest.approx([0.164, 0.34], rel=0.3)


def test_what_a_row_costs_is_tried_again_when_it_is_long_known_only() -> None:
    """A first measurement says that rows are dear; later they are cheap. With the same rows in
    every step it is forgotten, and what is tried then tells the new cost."""
    schedule, survival = learned(0.001, 0.1, rows=(1, 6)), np.full((1, 5), 0.9, dtype=np.float32)
    counts = []
    for _ in range(300):
        count = int(schedule.worthwhile(survival, np.array([5]), 99)[0])
        schedule.ran(1 + count, 0.1 + 0.0001 * (1 + count))
        counts.append(count)
    assert counts[0] == 0
    assert counts[-1] == 5


@pytest.mark.parametrize("num_requests", [1, 16, 64])
def test_one_step_is_forgotten_as_soon_with_many_requests_as_with_one(num_requests: int) -> None:
    """One with all drafts seems to take long: none is verified until it is tried again."""
    schedule, most = learned(0.1, 0.0, rows=(num_requests,)), np.full(num_requests, 5)
    survival = np.full((num_requests, 5), 0.9, dtype=np.float32)
    schedule.ran(6 * num_requests, 10.0)
    num_steps = 0
    while not schedule.worthwhile(survival, most, 999).any():
        schedule.ran(num_requests, 0.1)
        num_steps += 1
    assert 70 < num_steps < 90


@pytest.mark.parametrize("num_requests", [1, 16, 64])
def test_a_hiccup_in_the_first_step_that_counts_is_none_for_long(num_requests: int) -> None:
    """It is one of 30 s among such of 10 ms, with all drafts, which therefore seem dear; in a few
    steps they are verified again."""
    schedule, most = DraftSchedule(), np.full(num_requests, 5)
    survival = np.full((num_requests, 5), 0.9, dtype=np.float32)
    counts = []
    for step in range(300):
        num_rows = num_requests + int(schedule.worthwhile(survival, most, 999).sum())
        schedule.ran(num_rows, 30.0 if step == 8 else 0.006 + 0.00005 * num_rows)
        counts.append(num_rows)
    assert counts.count(num_requests) < 150
    assert counts[-1] == 6 * num_requests


# -- in the scheduler -----------------------------------------------------------------------------


class Timed(SimulatedExecutor):
    """Steps that take 100 ms and so many more for each row, on a clock of its own."""

    def __init__(self, bounds: CoreLimits, per_row: float) -> None:
        super().__init__(bounds)
        self.now, self.per_row = 0.0, per_row

    def clock(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> StepResult:
        self.now += 0.1 + self.per_row * plan.arrays.num_rows
        return super().run(plan)


def drafted(bounds: CoreLimits, per_row: float) -> int:
    """Drafts that the scheduler let three requests verify in 3 · 150 tokens."""
    executor = Timed(bounds, per_row)
    core = EngineCore(executor, bounds, clock=executor.clock)
    streams = [Stream(str(i), tokens(i, 10), 150) for i in range(3)]
    serve(core, *streams)
    for stream in streams:
        stream.assert_served()
    return int(core.statistics().num_drafted.sum())


def test_drafts_that_cost_much_are_verified_rarely_and_answers_stay() -> None:
    """Where rows are free nearly all are verified; where they are dear few are, now and then; and
    where the rule is off the cost does not count."""
    bounds = limits(draft=DraftRule(5, 0.0, by_cost=True), max_num_tokens=64)
    free, dear = drafted(bounds, 0.0), drafted(bounds, 1.0)
    every = drafted(replace(bounds, draft=DraftRule(5, 0.0)), 1.0)
    assert 0.8 * every < free < every
    assert 20 < dear < every / 4
