"""The prefix cache: keys, true prefixes even when keys collide, duplicates, lost parents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.kv.block_hash import BlockChain
from python_backend.kv.groups import CacheGroup
from python_backend.kv.prefix_cache import ROOT, ChainLink, PrefixCache

Int32Array = npt.NDArray[np.int32]

SEED = bytes(range(16))
BLOCK = 4
GROUP = CacheGroup("global", BLOCK, replayable=False)


def random_blocks(seed: int, count: int) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 1 << 30, (count, BLOCK), dtype=np.int32)


def new_cache(num_pages: int = 64) -> PrefixCache:
    return PrefixCache(num_pages, GROUP, seed=SEED)


def pages(*ids: int) -> Int32Array:
    return np.array(ids, dtype=np.int32)


def publish(cache: PrefixCache, blocks: Int32Array, *ids: int) -> ChainLink:
    return cache.publish(cache.new_chain(b""), blocks, 0, pages(*ids), ROOT).link


def find(cache: PrefixCache, blocks: Int32Array, salt: bytes = b"") -> list[int]:
    found: list[int] = cache.find(cache.new_chain(salt), blocks).pages.tolist()
    return found


# -- keys -----------------------------------------------------------------------------------------


def test_keys_hash_seed_salt_and_every_token_so_far() -> None:
    blocks = random_blocks(1, 5)
    keys = BlockChain(SEED, b"tenant").keys(blocks, 0, 5)
    prefix = SEED + (6).to_bytes(8, "little") + b"tenant"
    for i, key in enumerate(keys):
        assert key == xxhash.xxh3_128_digest(prefix + blocks[: i + 1].tobytes())


def test_keys_do_not_depend_on_how_they_were_asked_for() -> None:
    blocks = random_blocks(2, 9)
    whole = BlockChain(SEED, b"").keys(blocks, 0, 9)
    chain = BlockChain(SEED, b"")
    assert chain.keys(blocks, 0, 2) == whole[:2]
    chain.adopt(blocks, 1, whole[1:6])  # the first of them is known already
    assert chain.num_hashed == 6
    chain.adopt(blocks, 0, whole[:3])
    assert chain.keys(blocks, 4, 9) == whole[4:]


def test_a_salt_isolates_the_whole_chain() -> None:
    cache, blocks = new_cache(), random_blocks(3, 3)
    publish(cache, blocks, 1, 2, 3)
    assert find(cache, blocks) == [1, 2, 3]
    assert find(cache, blocks, b"other") == []
    # Salt and tokens cannot be traded for one another.
    head = blocks[0].tobytes()
    assert BlockChain(SEED, head).keys(blocks[1:], 0, 1) != BlockChain(SEED, b"").keys(blocks, 1, 2)


def test_two_processes_have_different_keys() -> None:
    blocks = random_blocks(4, 1)
    one, other = (PrefixCache(8, GROUP).new_chain(b"").keys(blocks, 0, 1) for _ in range(2))
    assert one != other


# -- hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 143, 144, 145, 300])
def test_longest_prefix_is_found_at_any_length(shared: int) -> None:
    """Around the lengths of the guessed walks (16, then 128 more)."""
    cache = new_cache(400)
    published, other = random_blocks(5, 300), random_blocks(6, 300)
    publish(cache, published, *range(1, 301))
    asked = np.concatenate([published[:shared], other[shared:]])
    assert find(cache, asked) == list(range(1, shared + 1))


def test_branches_are_followed_by_key_where_the_guess_is_wrong() -> None:
    """Two continuations of one prefix: the walk guesses the newer one, both are found."""
    cache = new_cache()
    trunk, left, right = (random_blocks(seed, 20) for seed in (7, 8, 9))
    a, b = np.concatenate([trunk, left]), np.concatenate([trunk, right])
    publish(cache, a, *range(1, 41))
    match = cache.find(cache.new_chain(b""), b)
    link = cache.publish(cache.new_chain(b""), b, 20, pages(*range(41, 61)), match.link)
    assert not len(link.displaced)
    assert find(cache, a) == list(range(1, 41))
    assert find(cache, b) == [*range(1, 21), *range(41, 61)]
    cache.check_integrity()


def test_a_hit_leaves_the_chain_ready_to_publish_what_follows() -> None:
    cache, blocks = new_cache(), random_blocks(10, 6)
    publish(cache, blocks[:4], 1, 2, 3, 4)
    chain = cache.new_chain(b"")
    match = cache.find(chain, blocks)
    cache.publish(chain, blocks, 4, pages(5, 6), match.link)
    assert find(cache, blocks) == [1, 2, 3, 4, 5, 6]


def test_pages_in_any_order_are_compared_too() -> None:
    cache, blocks = new_cache(), random_blocks(11, 4)
    publish(cache, blocks, 9, 3, 20, 5)
    changed = blocks.copy()
    changed[2, 3] ^= 1
    assert find(cache, blocks) == [9, 3, 20, 5]
    assert find(cache, changed) == [9, 3]


def test_dropped_pages_are_not_found() -> None:
    cache, blocks = new_cache(), random_blocks(12, 4)
    publish(cache, blocks, 1, 2, 3, 4)
    cache.drop(pages(3, 4))
    assert find(cache, blocks) == [1, 2]
    assert cache.is_published(pages(1, 2, 3, 4)).tolist() == [True, True, False, False]
    cache.check_integrity()


# -- duplicates, lost parents, collisions ---------------------------------------------------------


def test_a_duplicate_stays_private_and_its_continuation_is_shared() -> None:
    """Two requests compute the same blocks at once; the second one is longer."""
    cache, blocks = new_cache(), random_blocks(13, 4)
    publish(cache, blocks[:2], 1, 2)
    publication = cache.publish(cache.new_chain(b""), blocks, 0, pages(11, 12, 13, 14), ROOT)
    assert cache.is_published(pages(11, 12, 13, 14)).tolist() == [False, False, True, True]
    assert not len(publication.displaced)
    assert find(cache, blocks) == [1, 2, 13, 14]
    cache.check_integrity()


def test_a_block_that_lost_its_parent_makes_room_for_the_same_block() -> None:
    """Page 2 continued page 1; page 1 is evicted first and its tokens are computed anew."""
    cache, blocks = new_cache(), random_blocks(14, 3)
    publish(cache, blocks, 1, 2, 3)
    cache.drop(pages(1))
    assert find(cache, blocks) == []
    publication = cache.publish(cache.new_chain(b""), blocks, 0, pages(11, 12, 13), ROOT)
    assert publication.displaced.tolist() == [2, 3]
    assert cache.is_published(pages(2, 3)).tolist() == [False, False]
    assert find(cache, blocks) == [11, 12, 13]
    cache.check_integrity()


class CollidingChain(BlockChain):
    """Two-valued keys at each depth: half of all pairs of prefixes collide."""

    def keys(self, blocks: Int32Array, start: int, stop: int) -> list[bytes]:
        keys = super().keys(blocks, start, stop)
        return [bytes([key[0] & 1, i]) for i, key in enumerate(keys, start)]


@settings(deadline=None, max_examples=200)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=2, max_size=12),
    drops=st.lists(st.integers(1, 40), max_size=6),
)
def test_a_hit_is_a_true_prefix_even_if_keys_collide(
    prompts: list[list[int]], drops: list[int]
) -> None:
    """A collision would hand one tenant's KV to another."""
    cache = new_cache(100)
    written: dict[int, list[int]] = {}
    next_page = 1
    for number, prompt in enumerate(prompts):
        blocks = np.repeat(np.array(prompt, dtype=np.int32), BLOCK).reshape(-1, BLOCK)
        chain = CollidingChain(SEED, b"")
        match = cache.find(chain, blocks)
        for depth, page in enumerate(match.pages.tolist()):
            assert written[page] == prompt[: depth + 1]
        hit = len(match.pages)
        fresh = pages(*range(next_page, next_page + len(prompt) - hit))
        next_page += len(fresh)
        for depth, page in enumerate(fresh.tolist(), hit):
            written[page] = prompt[: depth + 1]
        if len(fresh):
            cache.publish(chain, blocks, hit, fresh, match.link)
        cache.check_integrity()
        victim = drops[number] if number < len(drops) else 0
        if victim < next_page and cache.is_published(pages(victim)).all():
            cache.drop(pages(victim))
            cache.check_integrity()


def test_replayable_state_is_never_cached() -> None:
    with pytest.raises(ValueError, match="replayable group 'window'"):
        PrefixCache(8, CacheGroup("window", 4, replayable=True))
