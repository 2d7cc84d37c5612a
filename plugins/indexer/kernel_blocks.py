"""Index scores of a row's candidate blocks alone: their entries, tile by tile."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.indexer.kernel_keys import key_codes, load_keys, places, quarter, slots_of
from plugins.indexer.kernel_rows import load_queries
from plugins.indexer.kernel_sums import few_scores, own_key, own_places


@triton.jit
def _named(blocks, start, beyond, TILE: tl.constexpr, WARPS: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [4, 8, WARPS, 2, RUNS]: the block of each of a tile's columns, −1 from `beyond` on."""
    column = start + places(TILE, WARPS, 2)
    return tl.load(blocks + column // BLOCK, mask=column < beyond, other=-1).to(tl.int32)


@triton.jit
def _slots(
    pages, start, block, visible, TILE: tl.constexpr, WARPS: tl.constexpr, PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """int32 [4, 8, WARPS, 2, RUNS] slots of a tile's columns in blocks of _named, −1 of none."""
    place = places(TILE, WARPS, 2)
    if TILE % BLOCK != 0:
        place += start
    entry = block * BLOCK + place % BLOCK
    return slots_of(pages, entry, (block >= 0) & (entry < visible), PER_PAGE)


@triton.jit
def _score_tile(
    loaded, query, weight, scores, start, beyond, TILE: tl.constexpr, WARPS: tl.constexpr,
    HEADS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    there, e, w0, w1, w2, w3 = loaded
    keys, largest = key_codes(e, w0, w1, w2, w3, TILE, WIDEN)
    score = few_scores(keys, largest, query, weight, TILE, WARPS, 1, HEADS, WIDEN)
    score = tl.where(own_key(there, 1, WARPS), score, float("-inf"))
    column = start + own_places(TILE, WARPS, 1)
    # Two threads have each score.
    tl.store(scores + column, score, mask=(column < beyond) & (quarter() % 2 == 0))


@triton.jit(do_not_specialize=["tiles"])
def score_blocks(
    codes, weights, data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    key_slots, slots_stride, PER_PAGE: tl.constexpr, num_keys, request, num_visible,
    scores, num_columns, tiles, blocks, blocks_stride, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """`tiles` tiles of one row's columns; column j is entry j % BLOCK of the block that `blocks`
    names at j // BLOCK. ONE: `tiles` is 1."""
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * tiles * TILE
    beyond = tl.minimum(begin + tiles * TILE, num_columns)
    blocks += row * blocks_stride
    scores += row * num_columns
    # On their way at once: a tile's keys, the next one's slots, and the blocks of the third.
    block = _named(blocks, begin, beyond, TILE, WARPS, BLOCK)
    if not ONE:
        block1 = _named(blocks, begin + TILE, beyond, TILE, WARPS, BLOCK)
    pages = key_slots + tl.load(request + row) * slots_stride
    visible = tl.minimum(tl.load(num_visible + row), num_keys).to(tl.int32)
    slots = _slots(pages, begin, block, visible, TILE, WARPS, PER_PAGE, BLOCK)
    if not ONE:
        slots1 = _slots(pages, begin + TILE, block1, visible, TILE, WARPS, PER_PAGE, BLOCK)
    loaded = load_keys(data, slots, begin, page_stride, TILE, WARPS, ROWS, ROW, PER_PAGE, False)
    if not ONE:
        block = _named(blocks, begin + 2 * TILE, beyond, TILE, WARPS, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    query, weight = load_queries(codes, weights, row, 1, HEADS, WIDEN)
    if ONE:
        _score_tile(loaded, query, weight, scores, begin, beyond, TILE, WARPS, HEADS, WIDEN)
    else:
        slots = slots1
        # Queries lie in shared memory: without it the compiler waits for them in every turn.
        tl.debug_barrier()
        for start in tl.range(begin, beyond, TILE, num_stages=1):
            now = loaded
            loaded = load_keys(
                data, slots, start + TILE, page_stride, TILE, WARPS, ROWS, ROW, PER_PAGE, False
            )
            slots = _slots(pages, start + 2 * TILE, block, visible, TILE, WARPS, PER_PAGE, BLOCK)
            block = _named(blocks, start + 3 * TILE, beyond, TILE, WARPS, BLOCK)
            _score_tile(now, query, weight, scores, start, beyond, TILE, WARPS, HEADS, WIDEN)
