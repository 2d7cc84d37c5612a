"""Index scores of many rows of a request: a tile of keys stays in registers and runs over them."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.indexer.kernel_keys import column_slots, key_codes, load_keys, places, quarter
from plugins.indexer.kernel_rows import load_queries, segment
from plugins.indexer.kernel_sums import four_rows_scores

_BATCH = tl.constexpr(4)  # rows of one product


@triton.jit
def _visible(num_visible, row, stop, num_keys, WARPS: tl.constexpr):
    """int32 [4, 8, WARPS, 1, 1]: what row row + j sees, nothing from `stop` on."""
    mine = row + tl.broadcast_to(quarter(), (4, 8, WARPS, 1, 1))
    seen = tl.load(num_visible + mine, mask=mine < stop, other=0)
    return tl.minimum(seen, num_keys).to(tl.int32)


@triton.jit
def _store(
    scores, score, there, tile_visible, tile_columns, TILE: tl.constexpr, WARPS: tl.constexpr
):
    """Store at `scores` [4, 1, 1, 1, 1] of a tile's first column what rows see of it, else −inf."""
    place = places(TILE, WARPS, 2)
    score = tl.where(there & (place < tile_visible), score, float("-inf"))
    tl.store(scores + place, score, mask=place < tile_columns)


@triton.jit(do_not_specialize=["num_rows"])
def score_many_rows(
    codes, weights, data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    key_slots, slots_stride, PER_PAGE: tl.constexpr, num_keys, request, num_visible,
    scores, num_rows, SHARING: tl.constexpr, SPAN: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of entries of SHARING rows, SPAN the next power of two."""
    WHOLE: tl.constexpr = (PER_PAGE % TILE == 0) & (ROWS % PER_PAGE == 0)
    row = tl.program_id(1) * SHARING
    end = tl.minimum(row + SHARING, num_rows)
    start = tl.program_id(0) * TILE
    place = places(TILE, WARPS, 2)
    while row < end:
        owner, stop, most, _fewest = segment(request, num_visible, row, end, num_keys, SPAN)
        batches = tl.cdiv(stop - row, _BATCH)
        computed = tl.where(start < most, batches, 0)
        pages = key_slots + owner * slots_stride
        slots = column_slots(pages, start, most, TILE, WARPS, PER_PAGE, WHOLE)
        there, e, w0, w1, w2, w3 = load_keys(
            data, slots, start, page_stride, TILE, WARPS, ROWS, ROW, PER_PAGE, WHOLE
        )
        keys, largest = key_codes(e, w0, w1, w2, w3, TILE, WIDEN)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        for batch in tl.range(computed, num_stages=STAGES):
            first = row + batch * _BATCH
            mine = first + quarter()
            query, weight = load_queries(codes, weights, first, _BATCH, HEADS, WIDEN)
            visible = _visible(num_visible, first, stop, num_keys, WARPS)
            score = four_rows_scores(keys, largest, query, weight, TILE, WARPS, HEADS, WIDEN)
            columns = tl.where(mine < stop, num_keys - start, 0)
            at = scores + mine.to(tl.int64) * num_keys + start
            _store(at, score, there, visible - start, columns, TILE, WARPS)
        for batch in tl.range(computed, batches, num_stages=1):
            mine = row + batch * _BATCH + quarter()
            columns = tl.where(mine < stop, num_keys - start, 0)
            nothing = tl.full((4, 8, WARPS, 2, TILE // (16 * WARPS)), float("-inf"), tl.float32)
            at = scores + mine.to(tl.int64) * num_keys + start
            tl.store(at + place, nothing, mask=place < columns)
        row = stop
