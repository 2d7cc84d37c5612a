"""Sizes and hostile inputs of the rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeCase:
    """`lead` are the dims between rows and channels; positions start at `first_position`."""

    name: str
    rows: int
    width: int
    rotated: int
    lead: tuple[int, ...] = ()
    first_position: int = 0
    inverse: bool = False

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | bool]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, *self.lead, self.width, generator=draw).to(dtype)
        pair = torch.arange(self.rotated // 2, dtype=torch.float64)
        return {
            "x": x,
            "positions": self.first_position + torch.arange(self.rows),
            "inv_freq": 160000.0 ** (-2.0 * pair / self.rotated),
            "inverse": self.inverse,
        }


CASES = (
    RopeCase("no rows", 0, 64, 16),
    RopeCase("one row at zero", 1, 64, 16),
    RopeCase("heads", 5, 64, 16, lead=(4,)),
    RopeCase("inverse", 5, 64, 16, lead=(4,), inverse=True),
    RopeCase("all dims", 3, 16, 16),
    RopeCase("last position", 2, 512, 64, first_position=1_048_574),
)
