"""Bugs that other engines had, one test each, named after what went wrong."""

from __future__ import annotations

import numpy as np
import pytest
from serving import Stream, finish, limits, new_core, serve, tokens

from python_backend.executor.simulated import SimulatedExecutor
from python_backend.kv.global_pool import GlobalPages
from python_backend.kv.groups import CacheGroup
from python_backend.kv.window_pool import WindowPages, pages_per_request
from python_backend.replay import ReplayRule, plan_replay
from python_backend.request import RequestError
from python_backend.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("page_rows", [32, 64, 128])
def test_hit_one_short_of_a_page_boundary_keeps_the_page_that_replay_writes(page_rows: int) -> None:
    """vLLM PR 56227, review: W = P = 128, H = 255: the retire rule nulled page 0, where the replay
    of row 127 writes. All hits from 1 to 1024: the page of row H − W is there, and stays until the
    window has passed it."""
    window = 128
    columns = pages_per_request(window, page_rows, window)
    pool = WindowPages(
        group=CacheGroup("window", page_rows, replayable=True),
        window=window,
        num_pages=2 * columns,
        num_slots=1,
        columns=columns,
    )
    slot = np.array([0])
    for hit in range(1, 1025):
        start = hit - min(window, hit)
        assert start == max(0, hit - window)
        pool.start(0, start)
        pool.grow(slot, np.array([start + 1]))
        assert pool.table[0, start // page_rows % columns] > 0, f"hit {hit}: no page at {start}"
        for processed in (start + 1, hit):
            pool.grow(slot, np.array([processed]))
            pool.retire(slot, np.array([processed]))
            lowest = max(start, processed - window + 1)
            live = np.arange(lowest, processed) // page_rows % columns
            assert (pool.table[0, live] > 0).all(), f"hit {hit}: a live page is gone"
        pool.release(0)


@pytest.mark.parametrize(("hit", "adopted"), [(1, 0), (127, 0), (128, 0), (129, 129)])
def test_hits_of_at_most_a_window_are_misses(hit: int, adopted: int) -> None:
    """vLLM PR 56227: they saved nothing but paid adoption."""
    rule = ReplayRule(window=128, replay_length=128, decoder_tail=128, global_page_tokens=1)
    plan = plan_replay(rule, num_tokens=300, num_prompt_tokens=300, hit=hit)
    assert (plan.hit, plan.replay_start) == (adopted, max(0, adopted - 128))


def test_a_dropped_short_hit_counts_as_a_miss_everywhere() -> None:
    """Pages of 4 tokens, window 8: a shared prefix of 8 is dropped, one of 12 is taken."""
    core = new_core(limits(global_page_tokens=4, replay=ReplayRule(8, 8, 8, 4)))
    serve(core, Stream("first", tokens(1, 20), 3))
    short = Stream("short", np.append(tokens(1, 8), tokens(2, 9)), 3)
    serve(core, short)
    statistics = core.statistics()
    assert short.cached_tokens == 0
    assert (statistics.num_dropped_short_hits, statistics.num_cached_tokens) == (1, 0)
    assert statistics.num_replayed_rows == 0
    enough = Stream("enough", np.append(tokens(1, 12), tokens(2, 9)), 3)
    serve(core, enough)
    assert enough.cached_tokens == core.statistics().num_cached_tokens == 12
    assert core.statistics().num_replayed_rows == 8


def test_a_chunk_may_end_inside_the_replay_range() -> None:
    """Window 128, hit 512, 64 rows a step: the first two chunks adopt and replay, and write no
    global row. Rejecting a chunk that adds nothing lost the request."""
    bounds = limits(
        window=128,
        global_page_tokens=256,
        window_page_tokens=32,
        max_num_tokens=64,
        max_seq_len=1024,
    )
    scheduler, executor = Scheduler(bounds), SimulatedExecutor(bounds)
    for _ in range(2):
        stream = Stream("a", tokens(3, 600), 2)
        scheduler.add(scheduler.track(stream.request))
        starts = []
        while scheduler.num_running + scheduler.num_waiting:
            plan = scheduler.schedule()
            assert plan is not None
            starts.append(int(plan.arrays.first_position[0]))
            floor = int(plan.arrays.write_floor[0])
            scheduler.commit(executor.run(plan))
            scheduler.check_integrity()
    assert floor == 512
    assert starts == [384, 448, 512, 576, 600]


def test_a_slot_never_shows_its_former_owner() -> None:
    """ATOM 1417, SGLang PR 30339: a hit in a new request read the previous owner's window. One
    slot, two prompts in turn, each again with a hit."""
    core = new_core(limits(max_batch_size=1))
    first, second = tokens(4, 61), tokens(5, 75)
    streams = [Stream(f"{i}", first if i % 2 == 0 else second, 20) for i in range(6)]
    serve(core, *streams)
    assert [stream.cached_tokens for stream in streams] == [0, 0, 48, 64, 48, 64]


def test_a_long_hit_counts_window_pages_from_its_first_live_row() -> None:
    """TokenSpeed PR 329: admission counted from position 0 and starved the request. A hit of 100K
    tokens with 16 window pages is admitted at once."""
    bounds = limits(
        window=128,
        global_page_tokens=256,
        window_page_tokens=32,
        max_num_tokens=256,
        max_batch_size=1,
        max_seq_len=110_000,
        num_global_pages=500,
        num_window_pages=16,
    )
    scheduler = Scheduler(bounds)
    executor = SimulatedExecutor(bounds)
    # Publish the prompt as if it had been computed, then ask for it with the real thing.
    prompt = tokens(6, 100_096)
    tracked = scheduler.track(Stream("first", prompt, 2).request)
    residency = scheduler.residency
    admission = residency.plan(tracked)
    assert admission is not None
    residency.enter(0, tracked, admission)
    num_blocks = len(prompt) // 256
    residency.publish(0, tracked, 0, num_blocks)
    pages = residency.global_pages.table[0, :num_blocks].copy()
    executor._global_position[pages] = np.arange(num_blocks * 256).reshape(-1, 256)
    executor._global_token[pages] = prompt[: num_blocks * 256].reshape(-1, 256)
    residency.leave(0)

    scheduler.add(scheduler.track(Stream("again", prompt, 2).request))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.arrays.first_position.tolist() == [390 * 256 - 128]
    assert residency.window_pages.num_used <= 15
    scheduler.commit(executor.run(plan))
    scheduler.check_integrity()


@pytest.mark.parametrize("budget", range(8, 18))
def test_replay_rows_cannot_stall_a_small_budget(budget: int) -> None:
    """TokenSpeed PR 1593: the replay left less than a page of budget and rounding made it 0.
    Window 8: every budget from W to 2W + 1, hits and prompt ends on and around every boundary."""
    bounds = limits(max_num_tokens=budget)
    core = new_core(bounds)
    serve(core, Stream("first", tokens(7, 120), 1))
    for length in range(33, 67):
        stream = Stream(f"{length}", np.append(tokens(7, length - 1), 49).astype(np.int32), 2)
        core.add_request(stream.request)
        num_steps = finish(core)
        hit = stream.cached_tokens
        assert hit == (length - 1) // 16 * 16
        assert num_steps == -(-(length - hit + 8) // budget) + 1
        stream.assert_served()


def test_a_group_must_say_whether_it_is_replayable() -> None:
    """TokenSpeed PR 1593: the field had a default, and a caller that left it out cached windows."""
    with pytest.raises(TypeError, match="replayable"):
        CacheGroup("window", 32)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="group"):
        GlobalPages(num_pages=4, num_slots=1, columns=1, cache=None)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="'global', which is not replayable"):
        WindowPages(
            group=CacheGroup("global", 32, replayable=False),
            window=8,
            num_pages=4,
            num_slots=1,
            columns=2,
        )


