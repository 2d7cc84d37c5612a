"""Sizes and hostile inputs of the sparse attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from plugins.formats.rows import RowStore, ValueRows

Sink = Literal["finite", "+inf", "-inf", "mixed"]


@dataclass(frozen=True)
class AttentionCase:
    """`holes` is the probability of a slot −1; `main_keys` None means a window-only layer.

    Stores hold twice the rows that slots name; the others, slot 0 among them, are NaN.
    """

    name: str
    rows: int
    heads: int
    width: int
    rotated: int
    window_keys: int
    main_keys: int | None
    holes: float = 0.2
    sink: Sink = "finite"
    first_position: int = 0
    query_scale: float = 1.0
    strided: bool = False

    def operands(
        self, dtype: torch.dtype, seed: int = 0
    ) -> dict[str, torch.Tensor | RowStore | float | None]:
        """Keyword operands and attributes of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        q = self.query_scale * torch.randn(self.rows, self.heads, 2 * self.width, generator=draw)
        q = q[..., ::2] if self.strided else q[..., : self.width].contiguous()
        window, window_slots = self._keys(self.window_keys, dtype, draw)
        main, main_slots = None, None
        if self.main_keys is not None:
            main, main_slots = self._keys(self.main_keys, dtype, draw)
        sink = torch.randn(self.heads, generator=draw)
        if self.sink != "finite":
            sink[:: 2 if self.sink == "mixed" else 1] = float(self.sink.replace("mixed", "-inf"))
        pair = torch.arange(self.rotated // 2, dtype=torch.float64)
        return {
            "q": q.to(dtype),
            "positions": self.first_position + torch.arange(self.rows),
            "inv_freq": 10000.0 ** (-2.0 * pair / self.rotated),
            "window": window,
            "window_slots": window_slots,
            "main": main,
            "main_slots": main_slots,
            "sink": sink.to(torch.promote_types(dtype, torch.float32)),
            "scale": self.width**-0.5,
        }

    def _keys(
        self, keys: int, dtype: torch.dtype, draw: torch.Generator
    ) -> tuple[ValueRows, torch.Tensor]:
        named = 3 * keys + 1
        values = torch.randn(2 * named, self.width, generator=draw).to(dtype)
        values[::2] = torch.nan
        slots = 2 * torch.randint(named, (self.rows, keys), generator=draw) + 1
        holes = torch.rand(slots.shape, generator=draw) < self.holes
        return ValueRows(values), slots.masked_fill(holes, -1)


CASES = (
    AttentionCase("no rows", 0, 4, 64, 16, 8, 4),
    AttentionCase("one row", 1, 4, 64, 16, 8, 4),
    AttentionCase("window only", 5, 4, 64, 16, 8, None),
    AttentionCase("no selected entry", 5, 4, 64, 16, 8, 0),
    AttentionCase("one below a key tile", 3, 2, 32, 8, 15, 15),
    AttentionCase("a key tile", 3, 2, 32, 8, 16, 16),
    AttentionCase("one above a key tile", 3, 2, 32, 8, 17, 17),
    AttentionCase("everything rotated, odd heads", 4, 3, 16, 16, 5, 3),
    AttentionCase("no key at all", 3, 4, 32, 8, 8, 4, holes=1.0),
    AttentionCase("no key, no sink", 3, 4, 32, 8, 8, 4, holes=1.0, sink="-inf"),
    AttentionCase("no sink", 3, 4, 32, 8, 8, 4, sink="-inf"),
    AttentionCase("sink takes all", 3, 4, 32, 8, 8, 4, sink="+inf"),
    AttentionCase("some heads without sink", 3, 4, 32, 8, 8, 4, sink="mixed"),
    AttentionCase("sharp scores", 3, 4, 32, 8, 8, 4, query_scale=100.0),
    AttentionCase("far positions", 3, 4, 64, 16, 8, 4, first_position=1_048_573),
    AttentionCase("strided queries", 3, 4, 32, 8, 8, 4, strided=True),
    AttentionCase("released sizes", 2, 64, 512, 64, 128, 512),
)
