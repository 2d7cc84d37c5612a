"""The free list and the global pool, also as state machines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from python_backend.kv.block_hash import BlockChain
from python_backend.kv.free_pages import FreePages
from python_backend.kv.global_pool import GlobalPages
from python_backend.kv.groups import CacheGroup, IntegrityError
from python_backend.kv.prefix_cache import ROOT, ChainLink, PrefixCache

Int32Array = npt.NDArray[np.int32]

GLOBAL = CacheGroup("global", 4, replayable=False)


def pages(*ids: int) -> Int32Array:
    return np.array(ids, dtype=np.int32)


def one(slot: int) -> npt.NDArray[np.int64]:
    return np.array([slot], dtype=np.int64)


# -- the free list --------------------------------------------------------------------------------


def test_fresh_pages_come_in_order_and_never_the_null_page() -> None:
    free = FreePages(5)
    assert free.take(4).blank.tolist() == [1, 2, 3, 4]
    assert free.num_free == 0


def test_unhashed_pages_return_first_then_the_least_recently_freed() -> None:
    free = FreePages(9)
    free.take(8)
    free.push_hashed(pages(3, 2))  # freed in reverse, so 3 is the deepest block
    free.push_hashed(pages(5))
    free.push_blank(pages(7, 6))
    taken = free.take(4)
    assert taken.blank.tolist() == [6, 7]
    assert taken.hashed.tolist() == [3, 2]
    assert free.take(1).hashed.tolist() == [5]


def test_a_hit_page_leaves_the_middle_of_the_list() -> None:
    free = FreePages(6)
    free.take(5)
    free.push_hashed(pages(1, 2, 3, 4, 5))
    free.remove_hashed(pages(2, 4))
    assert (free.num_free, free.hashed_pages().tolist()) == (3, [1, 3, 5])
    free.push_hashed(pages(2))
    assert free.take(4).hashed.tolist() == [1, 3, 5, 2]


def test_taking_more_than_is_free_is_an_error() -> None:
    with pytest.raises(IndexError, match="at most 3 pages"):
        FreePages(4).take(4)


class FreeListMachine(RuleBasedStateMachine):
    """Against a deque: unhashed pages are prepended, hashed ones appended."""

    def __init__(self) -> None:
        super().__init__()
        self.free = FreePages(12)
        self.model = deque(range(1, 12))
        self.hashed: set[int] = set()
        self.held: list[int] = []

    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        taken = self.free.take(int(share * len(self.model)))
        got = [*taken.blank.tolist(), *taken.hashed.tolist()]
        expected = [self.model.popleft() for _ in got]
        assert got == expected
        assert set(taken.hashed.tolist()) == self.hashed.intersection(expected)
        self.hashed.difference_update(expected)
        self.held += expected

    @rule(data=st.data(), hashed=st.booleans())
    def push(self, data: st.DataObject, hashed: bool) -> None:
        some = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        if hashed:
            self.free.push_hashed(pages(*some))
            self.model.extend(some)
            self.hashed.update(some)
        else:
            self.free.push_blank(pages(*some))
            self.model.extendleft(some)
        self.held = [page for page in self.held if page not in some]

    @precondition(lambda self: self.hashed)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.hashed)), unique=True))
        self.free.remove_hashed(pages(*some))
        for page in some:
            self.model.remove(page)
        self.hashed.difference_update(some)
        self.held += some

    @invariant()
    def agrees(self) -> None:
        blank, hashed = self.free.blank_pages()[::-1].tolist(), self.free.hashed_pages().tolist()
        assert blank + hashed == list(self.model)
        assert self.free.num_free == len(self.model)


TestFreeList = FreeListMachine.TestCase
TestFreeList.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


# -- the global pool ------------------------------------------------------------------------------


def global_pool(num_pages: int = 20, num_slots: int = 4, columns: int = 8) -> GlobalPages:
    return GlobalPages(
        group=GLOBAL,
        num_pages=num_pages,
        num_slots=num_slots,
        columns=columns,
        cache=PrefixCache(num_pages, GLOBAL),
    )


def blocks(*values: int) -> Int32Array:
    """One block of equal tokens per value."""
    return np.repeat(np.array(values, dtype=np.int32), 4).reshape(-1, 4)


def chain_of(pool: GlobalPages) -> BlockChain:
    assert pool.cache is not None
    return pool.cache.new_chain(b"")


def fill(pool: GlobalPages, slot: int, *values: int) -> BlockChain:
    """Give the slot pages for these blocks and publish them."""
    chain = chain_of(pool)
    pool.extend(one(slot), one(len(values)))
    pool.publish(slot, chain, blocks(*values), 0, ROOT)
    return chain


def find(pool: GlobalPages, *values: int) -> list[int]:
    assert pool.cache is not None
    found: list[int] = pool.cache.find(chain_of(pool), blocks(*values)).pages.tolist()
    return found


def test_pages_grow_ragged_over_slots() -> None:
    pool = global_pool()
    pool.extend(np.array([2, 0, 1]), np.array([2, 0, 1]))
    pool.extend(np.array([1, 2]), np.array([2, 1]))
    assert pool.table[:3, :4].tolist() == [[0, 0, 0, 0], [3, 4, 5, 0], [1, 2, 6, 0]]
    assert pool.capacity.tolist() == [0, 12, 12, 0]
    assert (pool.num_used, pool.num_free) == (6, 13)
    pool.check_integrity()


def test_the_deepest_block_of_a_prefix_is_evicted_first() -> None:
    pool = global_pool(num_pages=5)
    fill(pool, 0, 7, 8, 9)
    pool.release(0)
    pool.extend(one(1), one(2))  # page 4 was never used, then block 9 goes
    assert find(pool, 7, 8, 9) == [1, 2]
    pool.extend(one(1), one(1))
    assert find(pool, 7, 8, 9) == [1]
    pool.check_integrity()


def test_a_hit_moves_its_pages_to_the_end_of_the_eviction_order() -> None:
    pool = global_pool(num_pages=5)
    fill(pool, 0, 1, 2)
    fill(pool, 1, 3, 4)
    pool.release(0)
    pool.release(1)
    pool.adopt(2, pages(1, 2))
    pool.release(2)
    pool.extend(one(3), one(2))
    assert (find(pool, 1, 2), find(pool, 3, 4)) == ([1, 2], [])


def test_shared_pages_are_counted_and_survive_their_first_owner() -> None:
    pool = global_pool()
    fill(pool, 0, 1, 2)
    pool.adopt(1, pages(1, 2))
    pool.release(0)
    assert pool.num_used == 2
    pool.check_integrity()
    pool.release(1)
    assert pool.num_used == 0


def test_hit_pages_that_nobody_holds_count_as_needed() -> None:
    pool = global_pool(num_pages=6)
    fill(pool, 0, 1, 2, 3)
    assert pool.num_needed(pages(1, 2, 3), 2) == 2
    pool.release(0)
    assert pool.num_needed(pages(1, 2, 3), 2) == 5


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda pool: pool._references.__setitem__(1, 5), "page 1 has 2 owners and 5 references"),
        (lambda pool: pool.table.__setitem__((0, 0), 0), "null page inside"),
        (lambda pool: pool.table.__setitem__((0, 1), 1), "twice"),
        (lambda pool: pool._free.take(1), "not the pages without references"),
        (lambda pool: pool._free.push_blank(pages(1)), "not the pages without references"),
        (lambda pool: pool.cache._serial.__setitem__(1, 0), "3 keys point to pages, 2 pages have"),
        (lambda pool: pool.cache._page_of.clear(), "0 keys point to pages"),
        (lambda pool: pool.cache._keys.__setitem__(2, b"x"), "another key"),
        (lambda pool: pool.cache._parent.__setitem__(2, 99), "older than the block before"),
        (lambda pool: pool.cache._parent.__setitem__(7, 1), "page 7 is not published"),
    ],
)
def test_damage_is_found(damage: Callable[[GlobalPages], object], sentence: str) -> None:
    """check_integrity must be able to fail: one broken thing at a time."""
    pool = global_pool()
    fill(pool, 0, 1, 2, 3)
    pool.adopt(1, pages(1))
    pool.check_integrity()
    damage(pool)
    with pytest.raises(IntegrityError, match=sentence):
        pool.check_integrity()


class GlobalPoolMachine(RuleBasedStateMachine):
    """Requests with shared prefixes come, publish and go in a pool that is always too small.

    The model remembers, for each page, the whole prefix that it was written with. A hit must be
    exactly a prefix of what is asked for, whatever was evicted, duplicated or displaced before.
    """

    NUM_SLOTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = global_pool(num_pages=14, num_slots=self.NUM_SLOTS)
        self.written: dict[int, tuple[int, ...]] = {}
        self.slots: dict[int, tuple[tuple[int, ...], BlockChain, int, ChainLink]] = {}

    @rule(values=st.lists(st.integers(0, 1), min_size=1, max_size=6), slot=st.integers(0, 3))
    def admit(self, values: list[int], slot: int) -> None:
        pool, cache = self.pool, self.pool.cache
        assert cache is not None
        if slot in self.slots:
            return
        chain = chain_of(pool)
        match = cache.find(chain, blocks(*values))
        hit = match.pages.tolist()
        for depth, page in enumerate(hit):
            assert self.written[page] == tuple(values[: depth + 1]), "a hit is not a true prefix"
        num_new = len(values) - len(hit)
        if pool.num_needed(match.pages, num_new) > pool.num_free:
            return
        pool.adopt(slot, match.pages)
        pool.extend(one(slot), one(num_new))
        for depth, page in enumerate(pool.table[slot, : len(values)].tolist()):
            if depth >= len(hit):
                self.written[page] = tuple(values[: depth + 1])
        self.slots[slot] = (tuple(values), chain, len(hit), match.link)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        values, chain, done, link = self.slots[slot]
        if done == len(values):
            return
        stop = data.draw(st.integers(done + 1, len(values)))
        link = self.pool.publish(slot, chain, blocks(*values[:stop]), done, link)
        self.slots[slot] = (values, chain, stop, link)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        self.pool.release(slot)
        del self.slots[slot]

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def an_unevicted_prefix_is_found(self) -> None:
        """What one request published and still holds is found whole by the same tokens."""
        for slot, (values, _, done, _) in self.slots.items():
            held = self.pool.table[slot, :done]
            assert self.pool.cache is not None
            if done and self.pool.cache.is_published(held).all():
                assert len(find(self.pool, *values[:done])) == done


TestGlobalPool = GlobalPoolMachine.TestCase
TestGlobalPool.settings = settings(
    deadline=None,
    max_examples=80,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.filter_too_much],
)
