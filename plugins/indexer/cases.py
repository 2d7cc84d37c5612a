"""Sizes and hostile inputs of the index scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.rows import RowStore, ValueRows


@dataclass(frozen=True)
class IndexCase:
    """`rows` per request; a key slot is −1 with probability `holes`.

    The store holds twice the rows that slots name; the others are NaN.
    """

    name: str
    rows: tuple[int, ...]
    heads: int
    width: int
    keys: int
    holes: float = 0.0
    blind: bool = False  # nothing is visible

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | RowStore]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        num_rows, requests = sum(self.rows), len(self.rows)
        slots = 2 * torch.randperm(requests * self.keys, generator=draw) + 1
        key_slots = slots.view(requests, self.keys)
        store = torch.randn(2 * requests * self.keys + 2, self.width, generator=draw).to(dtype)
        store[::2] = torch.nan
        holes = torch.rand(key_slots.shape, generator=draw) < self.holes
        num_visible = torch.randint(0, self.keys + 1, (num_rows,), generator=draw)
        return {
            "queries": torch.randn(num_rows, self.heads, self.width, generator=draw).to(dtype),
            "head_weights": torch.randn(num_rows, self.heads, generator=draw).to(dtype),
            "keys": ValueRows(store),
            "key_slots": key_slots.masked_fill(holes, -1),
            "request": torch.repeat_interleave(
                torch.arange(requests), torch.tensor(self.rows, dtype=torch.int64)
            ),
            "num_visible": num_visible * (not self.blind),
        }


CASES = (
    IndexCase("no rows", (), 4, 32, 20),
    IndexCase("one row", (1,), 4, 32, 20),
    IndexCase("no keys", (2, 1), 4, 32, 0),
    IndexCase("nothing visible", (3, 1), 4, 32, 9, blind=True),
    IndexCase("one below a key tile", (2,), 4, 32, 511),
    IndexCase("a key tile", (2,), 4, 32, 512),
    IndexCase("one above a key tile", (2, 3), 4, 32, 513),
    IndexCase("decode rows", (1,) * 9, 16, 32, 70),
    IndexCase("one below a row tile", (63,), 2, 16, 40),
    IndexCase("rows of many requests across tiles", (60, 1, 5, 1, 70), 2, 16, 40),
    IndexCase("missing pages", (2, 2), 3, 16, 30, holes=0.4),
    IndexCase("odd sizes", (5, 2), 3, 20, 33),
    IndexCase("released heads", (2, 1), 32, 128, 600),
)
