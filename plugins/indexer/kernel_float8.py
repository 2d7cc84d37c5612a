"""Index scores by E4M3 products, for FP4 keys of 128 values; docs/kernels/indexer.md says why.

Queries are E2M1 values; one power of two a head brings them into E4M3, and joins the head's weight
because it is positive. They are packed once, in the keys' order of columns. Few rows of a request
keep their queries and run over keys; many rows keep a tile of keys and run over queries.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, limits, padded, unit_stride
from plugins.device.numbers import e4m3
from plugins.device.rows import DeviceRows
from plugins.indexer.kernel_keys import (
    column_slots,
    exponent_scale,
    key_codes,
    load_keys,
    places,
    quarter,
)
from plugins.indexer.slots import PagedSlots

_BATCH = 4  # rows of one product, at most
# Few rows: up to _FEW of a request keep their queries for a run of at most _RUN tiles, or two of
# candidates. Many: up to _MANY share a tile.
_FEW, _FEW_TILE, _RUN = 6, 64, 48
_MANY, _MANY_TILE, _STAGES = 512, 128, 4
_WARPS = 4


@triton.jit
def pack_queries(
    queries, row_stride, head_stride, head_weights, weight_stride, codes, weights,
    H: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of one row: E4M3 codes uint8 [HEADS, 128], each head's largest value brought into [128, 256),
    and float32 [HEADS], its weight times what that and the keys' 2^6 left over, halved: x + |x| is
    twice max(0, x). Zeros beyond the heads."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    part, quarters, place = tl.arange(0, 8), tl.arange(0, 4), tl.arange(0, 4)
    column = part[:, None, None] * 4 + quarters[None, :, None] * 32 + place[None, None, :]
    at = queries + row * row_stride + head[:, None, None, None] * head_stride + column[None]
    query = tl.load(at, mask=(head < H)[:, None, None, None], other=0.0).to(tl.float32)
    query = query.reshape(HEADS, 128)
    bits = query.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.minimum(tl.maximum(tl.max(bits, axis=1) >> 23, 8), 253) - 7
    query *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    code = query.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes + (row * HEADS + head[:, None]) * 128 + tl.arange(0, 128)[None, :], code)
    weight = tl.load(head_weights + row * weight_stride + head, mask=head < H, other=0.0)
    weight = weight.to(tl.float32) * exponent_scale(exponent) * 0.0078125
    tl.store(weights + row * HEADS + head, weight)


@triton.jit
def _load_queries(
    codes, weights, row, BATCH: tl.constexpr, HEADS: tl.constexpr, WIDEN: tl.constexpr
):
    """Packed queries [128, BATCH · HEADS] and weights of BATCH rows; there is memory for all."""
    column, place = tl.arange(0, BATCH * HEADS), tl.arange(0, 128)
    first = tl.cast(row, tl.int64) * HEADS
    at = codes + first * 128 + column[:, None] * 128 + place[None, :]
    weight = tl.load(weights + first + column)
    if WIDEN:
        query = e4m3(tl.load(at).to(tl.int32)) * 256.0
    else:
        query = tl.load(at.to(tl.pointer_type(tl.float8e4nv), bitcast=True))
    return tl.trans(query), weight


@triton.jit
def _visible(num_visible, row, stop, num_keys, WARPS: tl.constexpr):
    """int32 [4, 8, WARPS, 1, 1]: what row row + j sees, nothing from `stop` on."""
    mine = row + tl.broadcast_to(quarter(), (4, 8, WARPS, 1, 1))
    seen = tl.load(num_visible + mine, mask=mine < stop, other=0)
    return tl.minimum(seen, num_keys).to(tl.int32)


@triton.jit
def _score(
    keys, largest, query, weight, TILE: tl.constexpr, WARPS: tl.constexpr, BATCH: tl.constexpr,
    HEADS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores of BATCH rows, float32 [4, 8, WARPS, 2, RUNS]: a key's thread j holds row j's."""
    RUNS: tl.constexpr = TILE // (16 * WARPS)
    if WIDEN:
        x = tl.dot(e4m3(keys.to(tl.int32)) * 256.0, query)
    else:
        x = tl.dot(keys.to(tl.float8e4nv, bitcast=True), query)
    x = (x + tl.abs(x)) * weight[None, :]
    if BATCH == 1:
        score = tl.sum(x, axis=1).reshape(RUNS, WARPS, 2, 8).permute(3, 1, 2, 0)[None]
        score = tl.broadcast_to(score, (4, 8, WARPS, 2, RUNS))
    else:
        score = tl.sum(x.reshape(TILE, BATCH, HEADS), axis=2)
        if BATCH == 2:
            score = score.reshape(RUNS, WARPS, 2, 8, 2).permute(3, 1, 2, 0, 4)
            s0, s1 = tl.split(score)
            score = tl.where(quarter() == 0, s0[None], s1[None])
        else:
            score = score.reshape(RUNS, WARPS, 2, 8, 2, 2).permute(3, 1, 2, 0, 4, 5)
            even, odd = tl.split(score)
            s0, s2 = tl.split(even)
            s1, s3 = tl.split(odd)
            low = tl.where(quarter() == 0, s0[None], s1[None])
            high = tl.where(quarter() == 2, s2[None], s3[None])
            score = tl.where(quarter() < 2, low, high)
    scale = exponent_scale(largest)
    # A poisoned key's scale is inf, and inf − inf is NaN.
    return score * scale + (scale - scale)


