"""The window pool: pages follow the positions, and the sizing formula always suffices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.kv.groups import CacheGroup, IntegrityError, ragged_columns
from python_backend.kv.window_pool import WindowPages, pages_for, pages_per_request

Int32Array = npt.NDArray[np.int32]

WINDOW = CacheGroup("window", 2, replayable=True)


def one(slot: int) -> npt.NDArray[np.int64]:
    return np.array([slot], dtype=np.int64)


def window_pool(num_pages: int, num_slots: int, columns: int, window: int = 8) -> WindowPages:
    return WindowPages(
        group=WINDOW, window=window, num_pages=num_pages, num_slots=num_slots, columns=columns
    )


def test_window_pages_follow_the_positions() -> None:
    """Window 8, pages of 2 rows: after 12 rows the next token reads 5 … 12, pages 2 … 6."""
    pool = window_pool(num_pages=20, num_slots=2, columns=8)
    pool.start(0, 0)
    pool.grow(one(0), one(12))
    assert pool.table[0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    pool.retire(one(0), one(12))
    assert pool.table[0].tolist() == [0, 0, 3, 4, 5, 6, 0, 0]
    pool.grow(one(0), one(18))  # blocks 6 … 8: columns 6, 7, and 0 again
    assert (pool.table[0] > 0).tolist() == [True, False, True, True, True, True, True, True]
    assert pool.num_held(0) == 7
    pool.check_integrity()
    pool.release(0)
    assert pool.num_free == 19


def test_rejected_drafts_give_their_pages_back() -> None:
    """Pages of 2 rows. Verifying rows 12 … 17 takes blocks 6, 7 and 8; with rows up to 13 final
    blocks 7 and 8 go back, and nothing else."""
    pool = window_pool(num_pages=20, num_slots=2, columns=8)
    for slot in range(2):
        pool.start(slot, 0)
        pool.grow(one(slot), one(12))
        pool.retire(one(slot), one(12))
    before = pool.num_free
    both = np.array([0, 1])
    pool.grow(both, np.array([18, 12]))
    assert pool.num_free == before - 3
    pool.retire(both, np.array([14, 12]))  # row 7 is the lowest that row 14 reads
    pool.roll_back(both, np.array([14, 12]))
    assert pool.table[0].tolist()[:3] == [0, 0, 0]
    assert (pool.table[0] > 0).tolist() == [False] * 3 + [True] * 4 + [False]
    assert pool.num_free == before - 1 + 1  # one page more, and block 2 retired
    pool.check_integrity()


def test_a_later_start_takes_no_pages_below_it() -> None:
    pool = window_pool(num_pages=20, num_slots=1, columns=8)
    pool.start(0, 24)
    pool.grow(one(0), one(33))
    assert pool.num_held(0) == 5  # blocks 12 … 16


def test_damaged_window_tables_are_found() -> None:
    for damage in (
        lambda pool: pool.table.__setitem__((0, 1), 0),
        lambda pool: pool.table.__setitem__((0, 1), 1),
        lambda pool: pool._first.__setitem__(0, 1),
        lambda pool: setattr(pool, "_num_free", pool._num_free - 1),
    ):
        pool = window_pool(num_pages=20, num_slots=1, columns=8)
        pool.start(0, 0)
        pool.grow(one(0), one(6))
        pool.check_integrity()
        damage(pool)
        with pytest.raises(IntegrityError):
            pool.check_integrity()


@settings(deadline=None, max_examples=150)
@given(
    window=st.integers(1, 20),
    page_rows=st.integers(1, 9),
    num_requests=st.integers(1, 5),
    max_rows=st.integers(1, 40),
    data=st.data(),
)
def test_the_sizing_formula_always_suffices(
    window: int, page_rows: int, num_requests: int, max_rows: int, data: st.DataObject
) -> None:
    """Any split of the budget over any requests at any positions, step after step. What is needed
    is counted from positions, one by one, and must never exceed either formula. Any part of a
    step's rows but the first may be rejected drafts."""
    num_pages = pages_for(window, page_rows, num_requests, max_rows)
    columns = pages_per_request(window, page_rows, max_rows)
    pool = WindowPages(
        group=CacheGroup("window", page_rows, replayable=True),
        window=window,
        num_pages=num_pages,
        num_slots=num_requests,
        columns=columns,
    )
    position = {slot: data.draw(st.integers(0, 60)) for slot in range(num_requests)}
    start = dict(position)
    for slot, first in position.items():
        pool.start(slot, first)
    for _ in range(data.draw(st.integers(1, 6))):
        rows: dict[int, int] = {}
        for slot in range(num_requests):
            rows[slot] = data.draw(st.integers(0, max_rows - sum(rows.values())))
        running = [slot for slot in rows if rows[slot]]
        ends = np.array([position[slot] + rows[slot] for slot in running], dtype=np.int64)
        pool.grow(np.array(running, dtype=np.int64), ends)
        for slot in range(num_requests):
            lowest = max(start[slot], position[slot] - window + 1)
            live = {p // page_rows for p in range(lowest, position[slot] + rows[slot])}
            assert len(live) <= pages_per_request(window, page_rows, rows[slot])
            for block in live:
                assert pool.table[slot, block % columns] > 0
        pool.check_integrity()
        for slot in running:
            position[slot] += data.draw(st.integers(1, rows[slot]))
        final = np.array([position[slot] for slot in running], dtype=np.int64)
        pool.retire(np.array(running, dtype=np.int64), final)
        pool.roll_back(np.array(running, dtype=np.int64), final)
        pool.check_integrity()


def test_window_formula_by_hand() -> None:
    """Released model: 128 rows, pages of 32: a decoding request holds 5 pages of 32 rows."""
    assert pages_per_request(128, 32, 1) == 5
    assert pages_per_request(8, 8, 0) == 2
    assert pages_for(128, 32, 64, 8192) == 64 * 6 + 256 + 1
    assert pages_for(8, 8, 8, 256) == 8 * 3 + 32 + 1


def test_ragged_columns() -> None:
    starts, counts = np.array([5, 0, 7, 2]), np.array([2, 0, 3, 1])
    assert ragged_columns(starts, counts).tolist() == [5, 6, 7, 8, 9, 2]
    assert ragged_columns(starts, np.array([1, 1, 1, 1])).tolist() == [5, 0, 7, 2]
    assert ragged_columns(starts, np.zeros(4, dtype=np.int64)).tolist() == []
