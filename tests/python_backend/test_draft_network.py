"""Drafts on the real network in float64: answers, logits and proposals are those without.

The golden model's drafter knows nothing, so its proposals are replaced by partly right ones; what
it proposed itself is compared on its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.network import Network
from engine.network.run import ForwardMode, run_forward
from engine.paged_cache import CachePools
from python_backend.drafting.rule import DraftRule
from python_backend.executor.pools import pools_of
from python_backend.replay import ReplayRule
from python_backend.settings import CoreLimits
from python_backend.step_plan import DraftBlocks, StepPlan
from tests.python_backend.real_core import (
    MAX_ANSWER,
    Alone,
    Drawn,
    RealCore,
    RecordingExecutor,
    assert_same,
    bounds_of,
    cases,
    core_of,
    drawn_sizes,
    serve,
    stream,
)
from tests.python_backend.serving import Stream

BLOCK = 3  # of the golden model
ALL = DraftRule(most=BLOCK, min_survival=0.0)
NONE = DraftRule(most=BLOCK, min_survival=1.0)  # a confidence is below 1: nothing is verified
Answers = dict[int, list[int]]


class Proposing(RecordingExecutor):
    """Keeps what the drafter proposed, by (seed, outputs so far), and proposes `answers` instead,
    by seed: all of them right up to a place that depends on the number of outputs."""

    def __init__(self, network: Network, pools: CachePools, answers: Answers) -> None:
        super().__init__(network, pools)
        self.answers = answers
        self.proposed: dict[tuple[int, int], tuple[list[int], list[float]]] = {}

    def _propose(self, plan: StepPlan, *others: Any) -> DraftBlocks | None:
        blocks = super()._propose(plan, *others)
        if blocks is None:
            return None
        num_accepted: npt.NDArray[np.int64] = others[-1]
        for r in np.flatnonzero(plan.wants_drafts & plan.arrays.wants_logits).tolist():
            seed = int(plan.sampling.seed[r])
            made = int(plan.sampling.output_index[r] + num_accepted[r]) + 1
            found = blocks.tokens[r].tolist(), blocks.confidence[r].tolist()
            assert self.proposed.setdefault((seed, made), found) == found
            if seed in self.answers:
                right = self.answers[seed][made : made + BLOCK]
                wrong_from = (7 * seed + 3 * made) % (BLOCK + 1)
                for k, token in enumerate(right):
                    blocks.tokens[r, k] = token if k < wrong_from else (token + 1) % 512
                blocks.confidence[r] = 1.0
        return blocks


def drafting_core(network: Network, bounds: CoreLimits, answers: Answers) -> RealCore:
    return RealCore(
        Proposing(network, pools_of(network.config, bounds, network.dtype), answers), bounds
    )


def proposals(core: RealCore) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    executor = core._executor
    assert isinstance(executor, Proposing)
    return executor.proposed


def test_drafts_change_no_token_and_no_logit(network64: Network) -> None:
    """Cold, hit, chunked and preempted requests, greedy and sampled, some of them without drafts,
    against the network alone. What the drafter proposes is what it proposes when no draft was ever
    verified or rejected."""
    seen = {"accepted": 0, "rejected": 0, "hit": 0, "compared": 0}

    @settings(cases(14), derandomize=True)  # so that every mix is seen in few cases
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        drawn, sizes = Drawn(data), drawn_sizes(data)
        drawn.max_tokens = [data.draw(st.integers(1, MAX_ANSWER)) for _ in range(drawn.count)]
        hits = data.draw(st.booleans(), label="prefix cache")
        prefix = np.arange(100, 100 + 16 * 2 * hits, dtype=np.int32)
        if hits:
            sizes["global_page_tokens"] = 16
            for i, prompt in enumerate(drawn.prompts):
                prompt[0] = 400 + i
        else:  # the longest fits alone
            page = sizes["global_page_tokens"]
            lengths = map(len, drawn.prompts)
            least = max(-(-(n + m) // page) for n, m in zip(lengths, drawn.max_tokens, strict=True))
            sizes["num_global_pages"] = 1 + least
            sizes["max_batch_size"], drawn.arrivals = drawn.count, [0] * drawn.count
        bounds = bounds_of(prefix_cache=hits, **sizes)
        roomy = bounds_of(
            prefix_cache=hits, max_num_tokens=64, global_page_tokens=sizes["global_page_tokens"]
        )
        primer = stream("primer", np.append(prefix, np.int32(399)), 1, False, 99)

        never = drafting_core(network64, replace(roomy, draft=NONE), {})
        serve(never, [primer_again(primer)], [0])
        answers: Answers = {}
        for i, one in enumerate(drawn.streams(prefix)):
            serve(never, [one], [0])
            answers[i] = one.output
        drafted = drawn.streams(prefix)
        for one in drafted:
            one.request = replace(one.request, speculative=data.draw(st.integers(0, 4)) > 0)
        together = drafting_core(network64, replace(bounds, draft=ALL), answers)
        serve(together, [primer_again(primer)], [0])
        serve(together, drafted, drawn.arrivals)
        alone = Alone(network64, prefix)
        for i, one in enumerate(drafted):
            assert one.cached_tokens == len(prefix)
            assert one.output == answers[i]
            alone.assert_answers(together, one)
        known = proposals(never)
        for key, (tokens, confidence) in proposals(together).items():
            if key in known:  # a request that got far in one step drafts nearer to its end
                assert tokens == known[key][0]
                assert confidence == pytest.approx(known[key][1], abs=1e-6)
                seen["compared"] += key[1] > 1
        statistics = together.statistics()
        seen["accepted"] += int(statistics.num_accepted.sum())
        seen["rejected"] += int((statistics.num_drafted - statistics.num_accepted).sum())
        seen["hit"] += hits

    check()
    assert all(seen.values()), seen


def primer_again(primer: Any) -> Any:
    return stream("primer", primer.request.input_ids, 1, False, 99)


@pytest.mark.parametrize("hit", [0, 16, 48])
@pytest.mark.parametrize("max_num_tokens", [17, 64])
@pytest.mark.parametrize("replay_length", [3, 8])
def test_first_drafts_are_the_references(
    network64: Network, hit: int, max_num_tokens: int, replay_length: int
) -> None:
    """Cold, and after hits: the drafter's context is what bounded replay regenerates, a window or
    less. The reference runs the prompt through a contiguous cache, without pages, chunks or a
    scheduler."""
    prompt = np.random.default_rng(hit).integers(3, 512, 53).astype(np.int32)
    replay = ReplayRule(8, replay_length, replay_length, 16)
    bounds = bounds_of(max_num_tokens=max_num_tokens, replay=replay, draft=ALL)
    core = drafting_core(network64, bounds, {})
    if hit:
        serve(core, [stream("primer", prompt[: hit + 1], 1, False, 99)], [0])
    one = stream("one", prompt, 4, False, 1)
    serve(core, [one], [0])
    assert one.cached_tokens == hit
    reference = run_forward(
        network64, prompt, ForwardMode.BOTH, hit=hit, replay_length=replay_length
    )
    tokens, confidence = proposals(core)[1, 1]
    assert one.output[0] == int(reference["logits"][-1].argmax())
    assert tokens == reference["draft_tokens"].tolist()
    assert confidence == pytest.approx(reference["draft_confidence"].tolist(), abs=1e-6)


@pytest.mark.parametrize("rule", [None, ALL], ids=["plain", "drafted"])
def test_preempted_requests_answer_as_alone(network64: Network, rule: DraftRule | None) -> None:
    """Two requests whose prompts fill 4 of 5 pages and that need 4 pages each in the end."""
    sizes = {"global_page_tokens": 8, "max_batch_size": 2, "max_num_tokens": 64}
    roomy = bounds_of(prefix_cache=False, **sizes)
    small = replace(bounds_of(prefix_cache=False, num_global_pages=6, **sizes), draft=rule)

    def two() -> list[Stream]:
        prompts = (np.arange(7, 23, dtype=np.int32), np.arange(60, 76, dtype=np.int32))
        return [stream(f"r{i}", p, 12, False, seed=i) for i, p in enumerate(prompts)]

    plain, crowded = two(), two()
    alone = core_of(network64, roomy)
    for one in plain:
        serve(alone, [one], [0])
    answers = {i: one.output for i, one in enumerate(plain)}
    together = drafting_core(network64, small, answers) if rule else core_of(network64, small)
    serve(together, crowded, [0, 0])
    assert together.statistics().num_preemptions > 0
    for one, expected in zip(crowded, plain, strict=True):
        assert_same(together, alone, one, expected)


def test_log_probabilities_with_drafts_are_those_without(network64: Network) -> None:
    """Of several requests in one step, one of which asks for none."""
    bounds = bounds_of(prefix_cache=False)
    numbers = [2, None, 3]

    def streams() -> list[Stream]:
        made = []
        for i, number in enumerate(numbers):
            one = stream(f"r{i}", np.arange(5 + 9 * i, 12 + 9 * i, dtype=np.int32), 9, False, i)
            sampling = replace(one.request.sampling, logprobs=number)
            one.request = replace(one.request, sampling=sampling)
            made.append(one)
        return made

    plain, drafted = streams(), streams()
    alone = core_of(network64, bounds)
    for one in plain:
        serve(alone, [one], [0])
    answers = {i: one.output for i, one in enumerate(plain)}
    together = drafting_core(network64, replace(bounds, draft=ALL), answers)
    serve(together, drafted, [0, 0, 0])
    assert together.statistics().num_accepted.sum() > 0
    for one, expected, number in zip(drafted, plain, numbers, strict=True):
        found, wanted = ([d.logprobs for d in s.deltas if d.logprobs] for s in (one, expected))
        if number is None:
            assert found == wanted == []
            continue
        for field in ("chosen", "top_ids", "top"):
            ours, theirs = (
                np.concatenate([getattr(p, field) for p in pieces]) for pieces in (found, wanted)
            )
            assert len(ours) == len(one.output)
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
