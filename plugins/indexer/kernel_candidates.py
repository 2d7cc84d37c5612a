"""Around the scores of candidates: which blocks a row has, and which entries its columns are."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_blocks(mask, mask_stride, num_blocks, listed, num_listed, TILE: tl.constexpr):
    """The true columns of a row of the mask, ascending, then −1."""
    row = tl.program_id(0).to(tl.int64)
    found = 0
    for first in range(0, num_blocks, TILE):
        block = first + tl.arange(0, TILE)
        inside = tl.load(mask + row * mask_stride + block, mask=block < num_blocks, other=0)
        taken = (inside != 0).to(tl.int32)
        place = found + tl.cumsum(taken, axis=0) - 1
        out = listed + row * num_listed + place
        tl.store(out, block.to(tl.int64), mask=(taken > 0) & (place < num_listed))
        found += tl.sum(taken)
    for first in range(found, num_listed, TILE):
        place = first + tl.arange(0, TILE)
        nothing = tl.full((TILE,), -1, tl.int64)
        tl.store(listed + row * num_listed + place, nothing, mask=place < num_listed)


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
