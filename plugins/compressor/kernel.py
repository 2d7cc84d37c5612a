"""The compressor's pooling in the Triton language; docs/kernels/compressor.md has the floor."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, padded, unit_stride
from plugins.device.overlap import after_previous, overlaps
from plugins.device.rows import VALUES, device_rows, row_offsets
from plugins.formats.rows import RowStore
from plugins.kv_write.kernel import kv_write
from plugins.norm.kernel import gains, normalised
from plugins.registry import OPERATORS

_TILE = 512


@triton.jit
def _pooled(a0, a1, b0, b1):
    peak = tl.maximum(b0, b1, propagate_nan=tl.PropagateNan.ALL)
    e0, e1 = tl.exp(b0 - peak), tl.exp(b1 - peak)
    return tl.div_rn(e0 * a0 + e1 * a1, e0 + e1)


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
    tl.store(pooled + group * WIDTH + column, _pooled(a0, a1, b0, b1), mask=there)


@triton.jit
def _before(row):
    """Of row 0 without is_first whatever comes out is the last row's, as in the reference."""
    return tl.where(row == 0, tl.num_programs(0) - 1, row - 1)


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
        before = tl.load(current + _before(row) * row_stride + column, mask=there, other=0.0)
    tl.store(previous + row * WIDTH + column, before, mask=there)


@triton.jit
def _pooled_rows(
    norm, current, row_stride, tail, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr,
    STORED: tl.constexpr, request, is_first, read_slots, write_slots, latent, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, KEEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row. KEEP: it is the only one, and goes to the tail when that has been read."""
    tl.static_assert(STORED == VALUES, "a tail is kept as values")
    scale = gains(norm, WIDTH, PADDED)
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    there = column < WIDTH
    own = current + row * row_stride + column
    a1 = tl.load(own, mask=there, other=0.0)
    b1 = tl.load(own + WIDTH, mask=there, other=0.0)
    if tl.load(is_first + row) != 0:
        slot = tl.load(read_slots + tl.load(request + row))
        before = tail + row_offsets(tl.maximum(slot, 0), page_stride, ROWS, ROW) + column
        kept = there & (slot >= 0)
        a0 = tl.load(before, mask=kept, other=0.0).to(a1.dtype)
        b0 = tl.load(before + WIDTH, mask=kept, other=0.0).to(a1.dtype)
    else:
        before = current + _before(row) * row_stride + column
        a0 = tl.load(before, mask=there, other=0.0)
        b0 = tl.load(before + WIDTH, mask=there, other=0.0)
    value = _pooled(a0.to(tl.float32), a1.to(tl.float32), b0.to(tl.float32), b1.to(tl.float32))
    value = tl.where(there, value, 0.0).to(latent.dtype.element_ty)
    tl.store(latent + row * WIDTH + column, normalised(value, scale, eps, WIDTH), mask=there)
    if KEEP:
        slot = tl.load(write_slots + row)
        tl.debug_barrier()
        after = tail + row_offsets(tl.maximum(slot, 0), page_stride, ROWS, ROW) + column
        kept = there & (slot >= 0)
        tl.store(after, a1.to(tail.dtype.element_ty), mask=kept)
        tl.store(after + WIDTH, b1.to(tail.dtype.element_ty), mask=kept)


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


def pooled_rows(
    norm: torch.Tensor,
    current: torch.Tensor,
    tail: RowStore,
    request: torch.Tensor,
    is_first: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient.

    One launch for one row. More have another one that writes the tail, as in previous_rows.
    """
    stored = device_rows(tail)
    if stored is None or stored.stored != VALUES.value or needs_reference(norm, current):
        reference: torch.Tensor = OPERATORS["pooled_rows"].reference(
            norm, current, tail, request, is_first, read_slots, write_slots, eps=eps
        )
        return reference
    rows, width = current.shape[0], norm.shape[0]
    latent = norm.new_empty((rows, width))
    if rows:
        overlap = overlaps(current.device) and norm.stride(-1) == 1
        source, block = unit_stride(current), padded(width)
        _pooled_rows[(rows,)](
            unit_stride(norm), source, source.stride(0), *stored.arguments(), request,
            is_first.view(torch.uint8), read_slots, write_slots, latent, eps, width, block,
            rows == 1, overlap, num_warps=max(1, min(8, block // 128)), launch_pdl=overlap,
        )  # fmt: skip
        if rows > 1:
            kv_write(source, tail, write_slots)
    return latent
