"""Layers that multiply in at least float32 whatever the rows are kept in."""

from __future__ import annotations

import torch

from plugins.linear.reference import linear
from plugins.linear.weight import LinearWeight, PackedLinearWeight
from plugins.registry import runs_kernels


def wide_linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """linear of x in at least float32: [T, N] of x [T, K].

    On a GPU bfloat16 rows and weights are multiplied as such, into float32 sums: the same exact
    products, and nothing is widened first.
    """
    if runs_kernels(x):
        is_plain = not isinstance(weight, PackedLinearWeight) and not weight.quantized_input
        if is_plain and x.dtype == weight.value.dtype == torch.bfloat16:
            return torch.mm(x, weight.value.T, out_dtype=torch.float32)
    return linear(x.to(torch.promote_types(x.dtype, torch.float32)), weight)