@triton.jit
def _segment(request, num_visible, row, end, num_keys, SPAN: tl.constexpr):
    """The request of a row, the first row from there on that is of another, and the most entries
    that one in between sees."""
    owner = tl.load(request + row)
    behind = row + tl.arange(0, SPAN)
    owners = tl.load(request + behind, mask=behind < end, other=-1)
    stop = tl.min(tl.where(owners == owner, end, behind), axis=0)
    seen = tl.load(num_visible + behind, mask=behind < stop, other=0)
    return owner, stop, tl.minimum(tl.max(seen, axis=0), num_keys).to(tl.int32)


@triton.jit
def _store(
    scores, score, there, tile_visible, tile_columns, TILE: tl.constexpr, WARPS: tl.constexpr
):
    """Store at `scores` [4, 1, 1, 1, 1] of a tile's first column what rows see of it, else −inf."""
    place = places(TILE, WARPS, 2)
    score = tl.where(there & (place < tile_visible), score, float("-inf"))
    tl.store(scores + place, score, mask=place < tile_columns)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def score_few_rows(
    codes, weights, data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    key_slots, slots_stride, PER_PAGE: tl.constexpr, num_keys, request, num_visible,
    scores, num_columns, num_rows, tiles, blocks, blocks_stride, BLOCK: tl.constexpr,
    SHARING: tl.constexpr, SPAN: tl.constexpr, BATCH: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`tiles` tiles of columns of up to three batches, SHARING rows; see column_slots."""
    # By two tiles, so that a lone row's next keys stay in their registers.
    UNROLL: tl.constexpr = 2 if (SHARING == 1) & (BLOCK == 0) else 1
    WHOLE: tl.constexpr = (BLOCK == 0) & (PER_PAGE % TILE == 0) & (ROWS % PER_PAGE == 0)
    row = tl.program_id(1) * SHARING
    end = tl.minimum(row + SHARING, num_rows)
    begin = tl.program_id(0) * tiles * TILE
    beyond = tl.minimum(begin + tiles * TILE, num_columns)
    while row < end:
        owner, stop, most = _segment(request, num_visible, row, end, num_keys, SPAN)
        pages = key_slots + owner * slots_stride
        named = blocks + row * blocks_stride
        # The next tile's keys, and the slots of the one behind it, are on their way meanwhile.
        limit = most if BLOCK > 0 else tl.minimum(most, beyond)
        slots = column_slots(
            pages, begin, limit, named, beyond, TILE, WARPS, PER_PAGE, WHOLE, BLOCK
        )
        there, e, w0, w1, w2, w3 = load_keys(
            data, slots, page_stride, TILE, WARPS, ROWS, ROW, WHOLE
        )
        slots = column_slots(
            pages, begin + TILE, limit, named, beyond, TILE, WARPS, PER_PAGE, WHOLE, BLOCK
        )
        if EARLY:
            tl.extra.cuda.gdc_wait()
        q0, weight0 = _load_queries(codes, weights, row, BATCH, HEADS, WIDEN)
        visible0 = _visible(num_visible, row, stop, num_keys, WARPS)
        if SHARING > BATCH:
            q1, weight1 = _load_queries(codes, weights, row + BATCH, BATCH, HEADS, WIDEN)
            visible1 = _visible(num_visible, row + BATCH, stop, num_keys, WARPS)
        if SHARING > 2 * BATCH:
            q2, weight2 = _load_queries(codes, weights, row + 2 * BATCH, BATCH, HEADS, WIDEN)
            visible2 = _visible(num_visible, row + 2 * BATCH, stop, num_keys, WARPS)
        # Thread j stores row j of a batch.
        out = scores + (row + quarter()).to(tl.int64) * num_columns
        mine = row + quarter()
        mine = tl.where(quarter() < BATCH, mine, num_rows)
        columns0 = tl.where(mine < stop, beyond, 0)
        columns1 = tl.where(mine < stop - BATCH, beyond, 0)
        columns2 = tl.where(mine < stop - 2 * BATCH, beyond, 0)
        seen = beyond if BLOCK > 0 else tl.maximum(limit, begin)
        full = tl.cdiv(seen - begin, TILE)
        # Queries lie in shared memory: without it the compiler waits for them in every turn.
        tl.debug_barrier()
        for tile in tl.range(full, num_stages=1, loop_unroll_factor=UNROLL):
            start = begin + tile * TILE
            now, e_now, v0, v1, v2, v3 = there, e, w0, w1, w2, w3
            there, e, w0, w1, w2, w3 = load_keys(
                data, slots, page_stride, TILE, WARPS, ROWS, ROW, WHOLE
            )
            behind = start + 2 * TILE
            slots = column_slots(
                pages, behind, limit, named, beyond, TILE, WARPS, PER_PAGE, WHOLE, BLOCK
            )
            keys, largest = key_codes(e_now, v0, v1, v2, v3, TILE, WIDEN)
            # A candidate that is there is seen.
            score = _score(keys, largest, q0, weight0, TILE, WARPS, BATCH, HEADS, WIDEN)
            seen0 = columns0 if BLOCK > 0 else visible0
            _store(out + start, score, now, seen0 - start, columns0 - start, TILE, WARPS)
            if SHARING > BATCH:
                score = _score(keys, largest, q1, weight1, TILE, WARPS, BATCH, HEADS, WIDEN)
                at = out + (start + BATCH * num_columns)
                _store(at, score, now, visible1 - start, columns1 - start, TILE, WARPS)
            if SHARING > 2 * BATCH:
                score = _score(keys, largest, q2, weight2, TILE, WARPS, BATCH, HEADS, WIDEN)
                at = out + (start + 2 * BATCH * num_columns)
                _store(at, score, now, visible2 - start, columns2 - start, TILE, WARPS)
        for tile in tl.range(full, tl.cdiv(beyond - begin, TILE), num_stages=1):
            start = begin + tile * TILE
            nothing = tl.full((4, 8, WARPS, 2, TILE // (16 * WARPS)), float("-inf"), tl.float32)
            place = places(TILE, WARPS, 2)
            tl.store(out + start + place, nothing, mask=place < columns0 - start)
            if SHARING > BATCH:
                at = out + (start + BATCH * num_columns)
                tl.store(at + place, nothing, mask=place < columns1 - start)
            if SHARING > 2 * BATCH:
                at = out + (start + 2 * BATCH * num_columns)
                tl.store(at + place, nothing, mask=place < columns2 - start)
        row = stop


@triton.jit(do_not_specialize=["num_rows"])
def score_many_rows(
    codes, weights, data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    key_slots, slots_stride, PER_PAGE: tl.constexpr, num_keys, request, num_visible,
    scores, num_rows, SHARING: tl.constexpr, BATCH: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of entries of SHARING rows, a power of two."""
    WHOLE: tl.constexpr = (PER_PAGE % TILE == 0) & (ROWS % PER_PAGE == 0)
    row = tl.program_id(1) * SHARING
    end = tl.minimum(row + SHARING, num_rows)
    start = tl.program_id(0) * TILE
    place = places(TILE, WARPS, 2)
    while row < end:
        owner, stop, most = _segment(request, num_visible, row, end, num_keys, SHARING)
        batches = tl.cdiv(stop - row, BATCH)
        computed = tl.where(start < most, batches, 0)
        pages = key_slots + owner * slots_stride
        slots = column_slots(pages, start, most, pages, num_keys, TILE, WARPS, PER_PAGE, WHOLE, 0)
        there, e, w0, w1, w2, w3 = load_keys(
            data, slots, page_stride, TILE, WARPS, ROWS, ROW, WHOLE
        )
        keys, largest = key_codes(e, w0, w1, w2, w3, TILE, WIDEN)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        for batch in tl.range(computed, num_stages=STAGES):
            first = row + batch * BATCH
            mine = first + quarter()
            query, weight = _load_queries(codes, weights, first, BATCH, HEADS, WIDEN)
            visible = _visible(num_visible, first, stop, num_keys, WARPS)
            score = _score(keys, largest, query, weight, TILE, WARPS, BATCH, HEADS, WIDEN)
            columns = tl.where((mine < stop) & (quarter() < BATCH), num_keys - start, 0)
            at = scores + mine.to(tl.int64) * num_keys + start
            _store(at, score, there, visible - start, columns, TILE, WARPS)
        for batch in tl.range(computed, batches, num_stages=1):
            mine = row + batch * BATCH + quarter()
            columns = tl.where((mine < stop) & (quarter() < BATCH), num_keys - start, 0)
            nothing = tl.full((4, 8, WARPS, 2, TILE // (16 * WARPS)), float("-inf"), tl.float32)
            at = scores + mine.to(tl.int64) * num_keys + start
            tl.store(at + place, nothing, mask=place < columns)
        row = stop


def _run(groups: int, tiles: int, programs: int) -> int:
    """How many of each group's tiles a program takes, so that whole waves of `programs` at a time
    do all of them: a last wave that is not full costs as much as one that is."""
    waves = -(-groups * tiles // (programs * _RUN))
    return -(-tiles // max(1, waves * programs // groups))


def scores_float8(
    scores: torch.Tensor,
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    stored: DeviceRows,
    slots: PagedSlots,
    request: torch.Tensor,
    num_visible: torch.Tensor,
    blocks: torch.Tensor | None = None,
    block_size: int = 0,
) -> None:
    """Write scores float32 [T, n], or [T, B · block_size] of the blocks int64 [T, B] alone.

    Neither T nor the number of columns is 0. How many rows are taken to belong to one request is
    T / R, rounded up: where it is another number, keys are decoded more often than needed.
    """
    num_rows, heads, _ = queries.shape
    padded_heads = padded(heads)
    num_columns = scores.shape[1]
    # Whole batches are read, of the last row's request too.
    there = num_rows + _FEW - 1
    codes = queries.new_empty((there, padded_heads, 128), dtype=torch.uint8)
    weights = queries.new_empty((there, padded_heads), dtype=torch.float32)
    # The next kernel may start, and load keys, before this one has ended.
    early = not INTERPRETED and limits(queries.device).early
    options: dict[str, bool | int] = {"launch_pdl": True} if early else {}
    pack_queries[(num_rows,)](
        queries, queries.stride(0), queries.stride(1), head_weights, head_weights.stride(0),
        codes, weights, heads, padded_heads, early, num_warps=_WARPS,
    )  # fmt: skip
    first = unit_stride(slots.first)
    of_keys = (
        *stored.arguments(), first, first.stride(0), slots.rows_per_page, slots.count,
        request, num_visible,
    )  # fmt: skip
    each = 1 if blocks is not None else -(-num_rows // max(slots.shape[0], 1))
    if each > 2 * _FEW:
        sharing = min(_MANY, padded(each))
        score_many_rows[(triton.cdiv(num_columns, _MANY_TILE), triton.cdiv(num_rows, sharing))](
            codes, weights, *of_keys, scores, num_rows, sharing, _BATCH, padded_heads,
            _MANY_TILE, _WARPS, _STAGES, INTERPRETED, early, num_warps=_WARPS, **options,
        )  # fmt: skip
        return
    sharing = -(-each // -(-each // _FEW))
    groups, of_row = triton.cdiv(num_rows, sharing), triton.cdiv(num_columns, _FEW_TILE)
    # As many programs as registers allow, which is limited below.
    at_once = (7 if sharing == 1 else 4) * limits(queries.device).multiprocessors
    tiles = _run(groups, of_row, at_once)
    if blocks is not None:
        tiles = min(tiles, 2)
    elif not INTERPRETED:
        options["maxnreg"] = 72 if sharing == 1 else 128
    named = scores if blocks is None else unit_stride(blocks)
    score_few_rows[(triton.cdiv(of_row, tiles), groups)](
        codes, weights, *of_keys, scores, num_columns, num_rows, tiles,
        named, named.stride(0), block_size, sharing, padded(sharing, 1), min(sharing, 2),
        padded_heads, _FEW_TILE, _WARPS, INTERPRETED, early, num_warps=_WARPS, **options,
    )  # fmt: skip
