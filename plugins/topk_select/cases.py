"""Sizes and hostile inputs of the selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Values = Literal["distinct", "few values", "zeros", "infinities", "nothing readable", "NaN"]


@dataclass(frozen=True)
class SelectCase:
    """Row t sees a random number of its columns; the rest is −inf."""

    name: str
    rows: int
    columns: int
    k: int
    block_size: int = 8
    num_blocks: int = 4
    values: Values = "distinct"

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
        """scores [T, n] and num_visible [T], on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        shape = (self.rows, self.columns)
        scores = torch.randn(shape, generator=draw)
        if self.values == "few values":
            scores = torch.randint(-2, 3, shape, generator=draw).float()
        elif self.values == "zeros":
            scores = torch.zeros(shape) * torch.randint(-1, 2, shape, generator=draw).sign()
        elif self.values == "infinities":
            pick = torch.randint(3, shape, generator=draw)
            scores = torch.tensor([-torch.inf, 0.0, torch.inf])[pick]
        elif self.values == "NaN":
            scores = scores.masked_fill(torch.rand(shape, generator=draw) < 0.5, torch.nan)
        num_visible = torch.randint(0, self.columns + 1, (self.rows,), generator=draw)
        if self.values == "nothing readable":
            num_visible = torch.zeros_like(num_visible)
        hidden = torch.arange(self.columns) >= num_visible.unsqueeze(1)
        return {
            "scores": scores.masked_fill(hidden, -torch.inf).to(dtype),
            "num_visible": num_visible,
        }


CASES = (
    SelectCase("no rows", 0, 16, 4),
    SelectCase("no columns", 3, 0, 4),
    SelectCase("one column", 2, 1, 4),
    SelectCase("k above the columns", 4, 7, 9),
    SelectCase("k equals the columns", 4, 9, 9, num_blocks=2),
    SelectCase("distinct", 9, 70, 5),
    SelectCase("few values", 9, 70, 12, values="few values"),
    SelectCase("signed zeros", 5, 70, 6, values="zeros"),
    SelectCase("infinities", 9, 70, 20, values="infinities"),
    SelectCase("NaN counts as unreadable", 9, 70, 20, values="NaN"),
    SelectCase("nothing readable", 3, 20, 4, values="nothing readable"),
    SelectCase("more rows than a tile", 130, 33, 4, block_size=2, values="few values"),
    SelectCase("ragged last block", 6, 37, 8, block_size=8, num_blocks=3),
    SelectCase("released sizes", 3, 20000, 512, num_blocks=2048),
)
