"""y = x @ weightᵀ, with the input rounded where the weight is quantised."""

from __future__ import annotations

import torch

from plugins.linear.schema import LINEAR_PAIR, SCHEMA
from plugins.linear.tiles import row_tiled
from plugins.linear.weight import LinearWeight
from plugins.registry import operator


@operator(SCHEMA)
def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """x [T, K], weight [N, K] → [T, N] in the dtype of x (which is also the weight's)."""
    transposed = weight.value.T
    return row_tiled(weight.round_input(x), lambda tile: tile @ transposed)


@operator(LINEAR_PAIR)
def linear_pair(
    x: torch.Tensor, first: LinearWeight, second: LinearWeight
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K], weights [N, K] and [M, K] → linear(x, first) [T, N] and linear(x, second) [T, M],
    bit for bit; on a device one launch where rows are few."""
    return linear(x, first), linear(x, second)
