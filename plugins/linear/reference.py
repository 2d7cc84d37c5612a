"""y = x @ weightᵀ, with the input rounded where the weight is quantised."""

from __future__ import annotations

import torch

from plugins.linear.schema import SCHEMA
from plugins.linear.tiles import row_tiled
from plugins.linear.weight import LinearWeight
from plugins.registry import operator


@operator(SCHEMA)
def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """x [T, K], weight [N, K] → [T, N] in the dtype of x (which is also the weight's)."""
    transposed = weight.value.T
    return row_tiled(weight.round_input(x), lambda tile: tile @ transposed)
