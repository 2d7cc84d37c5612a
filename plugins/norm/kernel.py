"""The RMS normalisation in the Triton language; docs/kernels/norm_rope.md has its floor.

One program normalises one row, which it holds in registers: one read, one write.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, padded, unit_stride
from plugins.device.overlap import after_previous, overlaps
from plugins.registry import OPERATORS


@triton.jit
def gains(weight, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The norm's weight [PADDED] in float32. No launch writes one: it is loaded before a program
    waits for the launch ahead."""
    column = tl.arange(0, PADDED)
    return tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def normalised(value, scale, eps, WIDTH: tl.constexpr):
    """A row's `value` [PADDED], zeros beyond its WIDTH elements, in its own dtype, times `scale`
    [PADDED]."""
    wide = value.to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=0) / WIDTH + eps))
    return (wide * inverse * scale).to(value.dtype)


@triton.jit
def _rms_norm(
    x, row_stride, weight, y, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr
):
    scale = gains(weight, WIDTH, PADDED)
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    there = column < WIDTH
    value = tl.load(x + row * row_stride + column, mask=there, other=0.0)
    tl.store(y + row * WIDTH + column, normalised(value, scale, eps, WIDTH), mask=there)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient."""
    if needs_reference(x, weight):
        reference: torch.Tensor = OPERATORS["norm"].reference(x, weight, eps)
        return reference
    width = x.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel():
        rows = unit_stride(x.reshape(-1, width))
        block = padded(width)
        overlap = overlaps(x.device) and weight.stride(-1) == 1  # a copy of it is waited for
        _rms_norm[(rows.shape[0],)](
            rows, rows.stride(0), unit_stride(weight), y, eps, width, block, overlap,
            num_warps=max(1, min(8, block // 512)), launch_pdl=overlap,
        )  # fmt: skip
    return y
