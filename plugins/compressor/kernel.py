"""The compressor's pooling in the Triton language; docs/kernels/compressor.md has the floor."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, unit_stride
from plugins.device.rows import VALUES, device_rows, row_offsets
from plugins.formats.rows import RowStore
from plugins.kv_write.kernel import kv_write
from plugins.registry import OPERATORS

_TILE = 512


@triton.jit
def _pool_pairs(
    a, a_group, a_token, b, b_group, b_token, pooled, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < WIDTH
    a0 = tl.load(a + group * a_group + column, mask=there, other=0.0).to(tl.float32)
    a1 = tl.load(a + group * a_group + a_token + column, mask=there, other=0.0).to(tl.float32)
    b0 = tl.load(b + group * b_group + column, mask=there, other=0.0).to(tl.float32)
    b1 = tl.load(b + group * b_group + b_token + column, mask=there, other=0.0).to(tl.float32)
    peak = tl.maximum(b0, b1, propagate_nan=tl.PropagateNan.ALL)
    e0, e1 = tl.exp(b0 - peak), tl.exp(b1 - peak)
    out = tl.div_rn(e0 * a0 + e1 * a1, e0 + e1)
    tl.store(pooled + group * WIDTH + column, out, mask=there)


@triton.jit
def _previous_rows(
    current, row_stride, tail, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr,
    STORED: tl.constexpr, request, is_first, read_slots, previous,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tl.static_assert(STORED == VALUES, "a tail is kept as values")
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < WIDTH
    if tl.load(is_first + row) != 0:
        slot = tl.load(read_slots + tl.load(request + row))
        source = tail + row_offsets(tl.maximum(slot, 0), page_stride, ROWS, ROW)
        before = tl.load(source + column, mask=there & (slot >= 0), other=0.0)
        before = before.to(previous.dtype.element_ty)
    else:
        # Row 0 without is_first: whatever comes out is the last row's, as in the reference.
        earlier = tl.where(row == 0, tl.num_programs(0) - 1, row - 1)
        before = tl.load(current + earlier * row_stride + column, mask=there, other=0.0)
    tl.store(previous + row * WIDTH + column, before, mask=there)


def pool_pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient."""
    if needs_reference(a, b):
        reference: torch.Tensor = OPERATORS["pool_pairs"].reference(a, b)
        return reference
    groups, _, width = a.shape
    pooled = a.new_empty((groups, width), dtype=torch.float32)
    if pooled.numel():
        a, b = unit_stride(a), unit_stride(b)
        _pool_pairs[(groups, triton.cdiv(width, _TILE))](
            a, a.stride(0), a.stride(1), b, b.stride(0), b.stride(1), pooled, width, _TILE
        )
    return pooled


def previous_rows(
    current: torch.Tensor,
    tail: RowStore,
    request: torch.Tensor,
    is_first: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient.

    Two launches: a chunk longer than the ring writes the slot that its own first row reads.
    """
    stored = device_rows(tail)
    if stored is None or stored.stored != VALUES.value or needs_reference(current):
        reference: torch.Tensor = OPERATORS["previous_rows"].reference(
            current, tail, request, is_first, read_slots, write_slots
        )
        return reference
    rows, width = current.shape
    previous = torch.empty_like(current, memory_format=torch.contiguous_format)
    if previous.numel():
        source = unit_stride(current)
        _previous_rows[(rows, triton.cdiv(width, _TILE))](
            source, source.stride(0), *stored.arguments(), request, is_first.view(torch.uint8),
            read_slots, previous, width, _TILE,
        )  # fmt: skip
        kv_write(source, tail, write_slots)
    return previous
