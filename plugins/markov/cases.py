"""Sizes and hostile inputs of the greedy choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MarkovCase:
    """With `rows` of at least six: many ties, zeros of both signs, −inf alone, NaN."""

    name: str
    rows: int
    vocab: int
    rank: int = 24

    def operands(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Keyword operands of the operator, on the CPU; `dtype` is the embedding's."""
        draw = torch.Generator().manual_seed(self.vocab)
        size, wide = (self.rows, self.vocab), torch.promote_types(dtype, torch.float32)
        base = torch.randint(-3, 3, (self.rows, 2, self.vocab), generator=draw).to(wide)[:, 1]
        correction = torch.randint(-3, 3, size, generator=draw).to(wide)
        if self.rows >= 6:
            correction[1] = -base[1]  # all zeros
            base[1, ::2], correction[1, ::2] = -0.0, -0.0
            base[2], base[3, 5], base[3, 2], base[4] = -math.inf, math.nan, math.inf, -math.inf
            base[3, 6] = math.nan
            base[4, self.vocab - 1] = -1e30
        embed = torch.randn(self.vocab, self.rank, generator=draw).to(dtype)
        return {"base": base, "correction": correction, "embed": embed}


CASES = (
    MarkovCase("no rows", 0, 9, 4),
    MarkovCase("part of a program", 6, 7),
    MarkovCase("a program", 6, 2048),
    MarkovCase("several programs", 6, 6001),
)
