"""Selection by bins on Hopper, in Gluon; docs/kernels/topk_select.md.

Where a program waits for all its threads, a multiprocessor that has no other does nothing, so there
are as few barriers as possible. All scores of a part lie in registers. They are counted by bins in
shared memory, a bin a thread, between a bound of the k-th best and the best; then those of the bin
of the k-th by finer bins, until it has few scores or all are equal. Bins are even in the keys of
the scores: what these are decides how many levels there are, mostly one, never whether the result
is exact.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from plugins.device.launch import limits, padded
from plugins.device.overlap_gluon import let_next_begin, wait
from plugins.device.threads_gluon import (
    count,
    get,
    get_two,
    num_bits,
    of_lane,
    put,
    put_two,
    reserve,
    scalar,
    warp_count,
    warp_max,
    warp_min,
    warp_scan,
    warp_sum,
    words,
)

# Columns and warps of a program.
_PART, _WIDE_PART = 8192, 16_384
_WARPS, _WIDE_WARPS = 16, 32
# Shorter rows leave most threads nothing.
_LEAST_WIDTH = 513
# The most results of a part.
_MOST = 2048
# Registers of a thread where two programs of most columns share a multiprocessor.
_FEW_REGISTERS = 64
# As many scores of one bin are compared with each other: one a lane.
_FEW = gl.constexpr(32)
# The key of −inf; scores are above it.
_NONE = gl.constexpr(-2139095041)

# Where things lie in shared memory, in bytes: words of each warp; single words and a pair; the list
# of few scores' depths and places; the bins; places and scores of the results.
_BEST, _LEAST, _REACHED, _TOTALS = (gl.constexpr(128 * i) for i in range(4))
_STATE, _LISTED, _NOWHERE, _EDGE = (gl.constexpr(512 + 8 * i) for i in range(4))
_LIST, _BINS = gl.constexpr(640), gl.constexpr(1024)
_PLACES, _SCORES = gl.constexpr(5120), gl.constexpr(13_312)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _of_warps(at, lane, WARPS: gl.constexpr):
    """The words that the warps have put from an address on, to a lane each; 0 to others."""
    return gl.where(lane < WARPS, get(at + 4 * (lane % WARPS)), 0)


@gluon.jit
def _bin_of(memory, bin, there, wanted, warp, lane, WARPS: gl.constexpr):
    """Counts by bins, which are zero before. Returns in which one the wanted-th is, how many are in
    those before it, how many in it, and how many in all; where these are fewer, no bin in earnest.
    """
    count(memory + gl.where(there, _BINS + 4 * bin, _NOWHERE))
    gl.thread_barrier()
    of_warp = warp_sum(get(memory + _BINS + 128 * warp + 4 * lane))
    put(memory + _TOTALS + 4 * warp, of_warp, lane == 0)
    gl.thread_barrier()
    reached = warp_scan(_of_warps(memory + _TOTALS, lane, WARPS))
    before = (reached < wanted) & (lane < WARPS)
    its_warp = gl.minimum(warp_count(before), WARPS - 1)
    above, total = warp_max(gl.where(before, reached, 0)), warp_max(reached)
    of_bin = get(memory + _BINS + 128 * its_warp + 4 * lane)
    reached = above + warp_scan(of_bin)
    before = reached < wanted
    its_lane = gl.minimum(warp_count(before), 31)
    above = gl.maximum(above, warp_max(gl.where(before, reached, 0)))
    return 32 * its_warp + its_lane, above, of_lane(of_bin, its_lane), total


@gluon.jit
def _ranks(kept, at, warp, lane, element, WARPS: gl.constexpr):
    """How many of the kept are no later in the order of places, of each element that is kept. `at`
    has a word for each warp."""
    # A warp keeps at most 128 of a chunk: the counts of all its chunks are bytes of one word.
    chunk = element >> 2
    one = gl.where(kept, 1 << (8 * chunk), 0)
    of_thread = gl.sum(one, axis=2)
    of_warp = warp_scan(of_thread)
    put(at + 4 * warp, of_warp, lane == 31)
    gl.thread_barrier()
    # All warps keep more: first and third chunk in halves of one word, the others in another's.
    words_of = _of_warps(at, lane, WARPS)
    even, odd = words_of & 0x00FF00FF, (words_of >> 8) & 0x00FF00FF
    even_before = warp_sum(gl.where(lane < warp, even, 0))
    odd_before = warp_sum(gl.where(lane < warp, odd, 0))
    even, odd = warp_sum(even), warp_sum(odd)
    first, second, third = even & 0xFFFF, odd & 0xFFFF, even >> 16
    base0 = even_before & 0xFFFF
    base1 = first + (odd_before & 0xFFFF)
    base2 = first + second + (even_before >> 16)
    base3 = first + second + third + (odd_before >> 16)
    base = gl.where(chunk == 2, base2[:, :, None], base3[:, :, None])
    base = gl.where(chunk == 1, base1[:, :, None], base)
    base = gl.where(chunk == 0, base0[:, :, None], base)
    running = gl.associative_scan(one, 2, _add) + (of_warp - of_thread)[:, :, None]
    return base + ((running >> (8 * chunk)) & 0xFF)


@gluon.jit
def _find_among_few(memory, number, wanted, warp, lane, WARPS: gl.constexpr):
    """Puts the depth and the place of the wanted-th of the listed where the edge is. A warp
    compares one or two of them with all."""
    depth, place = get_two(memory + _LIST + 8 * lane)
    for first in gl.static_range(0, _FEW, WARPS):
        its_depth, its_place = of_lane(depth, first + warp), of_lane(place, first + warp)
        less = depth.to(gl.uint32, bitcast=True) < its_depth.to(gl.uint32, bitcast=True)
        ahead = less | ((depth == its_depth) & (place < its_place))
        found = (warp_count(ahead) == wanted - 1) & (first + warp < number) & (lane == 0)
        put_two(memory + _EDGE + 0 * lane, its_depth, its_place, found)


@gluon.jit(do_not_specialize=["out_width", "k"])
def select_by_bins(
    scores, row_stride, columns, num_columns, kept_scores, kept_columns, out_width, k,
    CHUNKS: gl.constexpr, RESULTS: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The k best of one part, in the order of their columns: as `_select_part` of kernel.py, with
    CHUNKS · 128 · WARPS columns; RESULTS is k or more, a power of two."""
    EACH: gl.constexpr = 4 * CHUNKS
    PART: gl.constexpr = CHUNKS * 128 * WARPS
    BIN_BITS: gl.constexpr = 10 if WARPS == 32 else 9
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1, EACH], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    LANES: gl.constexpr = gl.SliceLayout(2, WIDE)
    row, part = gl.program_id(1).to(gl.int64), gl.program_id(0)
    start = part * PART
    scores += row * row_stride + start
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LANES))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, LANES))[None, :]
    warp, lane = warp + 0 * lane, lane + 0 * warp
    thread = 32 * warp + lane
    # Four neighbours of each chunk a thread.
    element = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))
    element = element[None, :][:, None, :]
    place = (element >> 2) * (128 * WARPS) + (4 * thread)[:, :, None] + (element & 3)
    place = gl.max_contiguous(gl.multiple_of(place, [1, 1, 4]), [1, 1, 4])
    memory = words()
    put(memory + _BINS + 4 * thread, 0 * thread, thread >= 0)
    put(memory + _LISTED + 0 * lane, 0 * lane, thread == 0)
    # Deeper than any score.
    put_two(memory + _LIST + 8 * lane, 0 * lane - 1, 0 * lane, warp == 0)
    let_next_begin()
    wait()
    score = gl.load(scores + place, mask=place < num_columns - start, other=float("-inf"))
    # The greater of NaN and a number is the number; a sum with 0 is never −0.
    score = gl.maximum(score.to(gl.float32), float("-inf")) + 0.0
    bits = score.to(gl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # As many threads as are wanted reach the least of their best, so as many scores do.
    top = gl.max(key, axis=2)
    has_any = top > _NONE
    put(memory + _BEST + 4 * warp, warp_max(top), lane == 0)
    put(memory + _LEAST + 4 * warp, warp_min(gl.where(has_any, top, 0x7FFFFFFF)), lane == 0)
    put(memory + _REACHED + 4 * warp, warp_count(has_any), lane == 0)
    gl.thread_barrier()
    best = gl.maximum(warp_max(get(memory + _BEST + 4 * (lane % WARPS))), _NONE + 1)
    least = warp_min(get(memory + _LEAST + 4 * (lane % WARPS)))
    reached = warp_sum(_of_warps(memory + _REACHED, lane, WARPS))
    least = gl.where(reached >= k, least, _NONE + 1)
    # How far a score is from the best, in keys.
    depth = (best[:, :, None] - key).to(gl.uint32, bitcast=True)
    span = (best - least).to(gl.uint32, bitcast=True)
    is_reached = depth <= span[:, :, None]
    shift = gl.maximum(num_bits(best - least) - BIN_BITS, 0)
    bin = (depth >> shift.to(gl.uint32)[:, :, None]).to(gl.int32)
    last, above, inside, total = _bin_of(memory, bin, is_reached, k + 0 * lane, warp, lane, WARPS)
    enough, number = total >= k, gl.minimum(total, k)
    wanted, inside = k - above, gl.where(enough, inside, 0)
    state = scalar(memory + _STATE, inside * 64 + shift)
    while (state // 64 > _FEW) & (state % 64 > 0):
        gl.thread_barrier()
        put(memory + _BINS + 4 * thread, 0 * thread, thread >= 0)
        gl.thread_barrier()
        finer = gl.maximum(shift - BIN_BITS, 0)
        first = last << (shift - finer)
        of_last = (depth >> shift.to(gl.uint32)[:, :, None]).to(gl.int32) == last[:, :, None]
        bin = (depth >> finer.to(gl.uint32)[:, :, None]).to(gl.int32) - first[:, :, None]
        last, above, inside, _ = _bin_of(memory, bin, of_last, wanted, warp, lane, WARPS)
        last, wanted, shift = first + last, wanted - above, finer
        state = scalar(memory + _STATE, inside * 64 + shift)
    bin = (depth >> shift.to(gl.uint32)[:, :, None]).to(gl.int32)
    listed = is_reached & (bin == last[:, :, None]) & enough[:, :, None]
    if state // 64 <= _FEW:
        one = gl.where(listed, 8, 0)
        at = memory + _LIST - 8 + reserve(memory + _LISTED + 0 * lane, gl.sum(one, axis=2))
        at = at[:, :, None] + gl.associative_scan(one, 2, _add)
        put_two(at, depth.to(gl.int32, bitcast=True), place, listed)
        gl.thread_barrier()
        _find_among_few(memory, inside, wanted, warp, lane, WARPS)
    else:
        # All of them are equal: the first ones.
        rank = _ranks(listed, memory + _LEAST, warp, lane, element, WARPS)
        is_edge = listed & (rank == wanted[:, :, None])
        put_two(memory + _EDGE + 0 * rank, depth.to(gl.int32, bitcast=True), place, is_edge)
    gl.thread_barrier()
    edge, until = get_two(memory + _EDGE)
    edge = gl.where(enough, edge.to(gl.uint32, bitcast=True), span)[:, :, None]
    until = gl.where(enough, until, PART)[:, :, None]
    kept = (depth < edge) | ((depth == edge) & (place <= until))
    rank = _ranks(kept, memory + _BEST, warp, lane, element, WARPS) - 1
    # In their order in shared memory first: a scattered store to memory costs more.
    put(memory + _PLACES + 4 * rank, place, kept)
    if not LAST:
        put(memory + _SCORES + 4 * rank, score.to(gl.int32, bitcast=True), kept)
    gl.thread_barrier()
    kept_columns += row * out_width + part * k
    kept_scores += row * out_width + part * k
    for first in gl.static_range(0, RESULTS, 32 * WARPS):
        result = first + thread
        is_result, there = result < number, result < k
        column = start + get(memory + _PLACES + 4 * result)
        if not FIRST:
            column = gl.load(columns + row * row_stride + column, mask=is_result, other=0)
        column = gl.where(is_result, column, -1)
        gl.store(kept_columns + result, column.to(kept_columns.dtype.element_ty), mask=there)
        if not LAST:
            its_score = get(memory + _SCORES + 4 * result).to(gl.float32, bitcast=True)
            its_score = gl.where(is_result, its_score, float("-inf"))
            gl.store(kept_scores + result, its_score, mask=there)


def part_of_bins(rows: int, width: int, k: int, device: torch.device) -> int | None:
    """Columns of a program of `select_by_bins`; None where `_select_part` is as fast, or must."""
    found = limits(device)
    if not found.warp_groups or k > _MOST or width < _LEAST_WIDTH:
        return None
    part = min(_PART, padded(width, 128 * _WARPS))
    if width <= part:
        return part
    # One round by two programs to a multiprocessor takes less time than two rounds.
    wide = rows * triton.cdiv(width, _WIDE_PART) <= 2 * found.multiprocessors
    if wide and width <= _WIDE_PART:
        return _WIDE_PART
    alone = rows * triton.cdiv(width, part) <= found.multiprocessors
    return part if alone else _WIDE_PART if wide else None


def select_parts_by_bins(
    scores: torch.Tensor, columns: torch.Tensor, kept_scores: torch.Tensor, kept: torch.Tensor,
    k: int, part: int, *, first: bool,
) -> None:  # fmt: skip
    """One round: the k best of each part of scores [T, n] to kept [T, parts · k] and, where these
    are several, kept_scores; `first` where a column is its place in the row."""
    rows, width = scores.shape
    parts = triton.cdiv(width, part)
    warps = _WARPS if part <= _PART else _WIDE_WARPS
    shared = part == _PART and rows * parts > limits(scores.device).multiprocessors
    select_by_bins[(parts, rows)](
        scores, scores.stride(0), columns, width, kept_scores, kept, parts * k, k,
        part // (128 * warps), padded(k, 1), first, parts == 1, warps,
        num_warps=warps, maxnreg=_FEW_REGISTERS if shared else None, launch_pdl=True,
    )  # fmt: skip
