"""Where the rows of a request lie, in one launch: in its pages, and in its slot's tail."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.overlap import after_previous, overlaps

_TILE = 512


@triton.jit
def _page_slots(
    table, table_stride, columns, request, positions, slots, numel, width,
    ROWS: tl.constexpr, RING: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < numel
    owner = tl.load(request + at // width, mask=there, other=0)
    position = tl.load(positions + at, mask=there, other=-1)
    column = position // ROWS
    if RING:
        column = column % columns
    read = (position >= 0) & (column < columns)
    page = tl.load(table + owner * table_stride + column, mask=read, other=0).to(tl.int64)
    slot = tl.where(page > 0, page * ROWS + position % ROWS, -1)
    tl.store(slots + at, slot, mask=there)


@triton.jit(do_not_specialize=["columns", "width"])
def _first_slots(
    table, table_stride, columns, first, width, ROWS: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    page = tl.load(table + request * table_stride + column, mask=column < columns, other=0)
    slot = tl.where(page > 0, page.to(tl.int64) * ROWS, -1)
    tl.store(first + request * width + column, slot, mask=column < width)


@triton.jit(do_not_specialize=["numel"])
def _tail_slots(
    slots, request, positions, tail, numel, CAPACITY: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < numel
    owner = tl.load(request + at, mask=there, other=0)
    position = tl.load(positions + at, mask=there, other=-1)
    slot = tl.load(slots + owner, mask=there, other=0).to(tl.int64)
    slot = tl.where(position >= 0, slot * CAPACITY + position % CAPACITY, -1)
    tl.store(tail + at, slot, mask=there)


def first_slots(table: torch.Tensor, rows_per_page: int, width: int) -> torch.Tensor:
    """Slots int64 [R, width] of the first row of every page of table int32 [R, C], −1 for the null
    page 0 and beyond the table's columns."""
    first = table.new_empty((table.shape[0], width), dtype=torch.int64)
    if first.numel():
        overlap = overlaps(table.device)
        _first_slots[(table.shape[0], triton.cdiv(width, _TILE))](
            table, table.stride(0), table.shape[1], first, width, rows_per_page, _TILE, overlap,
            num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
    return first


def tail_slots(
    slots: torch.Tensor, request: torch.Tensor, position: torch.Tensor, capacity: int
) -> torch.Tensor:
    """int64 [T] of requests [T] with `slots` [R]: slot · capacity + position mod capacity, −1 for a
    negative position."""
    made = torch.empty_like(position)
    numel = position.numel()
    if numel:
        overlap = overlaps(slots.device)
        _tail_slots[(triton.cdiv(numel, _TILE),)](
            slots, request, position, made, numel, capacity, _TILE, overlap,
            num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
    return made


def page_slots(
    table: torch.Tensor,
    request: torch.Tensor,
    position: torch.Tensor,
    rows_per_page: int,
    *,
    ring: bool,
) -> torch.Tensor:
    """Slots int64 of int64 positions [T] or [T, n] of requests [T]: page · rows_per_page + row;
    −1 for a negative position, the null page 0, and beyond the table's columns.

    table int32 [R, C]; `ring`: page p of a request stands in column p mod C.
    """
    position = position.contiguous()
    slots = torch.empty_like(position)
    numel = position.numel()
    if numel:
        overlap = overlaps(table.device)
        _page_slots[(triton.cdiv(numel, _TILE),)](
            table, table.stride(0), table.shape[1], request.contiguous(), position, slots,
            numel, numel // position.shape[0], rows_per_page, ring, _TILE, overlap, num_warps=4,
            launch_pdl=overlap,
        )  # fmt: skip
    return slots
