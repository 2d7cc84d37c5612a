"""Sizes and hostile inputs of the linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.linear.tiles import ROW_TILE
from plugins.linear.weight import LinearWeight


@dataclass(frozen=True)
class LinearCase:
    """`stride`: x is every stride-th column of a wider tensor."""

    name: str
    rows: int
    in_features: int
    out_features: int
    quantized_input: bool = False
    stride: int = 1
    input_scale: float = 1.0

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | LinearWeight]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, self.in_features * self.stride, generator=draw).to(dtype)
        weight = torch.randn(self.out_features, self.in_features, generator=draw).to(dtype)
        x = x.mul_(self.input_scale)[:, :: self.stride]
        return {"x": x, "weight": LinearWeight(weight, self.quantized_input)}


CASES = (
    LinearCase("no rows", 0, 64, 32),
    LinearCase("one row", 1, 64, 32),
    LinearCase("one below a tile", ROW_TILE - 1, 64, 96, quantized_input=True),
    LinearCase("a tile", ROW_TILE, 64, 96, quantized_input=True),
    LinearCase("one above a tile", ROW_TILE + 1, 64, 96, quantized_input=True),
    LinearCase("odd widths", 5, 33, 7),
    LinearCase("one output", 3, 160, 1),
    LinearCase("strided columns", 19, 64, 32, stride=2),
    LinearCase("all below the amax floor", 4, 64, 32, quantized_input=True, input_scale=1e-7),
    LinearCase("long inner dim", 2, 5120, 48),
)
