"""Exact selection in the Triton language; docs/kernels/topk_select.md has its floor and layout.

A program reads a part of a row twice. The best of each of many groups of columns bound the k-th
best score from below; what reaches the bound is a short list, of which the k best are found in
registers. Parts of a long row are selected first, then what they keep; many long rows go by levels
(kernel_levels.py). Nothing is approximate, and a row's result depends on its own scores only.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import limits, needs_reference, padded, unit_stride
from plugins.device.search import LEAST_KEY, best, bound, bound_key, extent, threshold
from plugins.registry import OPERATORS
from plugins.topk_select.kernel_blocks import gathered, named
from plugins.topk_select.kernel_hopper import part_of_bins, select_parts_by_bins
from plugins.topk_select.kernel_levels import select_by_levels, takes_levels

# Columns of one program.
_PART = 16_384
# Groups and listed columns of one program, at the least.
_GROUPS, _LIST = 2048, 1024
# Columns of one step of a program.
_TILE = 2048


@triton.jit
def _load(scores, place, end):
    return tl.load(scores + place, mask=place < end, other=float("-inf")).to(tl.float32)


@triton.jit
def _threshold_of_part(scores, start, end, wanted, low, high, reached, TILE: tl.constexpr):
    """As `threshold` with enough = wanted, of more scores than registers hold."""
    above = 0
    while (reached > wanted) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        count = tl.zeros([TILE], tl.int32)
        for first in range(start, end, TILE):
            score = _load(scores, first + tl.arange(0, TILE), end)
            count += (score >= bound(middle)).to(tl.int32)
        reach = tl.sum(count)
        if reach >= wanted:
            low, reached = middle, reach
        else:
            high, above = middle, reach
    return low, high, reached, above


@triton.jit
def _list(
    scores, start, end, low, high, room, list_scores, list_columns,
    LIST: tl.constexpr, TILE: tl.constexpr, CROWDED: tl.constexpr,
):  # fmt: skip
    """Lists the scores that reach low, and their columns, in the order of columns; returns how many
    there are, of which LIST find room. CROWDED: of those that do not reach high, the first
    `room`."""
    count, taken = 0, 0
    for first in range(start, end, TILE):
        place = first + tl.arange(0, TILE)
        score = _load(scores, place, end)
        kept = score >= bound(low)
        if CROWDED:
            equal = (kept & ((score >= bound(high)) == 0)).to(tl.int32)
            kept = kept & ((equal == 0) | (taken + tl.cumsum(equal, axis=0) <= room))
            taken += tl.sum(equal)
        reach = count + tl.cumsum(kept.to(tl.int32), axis=0)
        fits = kept & (reach <= LIST)
        # For the layout only: without it the addresses change places with the loads' threads. The
        # mask has no runs, so every store stays by itself. `at` must not be compared: the compiler
        # would do it once for four of them.
        at = tl.max_contiguous(tl.multiple_of(reach - 1, 4), 4)
        tl.store(list_scores + at, score, mask=fits)
        tl.store(list_columns + at, place, mask=fits)
        count += tl.sum(kept.to(tl.int32))
    return count


@triton.jit
def _select_part(
    scores, row_stride, columns, num_columns, list_scores, list_columns, kept_scores, kept_columns,
    out_width, k,
    PART: tl.constexpr, GROUPS: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The k best of one part, in the order of their columns.

    FIRST: a column is its place in the row, otherwise `columns` names it. LAST: the columns are the
    result, otherwise they and the scores are what the next round selects from; −1 and −inf where
    there are fewer.
    """
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    k = tl.cast(k, tl.int32)  # where it is 1, a compile-time constant until here
    scores += row * row_stride
    start = part * PART
    end = tl.minimum(start + PART, num_columns)
    if PART <= LIST:
        place = start + tl.arange(0, PART)
        score = _load(scores, place, end)
        score = tl.where(score == score, score, float("-inf"))
        least, most, count = extent(score)
        low = bound_key(least)
    else:
        group = tl.arange(0, GROUPS)
        tops = tl.full([GROUPS], float("-inf"), tl.float32)
        for step in tl.static_range(PART // GROUPS):
            score = _load(scores, start + step * GROUPS + group, end)
            tops = tl.where(score > tops, score, tops)
        least, most, reached = extent(tops)
        low = bound_key(least)
        if reached > k:
            # k groups reach the bound, so k scores do; a few more cost less than further counts.
            low, high, reached, above = threshold(
                tops, k, k + k // 4, low, bound_key(most) + 1, reached
            )
        else:
            low = low * 0 + LEAST_KEY
        at = (row * tl.num_programs(0) + part) * LIST
        list_scores += at
        list_columns += at
        count = _list(scores, start, end, low, low, 0, list_scores, list_columns, LIST, TILE, False)
        if count > LIST:
            # The best lie in few groups, or many are equal.
            low, high, count, above = _threshold_of_part(
                scores, start, end, k, low, bound_key(most) + 1, count, TILE
            )
            count = _list(
                scores, start, end, low, high, k - above, list_scores, list_columns,
                LIST, TILE, True,
            )  # fmt: skip
        tl.debug_barrier()
        listed = tl.arange(0, LIST)
        score = tl.load(list_scores + listed, mask=listed < count, other=float("-inf"))
        place = tl.load(list_columns + listed, mask=listed < count, other=0)
    wanted = tl.minimum(k, count)
    low, high, reached, above = threshold(score, wanted, wanted, low, bound_key(most) + 1, count)
    kept = best(score, wanted, low, high, reached, above) & (score > float("-inf"))
    column = place
    if not FIRST:
        column = tl.load(columns + row * row_stride + place, mask=kept, other=0)
    rank = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    rank = tl.max_contiguous(tl.multiple_of(rank, 4), 4)  # as in _list
    out = row * out_width + part * k
    tl.store(kept_columns + out + rank, column.to(kept_columns.dtype.element_ty), mask=kept)
    if not LAST:
        tl.store(kept_scores + out + rank, score, mask=kept)
    for first in range(wanted, k, TILE):
        empty = first + tl.arange(0, TILE)
        tl.store(kept_columns + out + empty, -1, mask=empty < k)
        if not LAST:
            tl.store(kept_scores + out + empty, float("-inf"), mask=empty < k)


@triton.jit
def _block_scores(
    scores, row_stride, num_columns, num_visible, block_scores, num_blocks, largest,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each block's best score, at most `largest`; +inf for the block of the newest visible one."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    member = tl.arange(0, PADDED)
    column = block[:, None] * BLOCK + member[None, :]
    there = (column < num_columns) & (member < BLOCK)[None, :]
    score = tl.load(scores + row * row_stride + column, mask=there, other=float("-inf"))
    score = score.to(tl.float32)
    score = tl.where(score == score, score, float("-inf"))
    top = tl.minimum(tl.max(score, axis=1), largest)
    newest = tl.load(num_visible + row) - 1
    top = tl.where((newest >= 0) & (block == newest // BLOCK), float("inf"), top)
    tl.store(block_scores + row * num_blocks + block, top, mask=block < num_blocks)


def topk_select(scores: torch.Tensor, k: int) -> torch.Tensor:
    """As the reference, which runs for float64."""
    if needs_reference(scores):
        reference: torch.Tensor = OPERATORS["topk_select"].reference(scores, k)
        return reference
    scores, k = unit_stride(scores), min(k, scores.shape[1])
    if takes_levels(scores.shape[0], scores.shape[1], k):
        return select_by_levels(scores, k)
    return _select(scores, k)


def topk_of_blocks(
    scores: torch.Tensor, blocks: torch.Tensor, *, k: int, block_size: int
) -> torch.Tensor:
    """As the reference, which runs for float64."""
    width = min(k, scores.shape[1])
    if needs_reference(scores) or 0 in (len(scores), blocks.shape[1], width):
        reference: torch.Tensor = OPERATORS["topk_of_blocks"].reference(
            scores, blocks, k=k, block_size=block_size
        )
        return reference
    blocks = unit_stride(blocks)
    places = topk_select(gathered(unit_stride(scores), blocks, block_size), k)
    return named(places, blocks, block_size, width)


def candidate_blocks(
    scores: torch.Tensor, num_visible: torch.Tensor, *, block_size: int, num_blocks: int
) -> torch.Tensor:
    """As the reference, which runs for float64."""
    if needs_reference(scores):
        reference: torch.Tensor = OPERATORS["candidate_blocks"].reference(
            scores, num_visible, block_size=block_size, num_blocks=num_blocks
        )
        return reference
    scores = unit_stride(scores)
    rows, columns = scores.shape
    blocks = triton.cdiv(columns, block_size)
    block_scores = scores.new_empty((rows, blocks), dtype=torch.float32)
    if rows and blocks:
        tile = max(1, 4096 // padded(block_size, 1))
        _block_scores[(triton.cdiv(blocks, tile), rows)](
            scores, scores.stride(0), columns, num_visible, block_scores, blocks,
            torch.finfo(scores.dtype).max, block_size, padded(block_size, 1), tile, num_warps=8,
        )  # fmt: skip
    return _select(block_scores, min(num_blocks, blocks))


def _select(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of each row: their columns, int64 [T, k], ascending, −1 at the end."""
    rows, width = scores.shape
    device = scores.device
    if rows == 0 or k == 0:
        return torch.empty(rows, k, dtype=torch.int64, device=device)
    columns = scores  # a stand-in: the first round reads no names
    first = True
    while True:
        of_bins = part_of_bins(rows, width, k, device)
        part = of_bins or min(_part(rows, width, k), padded(width))
        parts = triton.cdiv(width, part)
        last = parts == 1
        out_width = parts * k
        # A round that keeps as many as it reads would never end.
        if not last and out_width >= width:
            raise ValueError(
                f"expected k to be at most half of {_PART}, got {k} of {width} columns; select in "
                "the reference instead"
            )
        kept_scores = scores
        if not last:
            kept_scores = torch.empty(rows, out_width, dtype=torch.float32, device=device)
        names = torch.int64 if last else torch.int32
        kept = torch.empty(rows, out_width, dtype=names, device=device)
        one_round = select_parts_by_bins if of_bins else _select_parts
        one_round(scores, columns, kept_scores, kept, k, part, first=first)
        if last:
            return kept
        scores, columns, width, first = kept_scores, kept, out_width, False


def _select_parts(
    scores: torch.Tensor, columns: torch.Tensor, kept_scores: torch.Tensor, kept: torch.Tensor,
    k: int, part: int, *, first: bool,
) -> None:  # fmt: skip
    """One round, as `select_parts_by_bins`, by `_select_part`."""
    (rows, width), device = scores.shape, scores.device
    parts = triton.cdiv(width, part)
    groups, listed = max(_GROUPS, 4 * padded(k, 1)), max(_LIST, 2 * padded(k, 1))
    if groups > part:
        listed = part  # all of it at once, in registers
    held = min(groups, part)
    list_scores = torch.empty(rows * parts * listed, dtype=torch.float32, device=device)
    list_columns = torch.empty(rows * parts * listed, dtype=torch.int32, device=device)
    warps = 4 if held <= _GROUPS else 8 if held <= 8192 else 16
    alone = rows * parts <= limits(device).multiprocessors
    if alone and held == _GROUPS:
        # Nothing else would run where the program waits.
        warps = 8
    _select_part[(parts, rows)](
        scores, scores.stride(0), columns, width, list_scores, list_columns, kept_scores, kept,
        parts * k, k, part, held, listed, min(_TILE, part), first, parts == 1, num_warps=warps,
    )  # fmt: skip


def _part(rows: int, width: int, k: int) -> int:
    """Columns of one program: fewer where a long row would leave multiprocessors idle."""
    few = rows * width < 1 << 21 and width > _PART and 8 * k <= _PART
    return _PART // 2 if few else _PART
