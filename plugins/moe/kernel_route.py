"""Routing of the mixture of experts on the device: from expert ids to grouped rows, and back.

A pair is a token and one of its experts; pair p belongs to token p // k. Pairs are grouped by
expert, in their own order within it. The sizes of all arrays follow from shapes, never from ids.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import e4m3_code, mxfp8_round
from plugins.device.overlap import after_previous
from plugins.moe.kernel_float8 import permuted, permuted_halves


@triton.jit
def _group(
    index, ids, num_pairs, num_experts, segments, num_segments, order, places,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        # What lies beyond the pairs counts for an expert that does not exist.
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=EXPERTS - 1).to(tl.int32)
        counts += tl.histogram(chosen, EXPERTS)
    counts = tl.where(expert < num_experts, counts, 0)
    starts = tl.cumsum(counts, axis=0) - counts
    rank = tl.cumsum((counts > 0).to(tl.int32), axis=0) - 1
    is_mine = (rank == index) & (counts > 0)
    mine = tl.sum(tl.where(is_mine, expert, 0), axis=0)
    place = tl.sum(tl.where(is_mine, starts, 0), axis=0)
    count = tl.sum(tl.where(is_mine, counts, 0), axis=0)
    if MOST == 0:
        tl.store(segments + 3 * index, mine)
        tl.store(segments + 3 * index + 1, place)
        tl.store(segments + 3 * index + 2, count)
    else:
        parts = (counts + MOST - 1) // MOST
        before_mine = tl.sum(tl.where(expert < mine, parts, 0), axis=0)
        for part in range(tl.cdiv(count, MOST)):
            at = segments + 3 * (before_mine + part)
            tl.store(at, mine)
            tl.store(at + 1, place + part * MOST)
            tl.store(at + 2, tl.minimum(count - part * MOST, MOST))
        if index == 0:
            tl.store(num_segments, tl.sum(parts, axis=0))
    end = tl.where(count > 0, num_pairs, 0)
    for first in range(0, end, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        hit = chosen == mine
        before = tl.cumsum(hit.to(tl.int32), axis=0)
        tl.store(order + place + before - 1, pair, mask=hit)
        tl.store(places + pair, place + before - 1, mask=hit)
        place += tl.sum(hit.to(tl.int32), axis=0)


@triton.jit
def _rounded(
    x, FIRST: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FLOAT8: tl.constexpr
):
    """A row's values from column FIRST on rounded to MXFP8, float32 [COLUMNS / 32, 32]."""
    column = FIRST + tl.arange(0, COLUMNS // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return mxfp8_round(value, FLOAT8)


@triton.jit
def _magnitude(value):
    """The largest of [N, 32] as int32 bits, in which a NaN is largest."""
    return tl.max(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)


@triton.jit
def _store_values(rounded, value, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    COLUMNS: tl.constexpr = value.shape[0] * 32
    column = FIRST + tl.arange(0, COLUMNS)
    value = value.reshape(COLUMNS).to(rounded.dtype.element_ty)
    tl.store(rounded + column, value, mask=column < WIDTH)


@triton.jit
def _store_codes(codes, value, FIRST: tl.constexpr, WIDTH: tl.constexpr, FLOAT8: tl.constexpr):
    if FLOAT8:
        code = value.to(tl.float8e4nv)
    else:
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = (e4m3_code(tl.abs(value)) | sign).to(tl.uint8)
    COLUMNS: tl.constexpr = value.shape[0] * 32
    column = FIRST + tl.arange(0, COLUMNS)
    tl.store(codes + column, permuted(code), mask=column < WIDTH)


@triton.jit
def _store_halves(halves, value, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    column = FIRST + tl.arange(0, value.shape[0] * 32)
    tl.store(halves + column, permuted_halves(value.to(tl.float16)), mask=column < WIDTH)


@triton.jit
def _round_row(
    row, x, row_stride, rounded, codes, halves, powers, first_values, end_codes,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    CODES: tl.constexpr, HALVES: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    row = row.to(tl.int64)
    head = _rounded(x + row * row_stride, 0, HEAD, WIDTH, FLOAT8)
    largest = _magnitude(head)
    if REST > 0:
        rest = _rounded(x + row * row_stride, HEAD, REST, WIDTH, FLOAT8)
        largest = tl.maximum(largest, _magnitude(rest))
    if VALUES and row >= first_values:
        _store_values(rounded + row * WIDTH, head, 0, WIDTH)
        if REST > 0:
            _store_values(rounded + row * WIDTH, rest, HEAD, WIDTH)
    if (CODES or HALVES) and row < end_codes:
        # The largest value comes into [128, 256).
        exponent = tl.minimum(tl.maximum(largest >> 23, 8), 253) - 7
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        if CODES:
            _store_codes(codes + row * WIDTH, head * inverse, 0, WIDTH, FLOAT8)
            if REST > 0:
                _store_codes(codes + row * WIDTH, rest * inverse, HEAD, WIDTH, FLOAT8)
        if HALVES:
            _store_halves(halves + row * WIDTH, head * inverse, 0, WIDTH)
            if REST > 0:
                _store_halves(halves + row * WIDTH, rest * inverse, HEAD, WIDTH)
        # A row that holds a NaN poisons its products by its power.
        power = (exponent << 23).to(tl.float32, bitcast=True)
        tl.store(powers + row, tl.where(largest >= 0x7F800000, float("nan"), power))


@triton.jit
def round_rows(
    x, row_stride, rounded, codes, halves, powers, first_values, end_codes,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    CODES: tl.constexpr, HALVES: tl.constexpr, FLOAT8: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows rounded to MXFP8: from row first_values on as values, and up to end_codes as E4M3 codes
    or in float16, both of which share one power of two a row (`powers`) and lie in the order in
    which products take them.

    A row is held as its first HEAD columns and REST others. Of codes, what is less than 2^−13 of
    the row's largest value loses bits: at most 2^−17 of that largest. In float16 it is what is less
    than 2^−28, and at most 2^−32.
    """
    after_previous(OVERLAP)
    _round_row(
        tl.program_id(0), x, row_stride, rounded, codes, halves, powers, first_values, end_codes,
        WIDTH, HEAD, REST, VALUES, CODES, HALVES, FLOAT8,
    )  # fmt: skip


@triton.jit
def route(
    ids, num_pairs, num_experts, num_groups, segments, num_segments, order, places,
    x, row_stride, rounded, codes, halves, powers, first_values, end_codes,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    CODES: tl.constexpr, HALVES: tl.constexpr, FLOAT8: tl.constexpr, OVERLAP: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Program i of the first num_groups groups the pairs of the i-th expert that any row chose;
    every other one rounds a row, as round_rows.

    LATE: the next launch begins when ids are known, not before.

    segments int32 [num_groups, 3]: the expert, its first place and its number of pairs, 0 where
    fewer experts were chosen. With MOST, int32 [num_segments, 3]: an expert's pairs in segments of
    no more than so many. order int32: the pair at a place; places int32: the place of a pair.
    """
    if not (OVERLAP and LATE):
        after_previous(OVERLAP)
    else:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    if index < num_groups:
        _group(
            index, ids, num_pairs, num_experts, segments, num_segments, order, places,
            EXPERTS, CHUNK, MOST,
        )  # fmt: skip
    else:
        _round_row(
            index - num_groups, x, row_stride, rounded, codes, halves, powers, first_values,
            end_codes,
            WIDTH, HEAD, REST, VALUES, CODES, HALVES, FLOAT8,
        )  # fmt: skip


@triton.jit
def combine(
    y, places, total, num_rows, first_shared,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add a row's experts in ascending order (places ascend with experts), then the shared ones."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < WIDTH
    nth = tl.arange(0, PADDED_K)
    place = tl.load(places + row * TOP_K + nth, mask=nth < TOP_K, other=0x7FFFFFFF)
    result = tl.zeros((TILE,), tl.float32)
    for _ in tl.static_range(TOP_K):
        least = tl.min(place, axis=0)
        place = tl.where(place == least, 0x7FFFFFFF, place)
        result += tl.load(y + least.to(tl.int64) * WIDTH + column, mask=there, other=0.0)
    for expert in tl.static_range(SHARED):
        at = (first_shared + expert * num_rows + row) * WIDTH
        result += tl.load(y + at + column, mask=there, other=0.0)
    tl.store(total + row * WIDTH + column, result.to(total.dtype.element_ty), mask=there)
