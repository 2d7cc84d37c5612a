"""Scheduling: order, budget, admission, preemption."""

from __future__ import annotations

import numpy as np
import pytest
from serving import VOCAB_SIZE, Driver, Stream, limits, new_core, serve, tokens

from python_backend.request import FinishReason, RequestError
from python_backend.step_plan import StepPlan


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(slot, first position, number of rows) of each request of a step."""
    counts = np.diff(plan.arrays.query_start).tolist()
    return list(zip(plan.slots.tolist(), plan.arrays.first_position.tolist(), counts, strict=True))


# -- one request ----------------------------------------------------------------------------------


def test_a_prompt_is_cut_into_chunks_and_then_decodes() -> None:
    driver = Driver(limits())
    prompt = tokens(1, 70)
    driver.add(Stream("a", prompt, 5))
    plans = [driver.step() for _ in range(4)]
    assert [rows(plan) for plan in plans] == [
        [(0, 0, 32)],
        [(0, 32, 32)],
        [(0, 64, 6)],
        [(0, 70, 1)],
    ]
    assert [plan.arrays.wants_logits.tolist() for plan in plans] == [[False]] * 2 + [[True]] * 2
    assert [plan.fresh.tolist() for plan in plans] == [[True], [False], [False], [False]]
    assert np.concatenate([plan.arrays.tokens for plan in plans[:3]]).tolist() == prompt.tolist()
    assert [plan.sampling.output_index.tolist() for plan in plans] == [[0], [0], [0], [1]]


def test_history_is_the_true_tokens_before_the_first_row() -> None:
    driver = Driver(limits())
    prompt = tokens(2, 40)
    driver.add(Stream("a", prompt, 5))
    first, second, third = (driver.step().arrays for _ in range(3))
    assert first.history.tolist() == [[-1, -1, -1]]
    assert second.history.tolist() == [prompt[29:32].tolist()]
    assert third.history.tolist() == [prompt[37:40].tolist()]

    short = Driver(limits())
    short.add(Stream("a", tokens(3, 1), 5))
    steps = [short.step().arrays for _ in range(4)]
    inputs = [int(arrays.tokens[0]) for arrays in steps]
    assert [arrays.history[0].tolist() for arrays in steps] == [
        [-1, -1, -1],
        [-1, -1, inputs[0]],
        [-1, inputs[0], inputs[1]],
        inputs[:3],
    ]


def test_floors_follow_the_hit_and_never_change() -> None:
    """Window 8: a hit of 48 replays from 40; the decoder starts 8 rows before the prompt's end."""
    bounds = limits(max_num_tokens=16)
    driver = Driver(bounds)
    prompt = tokens(4, 61)
    for name in ("cold", "hit"):
        driver.add(Stream(name, prompt, 3))
        plans = []
        while driver.scheduler.num_running + driver.scheduler.num_waiting:
            plans.append(driver.step())
        start, write_floor = (0, 0) if name == "cold" else (40, 48)
        for plan in plans:
            assert plan.arrays.encoder_floor.tolist() == [start]
            assert plan.arrays.decoder_floor.tolist() == [53]
            assert plan.arrays.write_floor.tolist() == [write_floor]
        assert plans[0].arrays.first_position.tolist() == [start]


def test_rows_are_counted_as_replayed_and_trimmed() -> None:
    core = new_core(limits())
    prompt = tokens(5, 61)
    serve(core, Stream("cold", prompt, 3))
    assert core.statistics().num_trimmed_rows == 53
    hit = Stream("hit", prompt, 3)
    serve(core, hit)
    statistics = core.statistics()
    assert hit.cached_tokens == 48
    assert statistics.num_cached_tokens == 48
    assert statistics.num_replayed_rows == 8
    assert statistics.num_trimmed_rows == 53 + (53 - 40)
    assert statistics.num_rows == (61 + 2) + (61 - 40 + 2)
    assert (statistics.num_prompt_tokens, statistics.num_output_tokens) == (122, 6)


@pytest.mark.parametrize("end_at", [0, 1, 6])
def test_a_request_ends_with_its_end_token(end_at: int) -> None:
    core = new_core(limits())
    free = Stream("free", tokens(6, 20), 7)
    serve(core, free)
    end = free.output[end_at]
    stream = Stream("ends", tokens(6, 20), 50, end_ids=frozenset({end, (end + 1) % VOCAB_SIZE}))
    serve(core, stream)
    assert stream.finish_reason is FinishReason.STOP
    assert len(stream.output) <= end_at + 1


def test_last_token_needs_no_page() -> None:
    """31 prompt tokens and 2 outputs run 32 rows: two pages, also when there are only two."""
    bounds = limits(num_global_pages=3)
    serve(new_core(bounds), Stream("a", tokens(7, 31), 2))
    with pytest.raises(RequestError, match=r"\[exceeds_cache\].*at most 32 tokens"):
        new_core(bounds).add_request(Stream("a", tokens(7, 31), 3).request)


