"""Sizes and hostile inputs of the mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from plugins.linear.tiles import ROW_TILE
from plugins.moe.reference import ExpertWeights

Spread = Literal["random", "one expert", "highest first"]


@dataclass(frozen=True)
class MoeCase:
    name: str
    rows: int
    width: int
    inter: int
    experts: int
    top_k: int
    shared: int = 1
    quantized_input: bool = False
    swiglu_limit: float = 1.0
    spread: Spread = "random"

    def operands(
        self, dtype: torch.dtype, seed: int = 0
    ) -> dict[str, torch.Tensor | ExpertWeights | float]:
        """Keyword operands and attributes of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        order = torch.rand(self.rows, self.experts, generator=draw).argsort(dim=1)
        if self.spread == "one expert":
            order = torch.arange(self.experts).flip(0).expand(self.rows, -1)
        elif self.spread == "highest first":
            order = order.sort(dim=1, descending=True).values
        return {
            "u": torch.randn(self.rows, self.width, generator=draw).to(dtype),
            "ids": order[:, : self.top_k].contiguous(),
            "weights": torch.rand(self.rows, self.top_k, generator=draw).to(
                torch.promote_types(dtype, torch.float32)
            ),
            "routed": self._experts(self.experts, dtype, draw),
            "shared": self._experts(self.shared, dtype, draw),
            "swiglu_limit": self.swiglu_limit,
        }

    def _experts(self, count: int, dtype: torch.dtype, draw: torch.Generator) -> ExpertWeights:
        D, inner = self.width, self.inter
        w1, w3 = (D**-0.5 * torch.randn(2, count, inner, D, generator=draw)).to(dtype).unbind(0)
        w2 = (inner**-0.5 * torch.randn(count, D, inner, generator=draw)).to(dtype)
        return ExpertWeights(w1, w3, w2, self.quantized_input)


CASES = (
    MoeCase("no rows", 0, 32, 32, 4, 2),
    MoeCase("one row", 1, 64, 32, 8, 2, quantized_input=True),
    MoeCase("one below a tile", ROW_TILE - 1, 64, 32, 4, 2),
    MoeCase("one above a tile, one expert", ROW_TILE + 1, 64, 32, 4, 2, spread="one expert"),
    MoeCase("ids descend", 9, 64, 32, 8, 3, spread="highest first"),
    MoeCase("one expert each", 12, 64, 64, 4, 1, quantized_input=True),
    MoeCase("all experts", 3, 32, 64, 5, 5),
    MoeCase("two shared experts", 6, 64, 32, 4, 2, shared=2),
    MoeCase("clamps act everywhere", 5, 32, 32, 4, 2, swiglu_limit=1e-3),
    MoeCase("clamps never act", 5, 32, 32, 4, 2, swiglu_limit=1e4),
    MoeCase("many groups", 2, 256, 576, 4, 2, quantized_input=True, swiglu_limit=10.0),
)