def test_a_request_larger_than_the_pool_is_refused_and_the_queue_moves_on() -> None:
    """vLLM 39734, PR 40946, 50169: start-up and admission used different formulas, and a request
    waited forever at 0 % usage. The largest that fits is served, one token more is refused."""
    bounds = limits(num_global_pages=9, max_seq_len=512)  # 8 pages of 16 tokens
    core = new_core(bounds)
    before, after = Stream("before", tokens(8, 30), 5), Stream("after", tokens(9, 30), 5)
    core.add_request(before.request)
    with pytest.raises(RequestError, match=r"^\[exceeds_cache\] expected a request of at most 128"):
        core.add_request(Stream("too large", tokens(10, 120), 10).request)
    assert bounds.longest_answer(120) == 9
    largest = Stream("largest", tokens(10, 120), 9)
    serve(core, largest, after)
    before.assert_served()


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("rest", [0, 1])
def test_an_identical_resend_hits_all_whole_blocks_but_the_last_token(
    num_blocks: int, rest: int
) -> None:
    """vLLM PR 44082, 51761, PR 54713: resends of block-aligned prompts missed. N = B·n and B·n + 1:
    H = floor((N − 1) / B) · B, and 0 when that is no more than the window."""
    for page_tokens in (16, 8, 4):
        bounds = limits(global_page_tokens=page_tokens, replay=ReplayRule(8, 8, 8, page_tokens))
        core = new_core(bounds)
        prompt = tokens(11, page_tokens * num_blocks + rest)
        first, again = Stream("first", prompt, 2), Stream("again", prompt, 2)
        serve(core, first)
        serve(core, again)
        found = (len(prompt) - 1) // page_tokens * page_tokens
        assert first.cached_tokens == 0
        assert again.cached_tokens == (found if found > 8 else 0)


def test_prompt_lengths_around_every_boundary() -> None:
    """vLLM PR 53520: prompts up to the graph size (512/513) came out wrong. Lengths 200 … 1100 at
    the released window and page sizes, cold and again."""
    bounds = limits(
        window=128,
        global_page_tokens=256,
        window_page_tokens=32,
        max_num_tokens=512,
        max_seq_len=1200,
    )
    core = new_core(bounds)
    edges = [n + d for n in (256, 384, 512, 640, 768, 896, 1024) for d in (-1, 0, 1)]
    for length in sorted({*range(200, 1101, 45), *edges}):
        prompt = tokens(length, length)
        again = Stream(f"{length} again", prompt, 2)
        serve(core, Stream(f"{length}", prompt, 2))
        serve(core, again)
        assert again.cached_tokens == (length - 1) // 256 * 256


def test_an_edited_turn_hits_only_what_is_still_the_same() -> None:
    """vLLM 49449: a rebuilt session kept the hashes of discarded tokens."""
    core = new_core(limits())
    prompt = tokens(12, 100)
    serve(core, Stream("first", prompt, 4))
    for edit in (0, 15, 16, 50, 79, 80, 99):
        edited = prompt.copy()
        edited[edit] = (edited[edit] + 1) % 50
        stream = Stream(f"edit at {edit}", edited, 4)
        serve(core, stream)
        assert stream.cached_tokens == min(edit, 99) // 16 * 16
    back = Stream("back", prompt, 4)
    serve(core, back)
    assert back.cached_tokens == 96
