"""Sizes and hostile inputs of the grouped output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.linear import ROW_TILE, LinearWeight, PackedFormat
from plugins.linear.cases import packed_weight


@dataclass(frozen=True)
class WoACase:
    name: str
    rows: int
    heads: int
    head_dim: int
    groups: int
    rank: int
    quantized_input: bool = False
    strided: bool = False
    stored: PackedFormat | None = None

    def operands(
        self, dtype: torch.dtype, seed: int = 0
    ) -> dict[str, torch.Tensor | LinearWeight | int]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        width = self.head_dim * (2 if self.strided else 1)
        o = torch.randn(self.rows, self.heads, width, generator=draw).to(dtype)
        group_width = self.heads // self.groups * self.head_dim
        weight = torch.randn(self.groups * self.rank, group_width, generator=draw).to(dtype)
        kept = LinearWeight(weight, self.quantized_input)
        return {
            "o": o[..., : self.head_dim],
            "weight": kept if self.stored is None else packed_weight(weight, self.stored, dtype),
            "groups": self.groups,
        }


CASES = (
    WoACase("no rows", 0, 4, 64, 2, 32),
    WoACase("one row", 1, 4, 64, 2, 32),
    WoACase("one below a tile", ROW_TILE - 1, 4, 64, 2, 32, quantized_input=True),
    WoACase("one above a tile", ROW_TILE + 1, 4, 64, 2, 32, quantized_input=True),
    WoACase("one group", 3, 2, 32, 1, 5),
    WoACase("a group per head", 3, 4, 32, 4, 3),
    WoACase("strided heads", 6, 4, 64, 2, 32, strided=True),
)

PACKED_CASES = (
    WoACase("blocks", 3, 4, 64, 2, 32, stored=PackedFormat.FP8_BLOCKS),
    WoACase("blocks, a group per head", 2, 3, 128, 3, 64, stored=PackedFormat.FP8_BLOCKS),
    WoACase("blocks, strided", 35, 4, 64, 2, 96, strided=True, stored=PackedFormat.FP8_BLOCKS),
    WoACase("rows, odd ranks", 3, 4, 128, 2, 37, stored=PackedFormat.MXFP8),
    WoACase("NVFP4", 2, 4, 64, 2, 32, stored=PackedFormat.NVFP4),
)
