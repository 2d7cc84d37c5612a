"""y = x @ weightᵀ, with the input rounded where the weight is quantised."""

from __future__ import annotations

import torch

from plugins.linear.schema import LINEAR_PAIR, SCHEMA, WIDE_LINEAR, WIDE_PAIR
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


@operator(WIDE_LINEAR)
def wide_linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """linear of x [T, K] in at least float32, whatever the rows are kept in: [T, N]."""
    return linear(x.to(torch.promote_types(x.dtype, torch.float32)), weight)


@operator(WIDE_PAIR)
def wide_linear_pair(x: torch.Tensor, first: LinearWeight, second: LinearWeight) -> torch.Tensor:
    """x [T, K], weights [N, K] and [M, K] → wide_linear of either, side by side [T, N + M]."""
    return torch.cat([wide_linear(x, first), wide_linear(x, second)], dim=-1)