# -- many requests --------------------------------------------------------------------------------


def test_decodes_go_first_then_chunks_then_newcomers() -> None:
    driver = Driver(limits())
    driver.add(Stream("a", tokens(8, 10), 9))
    driver.step()
    driver.add(Stream("b", tokens(9, 50), 9))
    driver.add(Stream("c", tokens(10, 20), 9))
    assert rows(driver.step()) == [(0, 10, 1), (1, 0, 31)]
    assert rows(driver.step()) == [(0, 11, 1), (1, 31, 19), (2, 0, 12)]
    assert rows(driver.step()) == [(0, 12, 1), (1, 50, 1), (2, 12, 8)]


def test_first_come_first_served_without_overtaking() -> None:
    """A big request at the head waits for pages; a small one behind it must not slip in."""
    bounds = limits(num_global_pages=11, prefix_cache=False)
    driver = Driver(bounds)
    driver.add(Stream("a", tokens(11, 60), 40))
    driver.step()
    driver.add(Stream("b", tokens(12, 100), 2))
    driver.add(Stream("c", tokens(13, 5), 2))
    for _ in range(5):
        driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (1, 2)


def test_a_request_that_holds_the_budget_cannot_stop_decoding() -> None:
    bounds = limits(max_num_tokens=16, max_batch_size=8)
    driver = Driver(bounds)
    for i in range(7):
        driver.add(Stream(f"short {i}", tokens(i, 2), 60))
    driver.step()
    driver.add(Stream("long", tokens(14, 300), 2))
    for _ in range(20):
        plan = driver.step()
        assert np.diff(plan.arrays.query_start).tolist() == [1] * 7 + [9]


def test_whole_known_sequence_must_fit_before_admission() -> None:
    """10 usable pages; the first holds 4, so a prompt of 7 pages waits and gets all or nothing."""
    bounds = limits(num_global_pages=11, prefix_cache=False)
    driver = Driver(bounds)
    driver.add(Stream("a", tokens(15, 60), 4))
    driver.add(Stream("b", tokens(16, 100), 2))
    driver.step()
    assert driver.scheduler.residency.global_pages.num_used == 4
    while driver.scheduler.num_waiting:
        driver.step()
    assert driver.scheduler.residency.global_pages.num_used == 7


def test_evictable_hit_pages_count_as_needed() -> None:
    """The hit's 6 pages are free but cached: adopting them leaves too few for the new ones."""
    bounds = limits(num_global_pages=11)
    core = new_core(bounds)
    serve(core, Stream("first", tokens(17, 100), 2))
    driver = Driver(bounds)
    driver.add(Stream("first", tokens(17, 100), 2))
    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        driver.step()
    driver.add(Stream("holder", tokens(18, 60), 4))
    driver.add(Stream("again", np.append(tokens(17, 100), tokens(19, 10)), 2))
    driver.step()
    # holder takes 4 pages: 4 were never hashed or used, so the 6 cached ones stay free; the
    # resend of 110 tokens needs 7 pages in all and only 6 are free.
    assert driver.scheduler.num_waiting == 1
    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        driver.step()


def test_preempted_request_resumes_and_answers_the_same() -> None:
    """Both fit at first, then outgrow 8 pages; the later one gives way and starts again."""
    bounds = limits(num_global_pages=9)
    core = new_core(bounds)
    streams = [Stream("a", tokens(20, 50), 40), Stream("b", tokens(21, 50), 40)]
    serve(core, *streams)
    assert core.statistics().num_preemptions >= 1


def test_a_preempted_request_comes_back_before_those_who_never_ran() -> None:
    """a and b outgrow 8 pages; c waits for a slot all the time and would fit beside a."""
    driver = Driver(limits(num_global_pages=9, max_batch_size=2))
    streams = [Stream("a", tokens(20, 50), 40), Stream("b", tokens(21, 50), 40)]
    for stream in (*streams, Stream("c", tokens(22, 5), 2)):
        driver.add(stream)
    entered = []
    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        plan = driver.plan()
        for slot in plan.slots[plan.fresh].tolist():
            entered.append(driver.scheduler._slots.requests[slot].request.request_id)
        driver.scheduler.commit(driver.executor.run(plan))
    assert entered == ["a", "b", "b", "c"]


def test_oldest_request_is_never_preempted() -> None:
    bounds = limits(num_global_pages=13, max_batch_size=4)
    driver = Driver(bounds)
    for i in range(4):
        driver.add(Stream(str(i), tokens(30 + i, 33), 90))
    lives: dict[int, int] = {}
    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        oldest = int(driver.scheduler._running[0]) if driver.scheduler.num_running else None
        plan = driver.plan()
        if oldest is not None:
            assert oldest in plan.slots, "the oldest request was preempted"
        for slot in plan.slots[plan.fresh].tolist():
            lives[slot] = lives.get(slot, 0) + 1
        driver.scheduler.commit(driver.executor.run(plan))
    assert sum(lives.values()) > 4, "nothing was preempted, so nothing was shown"


