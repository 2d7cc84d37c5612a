"""Index scores of few rows of a request: their queries stay, and a program runs over keys."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.indexer.kernel_keys import (
    column_slots,
    fetch_keys,
    key_codes,
    load_keys,
    quarter,
)
from plugins.indexer.kernel_rows import load_queries, segment
from plugins.indexer.kernel_sums import few_scores, own_key, own_places

# Infinities of a store of tiles that no row sees.
_WIDE = tl.constexpr(512)


@triton.jit
def _score_tile(
    loaded, queries, weights, out, num_columns, start, beyond, num_visible, mine, stop,
    TILE: tl.constexpr, WARPS: tl.constexpr, BATCH: tl.constexpr, HEADS: tl.constexpr,
    WIDEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store what rows `mine` of the first batch and those of the others score of a loaded tile,
    −inf of keys that are not there; of those that a row does not see, too, where MASKED."""
    there, e, w0, w1, w2, w3 = loaded
    keys, largest = key_codes(e, w0, w1, w2, w3, TILE, WIDEN)
    kept = there if there.type == tl.int1 else own_key(there, BATCH, WARPS)
    place = own_places(TILE, WARPS, BATCH)
    # Of one row two threads have each score.
    writes = (quarter() % 2 == 0) | (BATCH == 2)
    for batch in tl.static_range(len(queries)):
        row = mine + batch * BATCH
        score = few_scores(
            keys, largest, queries[batch], weights[batch], TILE, WARPS, BATCH, HEADS, WIDEN
        )
        shown, stored = kept, writes & (row < stop)
        if MASKED:
            seen = tl.load(num_visible + row, mask=row < stop, other=0)
            shown = shown & (start + place < seen)
            stored = stored & (start + place < beyond)
        score = tl.where(shown, score, float("-inf"))
        tl.store(out + batch * BATCH * num_columns, score, mask=stored)


