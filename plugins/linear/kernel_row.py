"""One bfloat16 row times weights that are kept as bfloat16 values, in the Triton language;
docs/kernels/linear.md says why.

A program has one output and all of its inputs: no other launch adds anything up. Its weights are
on their way to registers before the launch ahead has ended.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import padded, unit_stride
from plugins.device.overlap import after_previous, overlaps

# Inputs, whose weights a program holds, and outputs of a layer: wider ones are the library's work.
MOST_INPUTS, MOST_OUTPUTS = 8192, 4096
# Inputs of a step.
STEP = 1024


@triton.jit(do_not_specialize=["N"])
def linear_row(
    x, weight, weight_stride, N, other, other_stride, y,
    K: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """An output of `weight` [N, K] or, from program N on, of `other`."""
    if OVERLAP:
        # The next launch need not wait for the weights before it is set up.
        tl.extra.cuda.gdc_launch_dependents()
    output = tl.program_id(0).to(tl.int64)
    of_output = weight + output * weight_stride
    if output >= N:
        of_output = other + (output - N) * other_stride
    column = tl.arange(0, STEP)
    kept = ()
    for i in tl.static_range((K + STEP - 1) // STEP):
        at = of_output + i * STEP + column
        kept = kept + (tl.load(at, mask=column < K - i * STEP, other=0.0),)  # noqa: RUF005
    after_previous(OVERLAP)
    total = tl.zeros((STEP,), tl.float32)
    for i in tl.static_range((K + STEP - 1) // STEP):
        value = tl.load(x + i * STEP + column, mask=column < K - i * STEP, other=0.0)
        total = tl.fma(kept[i].to(tl.float32), value.to(tl.float32), total)
    tl.store(y + output, tl.sum(total, axis=0).to(y.dtype.element_ty))


def takes_row(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether linear_row multiplies x [T, K] with `weights` [N, K]."""
    half = all(one.dtype == x.dtype == torch.bfloat16 for one in weights)
    few = all(0 < one.shape[0] <= MOST_OUTPUTS for one in weights)
    return half and few and x.shape[0] == 1 and 0 < x.shape[1] <= MOST_INPUTS


def row_products(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> torch.Tensor:
    """x [1, K] times the transposes of one or two weights [N, K], side by side: [1, ΣN] `dtype`."""
    first, other = weights[0], weights[-1]
    # Copies of weights, which are loaded before the wait, are waited for.
    overlap = overlaps(x.device) and first.stride(-1) == other.stride(-1) == 1
    x, first, other = unit_stride(x), unit_stride(first), unit_stride(other)
    inner, outputs = x.shape[1], sum(one.shape[0] for one in weights)
    y = x.new_empty((1, outputs), dtype=dtype)
    step = min(STEP, padded(inner))
    linear_row[(outputs,)](
        x, first, first.stride(0), first.shape[0], other, other.stride(0), y, inner, step, overlap,
        num_warps=max(1, step // 256), launch_pdl=overlap,
    )  # fmt: skip
    return y
