"""Rows of a step where steps shall be short, on machines whose speed is known only here."""

from __future__ import annotations

import pytest

from python_backend.core import EngineCore
from python_backend.executor.simulated import SimulatedExecutor
from python_backend.scheduler.step_budget import StepBudget
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan, StepResult
from tests.python_backend.serving import Stream, finish, limits, tokens


class Machine(SimulatedExecutor):
    """A step takes `start` seconds and `row` for every row of it, by the clock `now`."""

    def __init__(self, bounds: CoreLimits, start: float, row: float) -> None:
        super().__init__(bounds)
        self.now = 0.0
        self.start, self.row = start, row
        self.steps: list[tuple[int, float]] = []  # rows and seconds

    def run(self, plan: StepPlan) -> StepResult:
        num_rows = plan.arrays.num_rows
        seconds = self.start + self.row * num_rows
        self.now += seconds
        self.steps.append((num_rows, seconds))
        return super().run(plan)


def served(start: float, row: float, *streams: Stream) -> list[tuple[int, float]]:
    bounds = limits(max_num_tokens=256, max_batch_size=4, step_seconds=0.5)
    machine = Machine(bounds, start, row)
    core = EngineCore(machine, bounds, clock=lambda: machine.now)
    for stream in streams:
        core.add_request(stream.request)
    finish(core)
    for stream in streams:
        stream.assert_served()
    return machine.steps


def test_steps_grow_to_the_time_that_they_may_take() -> None:
    """From 4 + 2 · 8 rows by doubling, until 0.1 s + 0.01 s a row are half a second: 40 rows."""
    steps = served(0.1, 0.01, Stream("long", tokens(1, 400), 3))
    assert [rows for rows, _ in steps][:4] == [20, 33, 38, 39]
    assert max(seconds for _, seconds in steps) <= 0.51


def test_steps_do_not_shrink_below_what_running_requests_and_a_replay_need() -> None:
    steps = served(1.0, 0.01, *(Stream(str(i), tokens(i, 90), 30) for i in range(4)))
    assert {rows for rows, _ in steps if rows > 4} <= set(range(5, 21))
    assert steps[0] == (20, pytest.approx(1.2))


def test_a_fast_machine_has_steps_of_all_rows() -> None:
    steps = served(0.0, 1e-5, *(Stream(str(i), tokens(i, 400), 1) for i in range(4)))
    assert [rows for rows, _ in steps][:6] == [20, 40, 80, 160, 256, 256]


def test_small_and_slow_steps() -> None:
    """What did not fill the budget says nothing of larger steps, unless it took too long itself."""
    budget = StepBudget(limits(max_num_tokens=256, max_batch_size=4, step_seconds=0.5))
    for _ in range(4):
        budget.ran(budget.rows, 0.01)
    assert budget.rows == 256
    budget.ran(1, 0.3)
    assert budget.rows == 256
    budget.ran(100, 1.0)
    assert budget.rows == 50
    budget.ran(50, 0.4)
    assert budget.rows == 62


def test_without_a_time_every_step_may_have_all_rows() -> None:
    budget = StepBudget(limits(max_num_tokens=256))
    budget.ran(256, 20.0)
    assert budget.rows == 256
