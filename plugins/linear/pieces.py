"""Two linear layers of the same input."""

from __future__ import annotations

import torch

from plugins.linear.reference import linear
from plugins.linear.weight import LinearWeight
from plugins.registry import runs_kernels


def linear_pair(
    x: torch.Tensor, first: LinearWeight, second: LinearWeight
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K], weights [N, K] and [M, K] → linear(x, first) [T, N] and linear(x, second) [T, M],
    bit for bit; on a device one launch where rows are few."""
    if runs_kernels(x) and not torch.compiler.is_exporting():
        from plugins.linear import kernel

        return kernel.linear_pair(x, first, second)
    return linear(x, first), linear(x, second)
