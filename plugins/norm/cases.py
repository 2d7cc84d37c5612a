"""Sizes and hostile inputs of the RMS normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NormCase:
    name: str
    shape: tuple[int, ...]
    scale: float = 1.0
    strided: bool = False

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | float]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        width = self.shape[-1]
        x = torch.randn(*self.shape[:-1], 2 * width, generator=draw) * self.scale
        x = x[..., ::2] if self.strided else x[..., :width].contiguous()
        weight = 1.0 + 0.1 * torch.randn(width, generator=draw)
        return {"x": x.to(dtype), "weight": weight.to(dtype), "eps": 1e-20}


CASES = (
    NormCase("no rows", (0, 64)),
    NormCase("one row", (1, 64)),
    NormCase("heads", (3, 4, 64)),
    NormCase("odd width", (7, 33)),
    NormCase("zeros", (2, 64), scale=0.0),
    NormCase("tiny", (2, 64), scale=1e-12),
    NormCase("large", (2, 64), scale=1e15),
    NormCase("strided", (5, 64), strided=True),
    NormCase("hidden size", (2, 5120)),
)
