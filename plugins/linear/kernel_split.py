"""float32 inputs times weights that are kept as bfloat16, in the Triton language.

A float32 has 24 bits and is the sum of three bfloat16 numbers. One product in bfloat16 with float32
sums takes all three, so that a weight is read once, in half the bytes, and by the tensor cores.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, unit_stride

PARTS = 3
_TILE = 1024


@triton.jit
def _split(x, row_stride, parts, num_rows, K, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < K
    rest = tl.load(x + row * row_stride + column, mask=there, other=0.0)
    at = row * K + column
    for _ in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(parts + at, part, mask=there)
        rest -= part.to(tl.float32)
        at += tl.cast(num_rows, tl.int64) * K


@triton.jit
def _sum(products, y, numel, TILE: tl.constexpr):
    """Least to largest."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < numel
    total = tl.zeros((TILE,), tl.float32)
    for part in tl.static_range(3):
        before = (2 - part) * tl.cast(numel, tl.int64)
        total += tl.load(products + before + at, mask=there, other=0.0)
    tl.store(y + at, total, mask=there)


def split_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] float32 as bfloat16 [3, T, K] that add up to it, largest first. Finite numbers
    below the largest bfloat16."""
    rows, inner = x.shape
    x = unit_stride(x)
    parts = x.new_empty((PARTS, rows, inner), dtype=torch.bfloat16)
    _split[(rows, triton.cdiv(inner, _TILE))](x, x.stride(0), parts, rows, inner, _TILE)
    return parts


def split_product(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """x [T, K] float32 times the transpose of `value` [N, K] bfloat16: float32 [T, N]."""
    rows, outputs = x.shape[0], value.shape[0]
    y = x.new_empty((rows, outputs))
    if not y.numel():
        return y
    parts = split_rows(x).flatten(0, 1)
    if INTERPRETED:
        products = parts.float() @ value.float().T
    else:
        products = torch.mm(parts, value.T, out_dtype=torch.float32)
    _sum[(triton.cdiv(y.numel(), _TILE),)](products, y, y.numel(), _TILE)
    return y
