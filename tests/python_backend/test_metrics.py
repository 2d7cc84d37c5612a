"""Latencies with a clock that the test moves, and what a publisher sends of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.network import Network
from plugins.engram import engram_lookup
from python_backend.core import EngineCore
from python_backend.executor.simulated import SimulatedExecutor
from python_backend.metrics.catalogue import Family, Kind, Snapshot, catalogue
from python_backend.metrics.histogram import Histogram, one_two_five
from python_backend.metrics.latency import PER_TOKEN_EDGES, PHASE_EDGES
from python_backend.metrics.publisher import Publisher
from python_backend.request import FinishReason
from python_backend.scheduler.statistics import Statistics
from python_backend.step_plan import StepPlan, StepResult
from tests.python_backend import real_core
from tests.python_backend.serving import Stream, limits, tokens


def test_a_value_on_an_edge_belongs_below_it() -> None:
    """Prometheus' buckets are "less or equal"."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.numbers, histogram.sums) == ([2, 2, 1], [1.5, 3.5, 2.5])


@given(st.lists(st.floats(0, 100), max_size=40))
def test_many_at_once_are_as_many_one_by_one(values: list[float]) -> None:
    one, all_ = Histogram(PER_TOKEN_EDGES), Histogram(PER_TOKEN_EDGES)
    for value in values:
        one.observe(value)
    all_.observe_all(np.array(values))
    assert one.numbers == all_.numbers
    assert one.sums == pytest.approx(all_.sums)


def test_edges_of_token_numbers() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(99) == [1, 2, 5, 10, 20, 50]


class Clock:
    """One second passes in each step of the executor, nothing elsewhere."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class OneSecondSteps(SimulatedExecutor):
    clock: Clock

    def run(self, plan: StepPlan) -> StepResult:
        self.clock.now += 1.0
        return super().run(plan)


@pytest.fixture
def served() -> tuple[EngineCore, Clock]:
    bounds = limits(max_batch_size=1)
    executor, clock = OneSecondSteps(bounds), Clock()
    executor.clock = clock
    return EngineCore(executor, bounds, clock), clock


def test_latencies_of_two_requests_of_which_one_waits(served: tuple[EngineCore, Clock]) -> None:
    """Prompts of 40 tokens run in two steps of at most 32 rows, each further token in one: the
    first request takes 2 + 3 s, the second waits as long and takes the same."""
    core, clock = served
    for i in range(2):
        core.add_request(Stream(str(i), tokens(i, 40), 4).request)
    clock.now += 0.5
    while core.has_work:
        core.step()
    latencies = core.statistics().latencies

    def seen(name: str) -> tuple[int, float]:
        histogram: Histogram = getattr(latencies, name)
        return sum(histogram.numbers), sum(histogram.sums)

    assert seen("queue") == (2, 0.5 + 5.5)
    assert seen("prefill") == (2, 2.0 + 2.0)
    assert seen("decode") == (2, 3.0 + 3.0)
    assert seen("inference") == (2, 5.0 + 5.0)
    assert seen("end_to_end") == (2, 5.5 + 10.5)
    assert seen("time_to_first_token") == (2, 2.5 + 7.5)
    assert seen("inter_token") == (6, 6.0)
    assert seen("time_per_output_token") == (2, 2.0)
    assert seen("prompt_tokens") == (2, 80.0)
    assert seen("output_tokens") == (2, 8.0)
    assert seen("step_rows") == (10, 2 * (32 + 8 + 3))
    assert sum(latencies.phases["execute"].sums) == 10.0
    # All six gaps of 1 s are in the bucket that ends there.
    assert latencies.inter_token.numbers[PER_TOKEN_EDGES.index(1.0)] == 6


def test_a_preempted_request_keeps_its_moments() -> None:
    """Two requests outgrow five pages; the one that is put back waits between two of its tokens."""
    bounds = limits(num_global_pages=6, prefix_cache=False)
    executor, clock = OneSecondSteps(bounds), Clock()
    executor.clock = clock
    core = EngineCore(executor, bounds, clock)
    streams = [Stream(str(i), tokens(i, 30), 30) for i in range(2)]
    for stream in streams:
        core.add_request(stream.request)
    while core.has_work:
        core.step()
    statistics = core.statistics()
    assert statistics.num_preemptions > 0
    latencies = statistics.latencies
    assert sum(latencies.time_to_first_token.numbers) == 2
    assert sum(latencies.queue.numbers) == 2
    assert sum(latencies.inter_token.numbers) == 2 * 29
    # The gaps of a request add up to its time from the first to the last token.
    assert sum(latencies.inter_token.sums) == pytest.approx(sum(latencies.decode.sums))
    assert max(np.flatnonzero(latencies.inter_token.numbers)) > PER_TOKEN_EDGES.index(1.0)


def test_the_wait_for_engram_rows_is_a_part_of_a_step(
    network64: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two Engram layers whose look-ups take 10 ms each, in four steps."""

    def slow(*operands: Any, **named: Any) -> torch.Tensor:
        time.sleep(0.01)
        return engram_lookup(*operands, **named)

    monkeypatch.setattr("engine.network.engram.engram_lookup", slow)
    core = real_core.core_of(network64, real_core.bounds_of())
    real_core.serve(core, [real_core.stream("one", tokens(0, 20), 4, False, 0)], [0])
    phases = core.statistics().latencies.phases
    waited, forward = sum(phases["engram"].sums), sum(phases["forward"].sums)
    assert sum(phases["engram"].numbers) == sum(phases["forward"].numbers) == 4
    assert 4 * 2 * 0.01 <= waited < forward
    # All of them took 20 ms or somewhat more.
    assert sum(phases["engram"].numbers[: PHASE_EDGES.index(0.01) + 1]) == 0


