"""Selection among the columns of each row's blocks: their scores side by side, and their names."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Columns of one program.
_GATHERED, _NAMED = 1024, 512


@triton.jit
def gather_blocks(
    scores, row_stride, num_columns, blocks, blocks_stride, gathered, num_gathered,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The scores of a row's blocks, −inf where there is none."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < num_gathered
    block = tl.load(blocks + row * blocks_stride + place // BLOCK, mask=there, other=-1)
    column = block * BLOCK + place % BLOCK
    known = (block >= 0) & (column < num_columns)
    score = tl.load(scores + row * row_stride + column, mask=known, other=float("-inf"))
    tl.store(gathered + row * num_gathered + place, score, mask=there)


@triton.jit
def _name_columns(
    places, num_places, blocks, blocks_stride, entries, num_entries,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    nth = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = nth < num_places
    place = tl.load(places + row * num_places + nth, mask=there, other=-1)
    chosen = place >= 0
    block = tl.load(blocks + row * blocks_stride + place // BLOCK, mask=chosen, other=0)
    name = tl.where(chosen, block * BLOCK + place % BLOCK, -1)
    tl.store(entries + row * num_entries + nth, name, mask=nth < num_entries)


def gathered(scores: torch.Tensor, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Scores [T, n] of the columns of blocks int64 [T, B], [T, B · block_size]; none is empty."""
    rows, columns = len(scores), blocks.shape[1] * block_size
    made = scores.new_empty((rows, columns))
    gather_blocks[(triton.cdiv(columns, _GATHERED), rows)](
        scores, scores.stride(0), scores.shape[1], blocks, blocks.stride(0), made, columns,
        block_size, _GATHERED,
    )  # fmt: skip
    return made


def named(places: torch.Tensor, blocks: torch.Tensor, block_size: int, width: int) -> torch.Tensor:
    """Which column each of places int64 [T, m] among those of blocks int64 [T, B] is: int64
    [T, width], −1 where there is none."""
    rows = len(places)
    names = places.new_empty((rows, width))
    _name_columns[(triton.cdiv(width, _NAMED), rows)](
        places, places.shape[1], blocks, blocks.stride(0), names, width, block_size, _NAMED
    )
    return names
