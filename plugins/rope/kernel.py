"""The rotary embedding in the Triton language; docs/kernels/norm_rope.md has its floor.

One program turns up to 32 vectors of one row, which share its angles.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, padded, unit_stride
from plugins.device.rotation import cos_sin, turned
from plugins.registry import OPERATORS

_MAX_VECTORS = 32


@triton.jit
def _rotate(
    x, row_stride, vector_stride, positions, inv_freq, y, num_vectors,
    WIDTH: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr, VECTORS: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    column = tl.arange(0, 2 * PAIRS)
    there = (vector < num_vectors)[:, None] & (column < WIDTH)[None, :]
    at = row * row_stride + vector[:, None].to(tl.int64) * vector_stride + column[None, :]
    value = tl.load(x + at, mask=there, other=0.0)
    cos, sin = cos_sin(tl.load(positions + row), inv_freq, WIDTH, ROTATED, PAIRS)
    if INVERSE:
        sin = -sin
    at = (row * num_vectors + vector[:, None]) * WIDTH + column[None, :]
    tl.store(y + at, turned(value, cos, sin, column, WIDTH, ROTATED, PAIRS), mask=there)


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """As the reference, which runs for float64, a gradient or an odd number of unturned dims."""
    width, rotated = x.shape[-1], 2 * inv_freq.shape[0]
    if needs_reference(x) or width % 2:
        reference: torch.Tensor = OPERATORS["rope"].reference(x, positions, inv_freq, inverse)
        return reference
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel():
        vectors = unit_stride(x.reshape(x.shape[0], -1, width))
        count = vectors.shape[1]
        block, pairs = min(_MAX_VECTORS, padded(count, 1)), padded(width // 2)
        _rotate[(x.shape[0], triton.cdiv(count, block))](
            vectors, vectors.stride(0), vectors.stride(1), positions, inv_freq, y, count,
            width, rotated, pairs, block, inverse, num_warps=4 if block * pairs >= 512 else 1,
        )  # fmt: skip
    return y
