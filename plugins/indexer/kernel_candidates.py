"""Behind the scores of candidates: which entries their columns are."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def name_entries(
    columns, num_columns, blocks, blocks_stride, entries, num_entries,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The entry of each selected column of a row, −1 where there is none."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < num_columns
    column = tl.load(columns + row * num_columns + place, mask=there, other=-1)
    chosen = column >= 0
    block = tl.load(blocks + row * blocks_stride + column // BLOCK, mask=chosen, other=0)
    entry = tl.where(chosen, block * BLOCK + column % BLOCK, -1)
    tl.store(entries + row * num_entries + place, entry, mask=place < num_entries)
