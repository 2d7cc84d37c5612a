"""Selection from many long rows, level by level; docs/kernels/topk_select.md says when and why.

The k best columns lie in the k best blocks of eight columns, and these in the k best blocks of 64;
of equal ones the first. One pass writes the best of each block, and a program a row goes down.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import padded
from plugins.device.search import best, bound, bound_key, extent, threshold

# Columns of one program of the pass.
_TILE = 4096
# Where one program a row is less than what it saves.
_LONG, _MANY = 1 << 16, 1 << 23
# What a program holds at most: the best of blocks of 64, and members of k blocks of eight.
_TOPS, _MEMBERS = 1 << 14, 1 << 13


@triton.jit
def _load(values, place, there):
    """float32, −inf where there is none, and of NaN."""
    value = tl.load(values + place, mask=there, other=float("-inf")).to(tl.float32)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def block_tops(
    scores, row_stride, num_columns, eights, num_eights, tops, num_tops, TILE: tl.constexpr
):
    """The best of each eight columns, and of each 64; TILE columns a program."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place = part * TILE + tl.arange(0, TILE)
    score = _load(scores + row * row_stride, place, place < num_columns)
    top = tl.max(score.reshape(TILE // 8, 8), axis=1)
    block = part * (TILE // 8) + tl.arange(0, TILE // 8)
    tl.store(eights + row * num_eights + block, top, mask=block < num_eights)
    top = tl.max(top.reshape(TILE // 64, 8), axis=1)
    block = part * (TILE // 64) + tl.arange(0, TILE // 64)
    tl.store(tops + row * num_tops + block, top, mask=block < num_tops)


@triton.jit
def _kept(score, k):
    """Which of score [N] are the k best, the key of the least of them, and how many they are."""
    least, most, reached = extent(score)
    wanted = tl.minimum(k, reached)
    low, high, reached, above = threshold(
        score, wanted, wanted, bound_key(least), bound_key(most) + 1, reached
    )
    kept = best(score, wanted, low, high, reached, above) & (score > float("-inf"))
    return kept, low, wanted


@triton.jit
def _places(kept):
    """Of those kept, each one's number. Nothing but an address may use it: the hint is for the
    layout of the store, whose mask has no runs."""
    return tl.max_contiguous(tl.multiple_of(tl.cumsum(kept.to(tl.int32), axis=0) - 1, 4), 4)


@triton.jit
def _below(values, num_values, names, count, k, low, ROOM: tl.constexpr):
    """The members of the `count` blocks of eight that `names` lists, and of these what _kept
    returns. No more members than that reach low are wanted where the blocks are k."""
    tl.debug_barrier()  # the names are written
    at = tl.arange(0, 8 * ROOM)
    listed = at // 8 < count
    member = tl.load(names + at // 8, mask=listed, other=0) * 8 + at % 8
    score = _load(values, member, listed & (member < num_values))
    score = tl.where((score >= bound(low)) | (count < k), score, float("-inf"))
    kept, low, count = _kept(score, k)
    tl.debug_barrier()  # the names are read
    return member, kept, low, count


@triton.jit
def descend(
    scores, row_stride, num_columns, eights, num_eights, tops, num_tops, names, selected, k,
    TOP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The k best columns of one row, ascending, −1 behind the last."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.cast(k, tl.int32)  # where it is 1, a compile-time constant until here
    names += row * ROOM
    block = tl.arange(0, TOP)
    kept, low, count = _kept(_load(tops + row * num_tops, block, block < num_tops), k)
    tl.store(names + _places(kept), block, mask=kept)
    block, kept, low, count = _below(
        eights + row * num_eights, num_eights, names, count, k, low, ROOM
    )
    tl.store(names + _places(kept), block, mask=kept)
    column, kept, low, count = _below(
        scores + row * row_stride, num_columns, names, count, k, low, ROOM
    )
    selected += row * k
    tl.store(selected + _places(kept), column.to(tl.int64), mask=kept)
    for first in range(count, k, 8 * ROOM):
        empty = first + tl.arange(0, 8 * ROOM)
        tl.store(selected + empty, -1, mask=empty < k)


def takes_levels(rows: int, columns: int, k: int) -> bool:
    """Whether rows are long and many, and a program holds what it looks into."""
    many = columns > _LONG and rows * columns >= _MANY
    return many and triton.cdiv(columns, 64) <= _TOPS and 8 * padded(k, 1) <= _MEMBERS


def select_by_levels(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of each row of scores [T, n], n ≥ k ≥ 1: columns int64 [T, k], ascending, −1 at
    the end. For what `takes_levels`."""
    rows, columns = scores.shape
    eights, tops = triton.cdiv(columns, 8), triton.cdiv(columns, 64)
    of_eight = scores.new_empty((rows, eights), dtype=torch.float32)
    of_more = scores.new_empty((rows, tops), dtype=torch.float32)
    block_tops[(triton.cdiv(columns, _TILE), rows)](
        scores, scores.stride(0), columns, of_eight, eights, of_more, tops, _TILE, num_warps=8
    )
    room, top = padded(k, 1), padded(tops, 1)
    names = torch.empty(rows * room, dtype=torch.int32, device=scores.device)
    selected = scores.new_empty((rows, k), dtype=torch.int64)
    descend[(rows,)](
        scores, scores.stride(0), columns, of_eight, eights, of_more, tops, names, selected, k,
        top, room, num_warps=8 if top <= _MEMBERS else 16,
    )  # fmt: skip
    return selected
