"""Rounding to the cache records in the Triton language: one pass, the same values.

float32 in and out. Steps and scales are built from exponent bits, as the references do.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_ROUND_GROUPS = 64
_TO_NEAREST = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it rounds to an integer, ties to even


@triton.jit
def _round_e4m3(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 255, 127 - 6)
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    per_step = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    return (x * per_step + _TO_NEAREST - _TO_NEAREST) * step


@triton.jit
def _round_e2m1(x):
    x = tl.minimum(tl.maximum(x, -6.0), 6.0)
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 255, 127)
    step = ((exponent - 1) << 23).to(tl.float32, bitcast=True)
    per_step = ((255 - exponent) << 23).to(tl.float32, bitcast=True)
    return (x * per_step + _TO_NEAREST - _TO_NEAREST) * step


@triton.jit
def _power_of_two_scale(amax, LIMIT: tl.constexpr):
    """The smallest power of two s with largest·s ≥ amax, and 1 / s; LIMIT: largest's bits."""
    bits = amax.to(tl.int32, bitcast=True)
    above = tl.where((bits & 0x7FFFFF) > (LIMIT & 0x7FFFFF), 1, 0)
    byte = (bits >> 23) - (LIMIT >> 23) + 127 + above
    scale = (byte << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round_groups(x, out, num_groups, FORMAT: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr):
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = group[:, None].to(tl.int64) * G + tl.arange(0, G)[None, :]
    inside = (group < num_groups)[:, None]
    v = tl.load(x + at, mask=inside, other=0.0)
    amax = tl.max(tl.abs(v), axis=1, keep_dims=True)
    if FORMAT == "window":
        scale, per_scale = _power_of_two_scale(tl.maximum(amax, 1e-4), 0x43E00000)
        v = _round_e4m3(v * per_scale) * scale
    elif FORMAT == "index":
        scale, per_scale = _power_of_two_scale(tl.maximum(amax, 7.052966e-38), 0x40C00000)
        v = _round_e2m1(v * per_scale) * scale
    else:
        amax = tl.minimum(tl.maximum(amax, 6.0 * 0.001953125), 6.0 * 448.0)
        scale = _round_e4m3(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)))
        v = _round_e2m1(tl.div_rn(v, tl.broadcast_to(scale, v.shape))) * scale
    tl.store(out + at, v, mask=inside)


class RoundGroups(torch.autograd.Function):
    """Values [..., n] after a trip through a cache record; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, record: str, group: int) -> torch.Tensor:
        values = values.contiguous()
        out = torch.empty_like(values)
        groups = values.numel() // group
        _round_groups[(triton.cdiv(groups, _ROUND_GROUPS),)](
            values, out, groups, record, group, _ROUND_GROUPS, num_warps=2
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None
