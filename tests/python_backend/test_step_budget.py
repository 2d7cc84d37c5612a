"""Rows of a step where steps shall be short, on machines whose speed is known only here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from python_backend.core import EngineCore
from python_backend.executor.simulated import SimulatedExecutor
from python_backend.scheduler.step_budget import StepBudget
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan, StepResult
from tests.python_backend.serving import Stream, finish, limits, tokens


class Step(NamedTuple):
    num_decodes: int
    num_rows: int
    seconds: float


class Machine(SimulatedExecutor):
    """A step takes `start` seconds, `row` for every row of it and `row` once more for every one
    that decodes, by the clock `now`."""

    def __init__(self, bounds: CoreLimits, start: float, row: float) -> None:
        super().__init__(bounds)
        self.now = 0.0
        self.start, self.row = start, row
        self.steps: list[Step] = []

    def run(self, plan: StepPlan) -> StepResult:
        num_rows = plan.arrays.num_rows
        one_row = np.diff(plan.arrays.query_start) == 1
        num_decodes = int((one_row & (plan.arrays.first_position > 0)).sum())
        seconds = self.start + self.row * (num_rows + num_decodes)
        self.now += seconds
        self.steps.append(Step(num_decodes, num_rows, seconds))
        return super().run(plan)


def bounds_of(**changes: int) -> CoreLimits:
    """Windows of 8 rows."""
    return limits(**{"max_num_tokens": 256, "max_batch_size": 4, **changes}, step_seconds=0.5)


def served(bounds: CoreLimits, start: float, row: float, *streams: Stream) -> list[Step]:
    machine = Machine(bounds, start, row)
    core = EngineCore(machine, bounds, clock=lambda: machine.now)
    for stream in streams:
        core.add_request(stream.request)
    finish(core)
    for stream in streams:
        stream.assert_served()
    return machine.steps


def test_steps_grow_to_the_time_that_they_may_take() -> None:
    """From 4 + 2 · 8 rows, at most doubled, to 40: 0.1 s and 0.01 s a row are half a second."""
    steps = served(bounds_of(), 0.1, 0.01, Stream("long", tokens(1, 400), 3))
    assert [step.num_rows for step in steps][:4] == [20, 33, 38, 39]
    assert max(step.seconds for step in steps) <= 0.51


def test_steps_do_not_shrink_below_what_all_places_and_a_replay_need() -> None:
    steps = served(bounds_of(), 1.0, 0.01, Stream("long", tokens(1, 90), 30))
    assert [step.num_rows for step in steps] == [20] * 4 + [10] + [1] * 29


def test_a_fast_machine_has_steps_of_all_rows() -> None:
    streams = (Stream(str(i), tokens(i, 400), 1) for i in range(4))
    steps = served(bounds_of(), 0.0, 1e-5, *streams)
    assert [step.num_rows for step in steps][:6] == [20, 40, 80, 160, 256, 256]


def test_prompts_add_no_more_than_the_time_to_what_decoding_takes() -> None:
    """Three streams decode for 0.114 s a step. Beside them a prompt of 300 rows has half a second,
    26 rows of 0.019 s, and then nobody waits."""
    short = [Stream(str(i), tokens(i, 5), 40) for i in range(3)]
    steps = served(bounds_of(), 0.0, 0.019, *short, Stream("long", tokens(9, 300), 2))
    beside = [step for step in steps if step.num_decodes == 3 and step.num_rows > 3][1:-1]
    assert {step.num_rows for step in beside} == {29}
    assert len(beside) == 10
    assert max(step.seconds for step in beside) == pytest.approx(0.608)


def test_who_waits_is_given_as_long_as_decoding_takes() -> None:
    """48 places, three times as many requests of 30 + 12 tokens, 0.02 s a row. A full house decodes
    for 1.9 s. The least, 64 rows in all, would admit 18 of 30 rows in twelve steps, with 46 rows
    left to prompts. As much time as the others decode fills most places."""
    bounds = bounds_of(max_batch_size=48, num_global_pages=400)
    steps = served(bounds, 0.0, 0.02, *(Stream(str(i), tokens(i, 30), 12) for i in range(144)))
    assert max(step.num_decodes for step in steps) >= 24
    for step in steps:
        assert step.num_rows <= 64 or step.seconds <= 0.52 + 2 * 0.04 * step.num_decodes


def test_rows_beside_those_that_decode() -> None:
    """For each pair of one that decodes and one that waits two more; in all, 4 + 2 · 8 at least."""
    budget = StepBudget(bounds_of())
    assert budget.rows(0, 9) == budget.rows(3, 0) == 20
    budget.ran(0, 20, 0.5)
    assert budget.rows(0, 9) == 20
    assert budget.rows(3, 0) == 23
    assert budget.rows(3, 2) == 27
    assert budget.rows(3, 9) == 29
    assert budget.rows(100, 100) == 256


def test_small_and_slow_steps() -> None:
    """What did not fill the budget says nothing of larger steps, unless it took too long itself."""
    budget = StepBudget(bounds_of())
    for _ in range(4):
        budget.ran(0, budget.rows(0, 0), 0.01)
    assert budget.rows(0, 0) == 256
    budget.ran(0, 1, 0.3)
    budget.ran(50, 50, 2.0)  # nothing of that were prompts
    assert budget.rows(0, 0) == 256
    budget.ran(0, 100, 1.0)
    assert budget.rows(0, 0) == 50
    budget.ran(0, 50, 0.4)
    assert budget.rows(0, 0) == 62
    budget.ran(20, 80, 2.0)  # 60 rows of prompts and 20 that count twice: 1.2 s were the prompts'
    assert budget.rows(0, 0) == 25


def test_without_a_time_every_step_may_have_all_rows() -> None:
    budget = StepBudget(limits(max_num_tokens=256))
    budget.ran(0, 256, 20.0)
    assert budget.rows(0, 0) == budget.rows(7, 9) == 256