def test_more_preemptions_than_requests_and_nothing_is_lost() -> None:
    """A storm: eight growing requests in a pool for two and a half of them."""
    bounds = limits(num_global_pages=26, max_batch_size=8)
    core = new_core(bounds)
    serve(core, *[Stream(str(i), tokens(40 + i, 20), 120) for i in range(8)])
    statistics = core.statistics()
    assert statistics.num_preemptions > 8
    assert statistics.num_global_pages_used == statistics.num_window_pages_used == 0


def test_resume_reports_the_hit_of_the_first_admission() -> None:
    bounds = limits(num_global_pages=9)
    core = new_core(bounds)
    streams = [Stream("a", tokens(20, 50), 40), Stream("b", tokens(21, 50), 40)]
    serve(core, *streams)
    assert core.statistics().num_preemptions
    assert {delta.cached_tokens for delta in streams[1].deltas} == {0}


def test_pages_of_the_window_are_kept_until_the_step_is_done() -> None:
    """vLLM PR 47728: retiring by scheduled instead of processed rows frees what a step reads."""
    driver = Driver(limits(max_num_tokens=16))
    driver.add(Stream("a", tokens(22, 60), 2))
    driver.step()
    plan = driver.plan()  # rows 16 … 31; row 16 reads window rows 9 … 15
    columns = (np.arange(9, 32) // 2) % plan.tables.window_pages.shape[1]
    assert (plan.tables.window_pages[0, columns] > 0).all()
    driver.scheduler.commit(driver.executor.run(plan))
    assert driver.scheduler.residency.window_pages.num_held(0) == 4  # rows 25 … 31 stay


def test_long_prompt_runs_in_a_small_window_pool() -> None:
    """32,768 tokens, window 8, a pool of 64 window pages of 8 rows."""
    bounds = limits(
        max_num_tokens=256,
        max_batch_size=8,
        max_seq_len=40_000,
        window_page_tokens=8,
        num_window_pages=64,
        num_global_pages=2_100,
    )
    driver = Driver(bounds)
    driver.add(Stream("long", tokens(23, 32_768), 3))
    driver.add(Stream("short", tokens(24, 5), 40))
    most = 0
    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        plan = driver.plan()
        most = max(most, driver.scheduler.residency.window_pages.num_used)
        driver.scheduler.commit(driver.executor.run(plan))
    assert most <= 63
    driver.scheduler.check_integrity()


def test_prefix_cache_can_be_left_out_by_a_request() -> None:
    core = new_core(limits())
    prompt = tokens(25, 100)
    serve(core, Stream("private", prompt, 3, use_prefix_cache=False))
    after = Stream("after", prompt, 3)
    serve(core, after)
    assert after.cached_tokens == 0, "a private request must not publish"
    unread = Stream("unread", prompt, 3, use_prefix_cache=False)
    serve(core, unread)
    assert unread.cached_tokens == 0, "a private request must not read"


def test_generated_tokens_are_published() -> None:
    """The next turn of a conversation finds the last answer too: 20 + 30 tokens, 49 of them run."""
    core = new_core(limits())
    turn = Stream("turn 1", tokens(26, 20), 30)
    serve(core, turn)
    conversation = np.concatenate([tokens(26, 20), np.array(turn.output, dtype=np.int32)])
    follow_up = Stream("turn 2", np.append(conversation, tokens(27, 9)), 5)
    serve(core, follow_up)
    assert follow_up.cached_tokens == 48


@pytest.mark.parametrize("use_prefix_cache", [True, False])
def test_answers_longer_than_the_token_ring(use_prefix_cache: bool) -> None:
    """The newest tokens of a slot stand in a ring of 512; older ones must be moved out of it, also
    where no published block does that. Two such requests, and too few pages for both."""
    bounds = limits(max_seq_len=2_000, num_global_pages=120)
    core = new_core(bounds)
    streams = [
        Stream(str(i), tokens(50 + i, 11 + i), 1_300, use_prefix_cache=use_prefix_cache)
        for i in range(2)
    ]
    serve(core, *streams)
    assert core.statistics().num_preemptions


def test_salts_do_not_share() -> None:
    core = new_core(limits())
    prompt = tokens(28, 100)
    serve(core, Stream("a", prompt, 2, salt=b"a"))
    other, same = Stream("b", prompt, 2, salt=b"b"), Stream("c", prompt, 2, salt=b"a")
    serve(core, other, same)
    assert (other.cached_tokens, same.cached_tokens) == (0, 96)
