"""Replay plans against the rules of bounded replay, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.replay import (
    ReplayPlan,
    ReplayRule,
    first_live,
    longest_hit,
    plan_replay,
)

RELEASED = ReplayRule(window=128, replay_length=128, decoder_tail=128, global_page_tokens=256)


@pytest.mark.parametrize(("position", "expected"), [(0, 0), (1, 0), (127, 0), (128, 1), (255, 128)])
def test_first_live_row(position: int, expected: int) -> None:
    assert first_live(position, 128) == expected


def test_first_live_row_of_many_positions() -> None:
    positions = np.array([0, 7, 8, 100], dtype=np.int64)
    assert first_live(positions, 8).tolist() == [0, 0, 1, 93]


def test_cold_request_runs_everything_and_trims_the_decoder() -> None:
    plan = plan_replay(RELEASED, num_tokens=1000, num_prompt_tokens=1000, hit=0)
    assert plan == ReplayPlan(
        hit=0, replay_start=0, encoder_floor=0, decoder_floor=872, write_floor=0, num_replayed=0
    )


def test_hit_replays_one_window() -> None:
    plan = plan_replay(RELEASED, num_tokens=1000, num_prompt_tokens=1000, hit=512)
    assert plan == ReplayPlan(
        hit=512,
        replay_start=384,
        encoder_floor=384,
        decoder_floor=872,
        write_floor=512,
        num_replayed=128,
    )


def test_short_suffix_cannot_start_the_decoder_below_the_replay() -> None:
    """N − H < W: the decoder's tail reaches into replayed rows, never below the first of them."""
    plan = plan_replay(RELEASED, num_tokens=513, num_prompt_tokens=513, hit=512)
    assert (plan.replay_start, plan.decoder_floor) == (384, 385)


def test_preemption_keeps_the_decoder_floor_of_the_original_prompt() -> None:
    """A resume knows prompt + outputs; without a hit all floors are those of the first life."""
    before = plan_replay(RELEASED, num_tokens=700, num_prompt_tokens=700, hit=0)
    after = plan_replay(RELEASED, num_tokens=900, num_prompt_tokens=700, hit=0)
    assert before == after
    resumed = plan_replay(RELEASED, num_tokens=1100, num_prompt_tokens=700, hit=1024)
    assert (resumed.replay_start, resumed.decoder_floor) == (896, 896)


def test_exact_mode_replays_every_layer_and_trims_nothing() -> None:
    """40 layers · 127 rows = 5,080; the decoder runs every row that runs at all."""
    rule = ReplayRule(window=128, replay_length=5080, decoder_tail=None, global_page_tokens=256)
    plan = plan_replay(rule, num_tokens=10_000, num_prompt_tokens=10_000, hit=8192)
    assert (plan.replay_start, plan.encoder_floor, plan.decoder_floor) == (3112, 3112, 3112)
    assert (plan.write_floor, plan.num_replayed) == (8192, 5080)
    cold = plan_replay(rule, num_tokens=10_000, num_prompt_tokens=10_000, hit=4864)
    assert (cold.hit, cold.decoder_floor) == (0, 0)


@settings(deadline=None)
@given(
    window=st.integers(1, 64),
    length=st.integers(0, 256),
    page_tokens=st.integers(1, 64),
    num_prompt_tokens=st.integers(1, 1000),
    num_outputs=st.integers(0, 100),
    data=st.data(),
)
def test_any_plan_keeps_the_rules(
    window: int,
    length: int,
    page_tokens: int,
    num_prompt_tokens: int,
    num_outputs: int,
    data: st.DataObject,
) -> None:
    tail = max(length, 1)
    rule = ReplayRule(window, length, tail, page_tokens)
    num_tokens = num_prompt_tokens + num_outputs
    found = page_tokens * data.draw(st.integers(0, (num_tokens - 1) // page_tokens))
    plan = plan_replay(rule, num_tokens=num_tokens, num_prompt_tokens=num_prompt_tokens, hit=found)
    assert plan.hit == (found if found > length else 0)
    assert plan.replay_start == plan.encoder_floor == plan.hit - plan.num_replayed >= 0
    assert plan.write_floor == plan.hit < num_tokens
    assert plan.decoder_floor == max(plan.replay_start, num_prompt_tokens - tail)
    assert plan.decoder_floor < num_tokens  # the row that makes the next token runs
    if length >= window:
        # Decoding never touches a floor: the window of the first output starts at or above both.
        assert max(plan.encoder_floor, plan.decoder_floor) <= max(0, num_tokens - window)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (256, 0), (257, 256), (512, 256), (513, 512)]
)
def test_longest_hit_leaves_one_token(num_tokens: int, expected: int) -> None:
    assert longest_hit(num_tokens, 256) == expected


@pytest.mark.parametrize("hit", [100, 1024, -256])
def test_impossible_hits_are_refused(hit: int) -> None:
    with pytest.raises(ValueError, match="whole pages of 256 tokens, at most 768 of 1000"):
        plan_replay(RELEASED, num_tokens=1000, num_prompt_tokens=1000, hit=hit)


@pytest.mark.parametrize(("length", "start"), [(0, 512), (32, 480), (127, 385)])
def test_replays_shorter_than_a_window(length: int, start: int) -> None:
    rule = ReplayRule(128, length, max(length, 1), 256)
    plan = plan_replay(rule, num_tokens=1000, num_prompt_tokens=1000, hit=512)
    assert (plan.hit, plan.num_replayed) == (512, length)
    assert plan.replay_start == plan.encoder_floor == start
    assert plan.decoder_floor == 1000 - max(length, 1)


def test_rules_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="replay of at least 0 rows, got -1"):
        ReplayRule(window=128, replay_length=-1, decoder_tail=128, global_page_tokens=256)
    with pytest.raises(ValueError, match="decoder tail of at least 1 row, got 0"):
        ReplayRule(window=128, replay_length=0, decoder_tail=0, global_page_tokens=256)
    with pytest.raises(ValueError, match="at least one token, got 0"):
        ReplayRule(window=0, replay_length=0, decoder_tail=0, global_page_tokens=256)