def test_only_answers_count_as_latencies(served: tuple[EngineCore, Clock]) -> None:
    core, _ = served
    core.add_request(Stream("cancelled", tokens(0, 40), 4).request)
    core.step()
    core.cancel("cancelled")
    core.step()
    statistics = core.statistics()
    assert statistics.num_finished[FinishReason.CANCELLED] == 1
    assert sum(statistics.latencies.end_to_end.numbers) == 0


def test_waiting_requests_name_what_they_wait_for() -> None:
    """The first prompt fills two steps of 32 rows and 4 of 5 pages; the second needs 2."""
    for name, changes in {
        "slots": {"max_batch_size": 1},
        "pages": {"num_global_pages": 6},
        "rows": {},
    }.items():
        bounds = limits(**changes)
        core = EngineCore(SimulatedExecutor(bounds), bounds)
        core.add_request(Stream("first", tokens(0, 64), 16).request)
        core.add_request(Stream("second", tokens(1, 30), 2).request)
        assert core.statistics().waiting_for == ""
        for _ in range(1 if name == "rows" else 3):
            core.step()
        statistics = core.statistics()
        assert (statistics.waiting_for, statistics.num_waiting) == (name, 1)


OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


class Recorded:
    """Stands for the server's metric families, which exist inside a server only; what the server
    makes of the calls is shown by the tests on a real one."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    values: dict[str, list[float]]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str], buckets: Any = None) -> Any:  # noqa: N802
        calls = self.values.setdefault(" ".join([self._name, *labels.values()]), [])
        return type("Metric", (), dict.fromkeys(("increment", "set", "observe"), calls.append))


def publisher(histogram: Histogram) -> tuple[Publisher, list[float]]:
    class Family_(Recorded):  # noqa: N801
        values: dict[str, list[float]] = {}  # noqa: RUF012

    family = Family("seconds", Kind.HISTOGRAM, "", lambda _: {"": histogram.copy()})
    made = Publisher(Family_, [family], lambda: Snapshot(Statistics(), {}, 0))
    made._publish()
    return made, Family_.values["seconds"]


def test_what_is_published_has_the_exact_numbers_and_sum() -> None:
    rng = np.random.default_rng(0)
    histogram, everything = Histogram(PER_TOKEN_EDGES), list[float]()
    made, sent = publisher(histogram)
    for _ in range(5):
        values = rng.exponential(0.3, 200)
        everything += values.tolist()
        histogram.observe_all(values)
        made._publish()
    again = Histogram(PER_TOKEN_EDGES)
    again.observe_all(np.array(sent))
    assert again.numbers == histogram.numbers
    assert sum(sent) == pytest.approx(sum(everything))


def test_a_round_sends_a_bounded_number_and_the_next_ones_the_rest() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe_all(np.full(3_000, 0.5))
    histogram.observe_all(np.full(3_000, 1.5))
    made, sent = publisher(histogram)
    assert len(sent) == 2_000
    made._publish()
    made._publish()
    made._publish()
    assert sorted(sent) == [0.5] * 3_000 + [1.5] * 3_000


def test_a_sum_that_runs_ahead_of_its_number_stays_in_its_bucket() -> None:
    """What a copy in mid-observation looks like."""
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.5)
    histogram.sums[1] += 1.75
    made, sent = publisher(histogram)
    histogram.numbers[1] += 1
    made._publish()
    assert len(sent) == 2
    assert all(1.0 < value <= 2.0 for value in sent)
    assert sum(sent) == pytest.approx(1.5 + 1.75)


def test_the_catalogue_reads_every_family_from_a_core_that_did_nothing() -> None:
    bounds = limits()
    snapshot = Snapshot(EngineCore(SimulatedExecutor(bounds), bounds).statistics(), {"x": 0}, 3)
    names = [family.name for family in catalogue(speculative=True)]
    assert len(set(names)) == len(names)
    for family in catalogue(speculative=False):
        values = family.read(snapshot)
        assert values, family.name
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert f"`{family.name}" in OPERATIONS, family.name
        assert ("" in values) == (family.label == "")
