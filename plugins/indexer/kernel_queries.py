"""Index queries in the Triton language: rotated and rounded as stored keys are, in one launch.

One program turns and rounds a few heads of one row; the first of a row scales its head weights too.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, padded, unit_stride
from plugins.device.overlap import after_previous, overlaps
from plugins.device.rotation import cos_sin, turned
from plugins.device.rows import VALUES, device_rows
from plugins.formats.records import RecordLayout
from plugins.formats.rows import ValueRows
from plugins.kv_write.kernel import rounded_groups
from plugins.registry import OPERATORS

# Heads of a program.
_HEADS = 4


@triton.jit
def _index_queries(
    queries, row_stride, head_stride, head_weights, weight_stride, positions, inv_freq,
    turned_queries, scaled_weights, scale,
    H: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, 2 * PAIRS)
    there = (head < H)[:, None] & (column < WIDTH)[None, :]
    cos, sin = cos_sin(tl.load(positions + row), inv_freq, WIDTH, ROTATED, PAIRS)
    after_previous(OVERLAP)
    at = row * row_stride + head[:, None].to(tl.int64) * head_stride + column[None, :]
    value = tl.load(queries + at, mask=there, other=0.0)
    value = turned(value, cos, sin, column, WIDTH, ROTATED, PAIRS)
    if FORMAT != VALUES:
        value = rounded_groups(value, FORMAT).to(turned_queries.dtype.element_ty)
    at = (row * H + head[:, None]) * WIDTH + column[None, :]
    tl.store(turned_queries + at, value, mask=there)
    if tl.program_id(1) == 0:
        every = tl.arange(0, PADDED_HEADS)
        weight = tl.load(head_weights + row * weight_stride + every, mask=every < H, other=0.0)
        tl.store(scaled_weights + row * H + every, weight.to(tl.float32) * scale, mask=every < H)


def index_queries(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    layout: RecordLayout | None,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in one launch; it runs for float64, a gradient or an unknown record."""
    rows, heads, width = queries.shape
    stored = device_rows(ValueRows(queries, layout))
    if stored is None or needs_reference(queries, head_weights) or width % 32 or not rows:
        reference: tuple[torch.Tensor, torch.Tensor] = OPERATORS["index_queries"].reference(
            queries, head_weights, positions, inv_freq, layout, scale=scale
        )
        return reference
    queries, head_weights = unit_stride(queries), unit_stride(head_weights)
    made = torch.empty_like(queries, memory_format=torch.contiguous_format)
    weights = torch.empty_like(head_weights, memory_format=torch.contiguous_format)
    overlap = overlaps(queries.device)
    _index_queries[(rows, triton.cdiv(heads, _HEADS))](
        queries, queries.stride(0), queries.stride(1), head_weights, head_weights.stride(0),
        positions, inv_freq, made, weights, scale,
        heads, width, 2 * inv_freq.shape[0], padded(width, 32) // 2, stored.rounding, _HEADS,
        padded(heads, 1), overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return made, weights
