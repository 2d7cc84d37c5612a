"""Shared experts of many rows: each weight is decoded once and multiplied by the library.

A chosen expert has few of the rows, a shared one all: decoding its weights for every row block
would cost more than the products.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED
from plugins.device.weights import device_weight
from plugins.linear.kernel import DECODED_ROWS, decode, round_rows
from plugins.linear.weight import Matrix, PackedMatrix
from plugins.moe.kernel_product import swiglu
from plugins.moe.reference import ExpertWeights

_TILE = 1024


@triton.jit
def _activate(gate, linear, activation, numel, limit, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < numel
    value = swiglu(tl.load(gate + at, mask=there), tl.load(linear + at, mask=there), limit)
    tl.store(activation + at, value.to(activation.dtype.element_ty), mask=there)


def stands_apart(x: torch.Tensor) -> bool:
    """Whether shared experts of rows x [T, D] are `shared_rows`' work."""
    return x.shape[0] >= DECODED_ROWS and x.dtype == torch.bfloat16


def shared_rows(x: torch.Tensor, experts: ExpertWeights, limit: float, y: torch.Tensor) -> None:
    """Write each expert's rows to y float32 [N · T, D]. x [T, D] is rounded as experts want it."""
    rows = x.shape[0]
    for place, matrices in enumerate(zip(*experts.matrices(), strict=True)):
        gate, linear = (
            _product(x, matrix, y.new_empty(rows, _outputs(matrix))) for matrix in matrices[:2]
        )
        activation = torch.empty_like(gate, dtype=x.dtype)
        _activate[(triton.cdiv(gate.numel(), _TILE),)](
            gate, linear, activation, gate.numel(), limit, _TILE
        )
        if experts.quantized_input:
            activation = round_rows(activation)
        _product(activation, matrices[2], y[place * rows : (place + 1) * rows])


def _outputs(matrix: Matrix) -> int:
    return matrix.shape[0] if isinstance(matrix, torch.Tensor | PackedMatrix) else 0


def _product(x: torch.Tensor, matrix: Matrix, y: torch.Tensor) -> torch.Tensor:
    """x [T, K] times the transpose of a matrix [N, K], written to y float32 [T, N]."""
    if isinstance(matrix, PackedMatrix):
        weight = device_weight(matrix)
        assert weight is not None  # or device_experts had refused
        values = decode(weight, x.dtype)
    else:
        assert isinstance(matrix, torch.Tensor)
        values = matrix
    if INTERPRETED:
        return torch.mm(x.float(), values.T.float(), out=y)
    return torch.mm(x, values.T, out_dtype=torch.float32, out=y)
