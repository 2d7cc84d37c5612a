"""Sizes and hostile inputs of the expert gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.linear.tiles import ROW_TILE


@dataclass(frozen=True)
class GateCase:
    """`logit_scale` 0 makes all scores equal; `bias_levels` > 0 draws biases from few values."""

    name: str
    rows: int
    width: int
    experts: int
    top_k: int
    images: bool = False
    logit_scale: float = 1.0
    bias_levels: int = 0
    gate_temp: float = 1.0

    def operands(
        self, dtype: torch.dtype, seed: int = 0
    ) -> dict[str, torch.Tensor | float | int | None]:
        """Keyword operands and attributes of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        u = torch.randn(self.rows, self.width, generator=draw)
        spread = 2.0 * self.logit_scale * self.width**-0.5
        weight = spread * torch.randn(self.experts, self.width, generator=draw)
        biases = 0.3 * torch.randn(2, self.experts, generator=draw)
        if self.bias_levels:
            biases = torch.randint(self.bias_levels, biases.shape, generator=draw) / 2.0
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "u": u.to(dtype),
            "weight": weight.to(dtype),
            "bias": biases[0].to(wide),
            "bias_image": biases[1].to(wide) if self.images else None,
            "is_image": torch.rand(self.rows, generator=draw) < 0.5 if self.images else None,
            "top_k": self.top_k,
            "route_scale": 1.5,
            "gate_temp": self.gate_temp,
        }


CASES = (
    GateCase("no rows", 0, 32, 8, 2),
    GateCase("one row", 1, 32, 8, 2),
    GateCase("one below a tile", ROW_TILE - 1, 64, 16, 3),
    GateCase("a tile", ROW_TILE, 64, 16, 3),
    GateCase("one above a tile", ROW_TILE + 1, 64, 16, 3),
    GateCase("one expert each", 7, 32, 4, 1),
    GateCase("all experts", 5, 32, 6, 6),
    GateCase("image rows", 20, 32, 8, 2, images=True),
    GateCase("all scores equal", 3, 32, 9, 4, logit_scale=0.0, bias_levels=1),
    GateCase("biases decide, many ties", 3, 32, 33, 6, logit_scale=0.0, bias_levels=3),
    GateCase("far logits", 4, 32, 8, 2, logit_scale=10.0),
    GateCase("temperature", 4, 32, 8, 2, gate_temp=2.5),
    GateCase("released gate", 2, 5120, 384, 6),
)
