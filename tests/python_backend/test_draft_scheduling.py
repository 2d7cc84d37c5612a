"""Drafts on the checking executor: a batch with drafts equals its requests alone without."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import VOCAB_SIZE, Driver, Stream, finish, limits, new_core, serve, tokens
from test_scheduler_batches import workloads

from python_backend.core import EngineCore
from python_backend.drafting.rule import DraftRule, granted
from python_backend.drafting.verification import verify
from python_backend.executor.simulated import PlanError, SimulatedExecutor
from python_backend.request import FinishReason
from python_backend.settings import CoreLimits
from python_backend.step_plan import DraftBlocks, StepPlan, StepResult

ALL = DraftRule(most=5, min_survival=0.0)
Workload = tuple[CoreLimits, list[tuple[int, Stream]]]


def assert_no_trace(core: EngineCore) -> None:
    """No page of a window lies wholly above a slot's last final row."""
    table, pages = core._scheduler._slots, core._scheduler.residency.window_pages
    running = core._scheduler._running
    beyond = pages._next[running] - -(-table.num_processed[running] // pages.group.page_tokens)
    assert (beyond <= 0).all()


# -- equal to no drafts ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(workloads(), st.integers(1, 6), st.sampled_from([0.0, 0.2, 0.9]), st.data())
def test_a_batch_with_drafts_equals_its_requests_alone(
    workload: Workload, most: int, min_survival: float, data: st.DataObject
) -> None:
    """Any mix of cold, hit, chunked and preempted requests that draft or not, sampled by seed, with
    end ids and cancellations, and steps of any length if drafts are verified by their cost; the
    books are checked after every step, the executor checks every plan, and `Stream.alone` knows no
    drafts."""
    bounds, arrivals = workload
    rows = max(bounds.max_num_tokens, bounds.max_batch_size)
    rule = DraftRule(most, min_survival, by_cost=data.draw(st.booleans()))
    bounds = dataclasses.replace(bounds, max_num_tokens=rows, draft=rule)
    gaps = np.random.default_rng(data.draw(st.integers(0, 9))).exponential(0.1, 999)
    clock = itertools.accumulate(itertools.cycle(gaps)).__next__
    for _, stream in arrivals:
        drafting = data.draw(st.integers(0, 3)) > 0
        stream.request = dataclasses.replace(stream.request, speculative=drafting)
    leaving = {
        i: arrival + data.draw(st.integers(0, 20))
        for i, (arrival, _) in enumerate(arrivals)
        if data.draw(st.integers(0, 5)) == 0
    }
    core = EngineCore(SimulatedExecutor(bounds), bounds, clock=clock)
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in range(100_000):
        while pending and pending[0][0] <= step:
            core.add_request(pending.pop(0)[1].request)
        for i, when in leaving.items():
            if when == step:
                core.cancel(arrivals[i][1].request.request_id)
        if not pending and not core.has_work:
            break
        core.step()
        core.check_integrity()
        assert_no_trace(core)
    for i, (_, stream) in enumerate(arrivals):
        if stream.finish_reason is FinishReason.CANCELLED:
            assert i in leaving
            assert stream.output == stream.alone()[: len(stream.output)]
        else:
            stream.assert_served()
    statistics = core.statistics()
    assert statistics.num_global_pages_used == statistics.num_window_pages_used == 0
    assert statistics.num_failed_steps == 0
    assert (statistics.num_accepted <= statistics.num_drafted).all()


def test_two_of_three_drafts_are_right_and_save_steps() -> None:
    """The simulated drafter errs once in three: of the drafts at place k about (2/3)^k stay, and a
    step makes 1 + Σ (2/3)^k = 2.7 tokens."""
    core = new_core(limits(draft=ALL))
    stream = Stream("a", tokens(1, 40), 400)
    num_steps = serve(core, stream)
    statistics = core.statistics()
    shares = statistics.num_accepted / statistics.num_drafted
    assert np.abs(shares - (2 / 3) ** np.arange(1, 6)).max() < 0.12
    assert num_steps < 400 / 2.2
    assert 1 + statistics.num_verifications + statistics.num_accepted.sum() + _plain(core) == 400


def _plain(core: EngineCore) -> int:
    """Decode steps without drafts: their tokens are neither accepted nor behind drafts."""
    statistics = core.statistics()
    return statistics.num_steps - 2 - statistics.num_verifications  # 40 tokens are two chunks


class Stubborn(SimulatedExecutor):
    """Replaces every draft."""

    def __init__(self, bounds: CoreLimits, draft: int) -> None:
        super().__init__(bounds)
        self.draft = draft

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        assert result.drafts is not None
        drafts = np.full_like(result.drafts.tokens, self.draft)
        blocks = DraftBlocks(drafts, result.drafts.confidence)
        return StepResult(result.tokens, result.num_accepted, blocks)


def test_drafts_that_are_always_wrong_cost_rows_but_no_step() -> None:
    """20 tokens after a prompt of 20: one prompt step and 19 decode rows, whatever was drafted."""
    bounds = limits(draft=ALL)
    prompts = (tokens(seed, 20) for seed in range(50))
    prompt = next(p for p in prompts if 0 not in Stream("a", p, 20).alone())
    core = EngineCore(Stubborn(bounds, 0), bounds)
    assert serve(core, Stream("a", prompt, 20)) == 20
    statistics = core.statistics()
    assert statistics.num_accepted.tolist() == [0] * 5
    # Behind output n of 20 there is room for 20 − n − 1 drafts: 5 until output 14, then 4, 3, 2, 1.
    assert statistics.num_drafted.tolist() == [18, 17, 16, 15, 14]
    assert statistics.num_rows == 20 + 19 + 80


# -- what drafts may take -------------------------------------------------------------------------


def counts(plan: StepPlan) -> list[int]:
    return np.diff(plan.arrays.query_start).tolist()


def test_drafts_share_the_budget_with_prompts_that_wait() -> None:
    """16 rows a step, two decoders: 14 rows are left, and a waiting prompt gets half of them."""
    driver = Driver(limits(max_num_tokens=16, draft=ALL))
    for i in range(2):
        driver.add(Stream(str(i), tokens(i, 3), 60))
    driver.step()
    assert counts(driver.step()) == [6, 6]
    driver.add(Stream("long", tokens(9, 200), 2))
    assert counts(driver.step()) == [6, 3, 7]
    assert counts(driver.step()) == [6, 3, 7]


def test_drafts_never_take_a_page_that_a_token_needs() -> None:
    """Two requests of 40 + 8 tokens fill the 6 pages of 16 tokens: drafts get what those hold."""
    bounds = limits(num_global_pages=7, prefix_cache=False, draft=ALL)
    driver = Driver(bounds)
    streams = [Stream(str(i), tokens(i, 40), 9) for i in range(2)]
    for stream in streams:
        driver.add(stream)
    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        driver.step()
    assert driver.scheduler.statistics.num_preemptions == 0
    assert driver.scheduler.statistics.num_drafted.sum() > 0


def test_drafts_use_the_pages_that_are_left() -> None:
    """15 tokens and the first output fill a page of 16; with a free page 5 drafts are verified
    behind it, without one none."""
    for num_global_pages, drafts in ((4, 5), (3, 0)):
        driver = Driver(limits(num_global_pages=num_global_pages, draft=ALL, max_num_tokens=64))
        driver.add(Stream("other", tokens(8, 10), 1 if num_global_pages == 4 else 7))
        driver.add(Stream("a", tokens(3, 15), 12))
        driver.step()
        plan = driver.step()
        assert plan.num_drafts[-1] == drafts


def test_preemption_drops_drafts_and_the_answer_stays() -> None:
    core = new_core(limits(num_global_pages=9, draft=ALL))
    serve(core, Stream("a", tokens(20, 50), 40), Stream("b", tokens(21, 50), 40))
    assert core.statistics().num_preemptions >= 1


def test_an_end_id_among_accepted_drafts_cuts_them() -> None:
    """What follows it is delivered to nobody and published to nobody."""
    bounds = limits(draft=DraftRule(5, 0.0), global_page_tokens=4, max_num_tokens=64)
    prompt, cut = tokens(5, 30), 0
    answer = Stream("whole", prompt, 60).alone()
    for at in range(1, 40):
        if answer.index(answer[at]) != at:
            continue
        core = new_core(bounds)
        stream = Stream("ends", prompt, 60, end_ids=frozenset({answer[at]}))
        serve(core, stream)
        assert stream.output == answer[: at + 1]
        last, statistics = stream.deltas[-1], core.statistics()
        is_cut = 1 + int(statistics.num_accepted.sum()) + statistics.num_verifications > at + 1
        cut += is_cut
        # Every step ends with a choice of its own, but the one whose drafts were cut.
        chosen = sum(len(delta.output_ids) > 0 for delta in stream.deltas) - is_cut
        assert sum(delta.num_drafts for delta in stream.deltas) == at + 1 - chosen
        assert last.finish_reason is FinishReason.STOP
        # Rows of the prompt and of all outputs but the last were run: full pages of them are there.
        again = Stream("again", np.append(prompt, np.array(answer, dtype=np.int32)), 1)
        serve(core, again)
        assert again.cached_tokens == (30 + at) // 4 * 4
    assert cut > 3, "no block was cut, so nothing was shown"


def test_the_last_tokens_draft_no_further_than_the_limit() -> None:
    """5 tokens to make: the first step makes one, drafts for 3 more and the choice behind them."""
    driver = Driver(limits(draft=ALL))
    driver.add(Stream("a", tokens(3, 10), 5))
    assert driver.step().num_drafts.tolist() == [0]
    assert driver.step().num_drafts.tolist() == [3]
    short = Driver(limits(draft=ALL))
    short.add(Stream("b", tokens(3, 10), 2))
    assert short.step().wants_drafts.tolist() == [False]
    assert short.step().num_drafts.tolist() == [0]


def test_a_request_without_drafts_decodes_among_those_with() -> None:
    driver = Driver(limits(draft=ALL))
    for i, speculative in enumerate((True, False)):
        stream = Stream(str(i), tokens(i, 8), 30)
        stream.request = dataclasses.replace(stream.request, speculative=speculative)
        driver.add(stream)
    driver.step()
    plan = driver.step()
    assert plan.num_drafts.tolist() == [5, 0]
    assert plan.wants_drafts.tolist() == [True, False]
    assert plan.arrays.tokens.shape == (7,)


def test_cancelled_between_draft_and_verification() -> None:
    core = new_core(limits(draft=ALL))
    gone, kept = Stream("gone", tokens(6, 40), 30), Stream("kept", tokens(7, 40), 30)
    core.add_request(gone.request)
    core.add_request(kept.request)
    while not gone.deltas:
        core.step()
    assert core._scheduler._slots.num_drafts.max() == 5
    core.cancel("gone")
    core.step()
    core.check_integrity()
    assert gone.finish_reason is FinishReason.CANCELLED
    assert gone.output == gone.alone()[: len(gone.output)]
    finish(core)
    kept.assert_served()
    newcomer = Stream("newcomer", tokens(8, 40), 30)  # gets the slot, not the drafts in it
    serve(core, newcomer)


# -- the rules by hand ----------------------------------------------------------------------------


def test_survival_is_the_product_of_confidences() -> None:
    """0.9 · 0.8 · 0.5 · 0.9 = 0.9, 0.72, 0.36, 0.324."""

    def length(rule: DraftRule, room: int = 9) -> int:
        return int(rule.lengths(rule.survival(confidence), np.array([room]))[0])

    confidence = np.array([[0.9, 0.8, 0.5, 0.9]], dtype=np.float32)
    for least, expected in ((0.0, 4), (0.3, 4), (0.33, 3), (0.5, 2), (0.75, 1), (0.95, 0)):
        assert length(DraftRule(4, least)) == expected
    assert length(DraftRule(2, 0.0)) == 2
    assert length(DraftRule(4, 0.0), room=3) == 3
    confidence[0, 1] = np.nan
    assert length(DraftRule(4, 0.0)) == 1


@pytest.mark.parametrize(("most", "least"), [(0, 0.5), (-1, 0.5), (3, -0.1), (3, 1.1)])
def test_a_rule_that_cannot_work_is_refused(most: int, least: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        DraftRule(most, least)


def test_budget_is_granted_first_come_first_served() -> None:
    assert granted(np.array([5, 0, 5, 5]), 8).tolist() == [5, 0, 3, 0]
    assert granted(np.array([5, 5]), 0).tolist() == [0, 0]


def test_drafts_stay_up_to_the_first_that_was_not_chosen() -> None:
    """Three requests with 3, 0 and 2 drafts: choices 1 2 9 4 | 5 | 6 7 8."""
    choices = np.array([1, 2, 9, 4, 5, 6, 7, 8], dtype=np.int32)
    drafts = np.array([1, 2, 3, 6, 7], dtype=np.int32)
    verified = verify(choices, drafts, np.array([3, 0, 2]))
    assert verified.num_accepted.tolist() == [2, 0, 2]
    assert verified.tokens.tolist() == [9, 5, 8]
    # A draft behind a wrong one does not stay, though the choice behind it agrees.
    verified = verify(np.array([1, 2, 3], np.int32), np.array([0, 2], np.int32), np.array([2]))
    assert (verified.num_accepted.tolist(), verified.tokens.tolist()) == ([0], [1])


# -- wrong executors, and an executor that notices ------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "drafts", "sentence"),
    [
        (6, 3, "at most"),
        (-1, 3, "at most"),
        (0, VOCAB_SIZE, "drafts from 0 to 49"),
        (0, -1, "drafts from 0 to 49"),
    ],
)
def test_an_answer_about_drafts_that_cannot_be_fails_the_step(
    accepted: int, drafts: int, sentence: str
) -> None:
    class Wrong:
        def run(self, plan: StepPlan) -> StepResult:
            blocks = DraftBlocks(
                np.full((1, 5), drafts, np.int32), np.ones((1, 5), dtype=np.float32)
            )
            return StepResult(np.array([1], np.int32), np.array([accepted]), blocks)

    core = EngineCore(Wrong(), limits(draft=ALL))
    stream = Stream("a", tokens(1, 5), 9)
    core.add_request(stream.request)
    finish(core)
    assert stream.finish_reason is FinishReason.ERROR
    assert sentence in str(stream.deltas[-1].error)


def test_the_checking_executor_sees_context_of_rows_that_are_not_final() -> None:
    """A request that wants drafts after a step in which it did not has gaps in its context."""
    driver = Driver(limits(draft=ALL))
    stream = Stream("a", tokens(2, 20), 30)
    stream.request = dataclasses.replace(stream.request, speculative=False)
    driver.add(stream)
    driver.step()
    plan = driver.plan()
    wants = dataclasses.replace(plan, wants_drafts=np.ones(1, dtype=bool))
    with pytest.raises(PlanError, match="drafts from a row that is not final"):
        driver.executor.run(wants)


def test_the_checking_executor_refuses_drafts_alone() -> None:
    driver = Driver(limits(draft=ALL))
    driver.add(Stream("a", tokens(2, 20), 30))
    driver.step()
    plan = driver.plan()
    only = dataclasses.replace(plan, num_drafts=np.array([6]))
    with pytest.raises(PlanError, match="no row but drafts"):
        driver.executor.run(only)
