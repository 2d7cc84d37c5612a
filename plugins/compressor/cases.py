"""Sizes and hostile inputs of the pair pooling."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PoolCase:
    """`gate_scale` multiplies the gate logits, `gate_shift` is added to them."""

    name: str
    pairs: int
    width: int
    gate_scale: float = 1.0
    gate_shift: float = 0.0

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        a = torch.randn(self.pairs, 2, self.width, generator=draw)
        b = self.gate_scale * torch.randn(self.pairs, 2, self.width, generator=draw)
        return {"a": a.to(dtype), "b": (b + self.gate_shift).to(dtype)}


CASES = (
    PoolCase("no pairs", 0, 64),
    PoolCase("one pair", 1, 64),
    PoolCase("odd width", 7, 33),
    PoolCase("equal logits", 3, 64, gate_scale=0.0),
    PoolCase("one token takes all", 3, 64, gate_scale=1e4),
    PoolCase("high logits", 3, 64, gate_shift=1e4),
    PoolCase("low logits", 3, 64, gate_shift=-1e4),
    PoolCase("head dim", 129, 512),
)
