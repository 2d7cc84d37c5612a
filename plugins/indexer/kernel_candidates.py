"""Around the scores of candidates: which blocks a row has, and which entries its columns are."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_blocks(mask, mask_stride, num_blocks, listed, num_listed, TILE: tl.constexpr):
    """The true columns of a row of the mask, ascending, then −1; TILE columns a program, which
    counts those before its own."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    mask += row * mask_stride
    listed += row * num_listed
    before = tl.zeros((TILE,), tl.int32)
    for first in range(0, part * TILE, TILE):
        before += (tl.load(mask + first + tl.arange(0, TILE)) != 0).to(tl.int32)
    block = part * TILE + tl.arange(0, TILE)
    inside = tl.load(mask + block, mask=block < num_blocks, other=0)
    taken = (inside != 0).to(tl.int32)
    reach = tl.sum(before) + tl.cumsum(taken, axis=0)
    # The hint is for the layout of the store, whose mask has no runs: nothing but the address may
    # use what it is put on.
    place = tl.max_contiguous(tl.multiple_of(reach - 1, 4), 4)
    tl.store(listed + place, block.to(tl.int64), mask=(taken > 0) & (reach <= num_listed))
    if part == tl.num_programs(0) - 1:
        for first in range(tl.max(reach, axis=0), num_listed, TILE):
            nowhere = first + tl.arange(0, TILE)
            nothing = tl.full((TILE,), -1, tl.int64)
            tl.store(listed + nowhere, nothing, mask=nowhere < num_listed)


@triton.jit
def name_entries(
    columns, num_columns, listed, num_listed, entries, num_entries,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The entry of each selected column of a row, −1 where there is none."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < num_columns
    column = tl.load(columns + row * num_columns + place, mask=there, other=-1)
    chosen = column >= 0
    block = tl.load(listed + row * num_listed + column // BLOCK, mask=chosen, other=0)
    entry = tl.where(chosen, block * BLOCK + column % BLOCK, -1)
    tl.store(entries + row * num_entries + place, entry, mask=place < num_entries)