@triton.jit(do_not_specialize=["num_rows", "groups"])
def score_few_rows(
    codes, weights, data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    key_slots, slots_stride, PER_PAGE: tl.constexpr, num_keys, request, num_visible,
    scores, num_columns, num_rows, groups, SHARING: tl.constexpr, SPAN: tl.constexpr,
    BATCH: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr,
    WIDEN: tl.constexpr, EARLY: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A program's even share of the tiles of all groups of SHARING rows.

    PAIRS: of pairs of tiles in one page, which share its address; the next keys of a lone row then
    stay in their registers."""
    WHOLE: tl.constexpr = (PER_PAGE % TILE == 0) & (ROWS % PER_PAGE == 0)
    UNIT: tl.constexpr = 2 * TILE if PAIRS else TILE
    of_group = tl.cdiv(num_columns, UNIT)
    # The first programs have one more, where they do not divide evenly.
    total, program, programs = of_group * groups, tl.program_id(0), tl.num_programs(0)
    at = program * (total // programs) + tl.minimum(program, total % programs)
    last = at + total // programs + (program < total % programs).to(tl.int32)
    batch_row = quarter() * 0 if BATCH == 1 else quarter() // 2
    place = own_places(TILE, WARPS, BATCH)
    while at < last:
        row = at // of_group * SHARING
        end = tl.minimum(row + SHARING, num_rows)
        begin = at % of_group * UNIT
        units = tl.minimum(last - at, of_group - at % of_group)
        beyond = tl.minimum(begin + units * UNIT, num_columns)
        at += units
        while row < end:
            owner, stop, most, fewest = segment(request, num_visible, row, end, num_keys, SPAN)
            pages = key_slots + owner * slots_stride
            # The next tile's keys, and the slots of the one behind it, are on their way meanwhile.
            limit = tl.minimum(most, beyond)
            slots = column_slots(pages, begin, limit, TILE, WARPS, PER_PAGE, WHOLE)
            loaded = load_keys(
                data, slots, begin, page_stride, TILE, WARPS, ROWS, ROW, PER_PAGE, WHOLE
            )
            page = slots
            slots = column_slots(pages, begin + UNIT, limit, TILE, WARPS, PER_PAGE, WHOLE)
            if EARLY:
                tl.extra.cuda.gdc_wait()
            queries, shares = (), ()
            for batch in tl.static_range((SHARING + BATCH - 1) // BATCH):
                query, share = load_queries(
                    codes, weights, row + batch * BATCH, BATCH, HEADS, WIDEN
                )
                queries, shares = queries + (query,), shares + (share,)  # noqa: RUF005
            # Queries lie in shared memory: without it the compiler waits for them in every turn.
            tl.debug_barrier()
            mine = row + batch_row
            out = scores + (mine.to(tl.int64) * num_columns + begin + place)
            # Tiles that all rows see need no mask; behind the last that one sees there is nothing.
            full = tl.minimum(fewest, beyond)
            start = begin
            if PAIRS:
                for _pair in tl.range(tl.maximum(full - begin, 0) // UNIT, num_stages=1):
                    if EARLY:
                        fetch_keys(
                            data, slots, start + UNIT, page_stride, ROWS, ROW, PER_PAGE, UNIT
                        )
                    second = load_keys(
                        data, page, start, page_stride, TILE, WARPS, ROWS, ROW, PER_PAGE, WHOLE,
                        2, 1,
                    )  # fmt: skip
                    _score_tile(
                        loaded, queries, shares, out, num_columns, start, beyond, num_visible,
                        mine, stop, TILE, WARPS, BATCH, HEADS, WIDEN, False,
                    )  # fmt: skip
                    out += TILE
                    start += UNIT
                    loaded = load_keys(
                        data, slots, start, page_stride, TILE, WARPS, ROWS, ROW, PER_PAGE, WHOLE,
                        2,
                    )  # fmt: skip
                    page = slots
                    slots = column_slots(pages, start + UNIT, limit, TILE, WARPS, PER_PAGE, WHOLE)
                    _score_tile(
                        second, queries, shares, out, num_columns, start - TILE, beyond,
                        num_visible, mine, stop, TILE, WARPS, BATCH, HEADS, WIDEN, False,
                    )  # fmt: skip
                    out += TILE
                slots = column_slots(pages, start + TILE, limit, TILE, WARPS, PER_PAGE, WHOLE)
            else:
                for _tile in tl.range(tl.maximum(full - begin, 0) // TILE, num_stages=1):
                    now = loaded
                    start += TILE
                    loaded = load_keys(
                        data, slots, start, page_stride, TILE, WARPS, ROWS, ROW, PER_PAGE, WHOLE
                    )
                    slots = column_slots(pages, start + TILE, limit, TILE, WARPS, PER_PAGE, WHOLE)
                    _score_tile(
                        now, queries, shares, out, num_columns, start, beyond, num_visible, mine,
                        stop, TILE, WARPS, BATCH, HEADS, WIDEN, False,
                    )  # fmt: skip
                    out += TILE
            while start < limit:
                _score_tile(
                    loaded, queries, shares, out, num_columns, start, beyond, num_visible, mine,
                    stop, TILE, WARPS, BATCH, HEADS, WIDEN, True,
                )  # fmt: skip
                start += TILE
                out += TILE
                loaded = load_keys(
                    data, slots, start, page_stride, TILE, WARPS, ROWS, ROW, PER_PAGE, WHOLE
                )
                slots = column_slots(pages, start + TILE, limit, TILE, WARPS, PER_PAGE, WHOLE)
            for unseen in tl.range(row, stop, num_stages=1):
                into = scores + tl.cast(unseen, tl.int64) * num_columns
                for first in tl.range(start, beyond, _WIDE, num_stages=1):
                    column = first + tl.arange(0, _WIDE)
                    nothing = tl.full((_WIDE,), float("-inf"), tl.float32)
                    tl.store(into + column, nothing, mask=column < beyond)
            row = stop
