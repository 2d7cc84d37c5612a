"""Sizes and hostile inputs of the ratio-2 compressor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.rows import RowStore, ValueRows


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


@dataclass(frozen=True)
class PreviousCase:
    """`rows` per request. The tail is a ring of `capacity` slots per request, filled; request r's
    first row stands at position `first[r]`, at 0 without a row before it."""

    name: str
    rows: tuple[int, ...]
    first: tuple[int, ...]
    width: int = 6
    capacity: int = 4

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | RowStore]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        counts, first = torch.tensor(self.rows), torch.tensor(self.first)
        request = torch.repeat_interleave(torch.arange(len(self.rows)), counts)
        offset = torch.cat([torch.arange(count) for count in self.rows])
        ring = request * self.capacity + (first[request] + offset) % self.capacity
        newest = offset >= (counts - self.capacity)[request]
        before = torch.arange(len(self.rows)) * self.capacity + (first - 1) % self.capacity
        tail = torch.randn(len(self.rows) * self.capacity, self.width, generator=draw)
        return {
            "current": torch.randn(len(request), self.width, generator=draw).to(dtype),
            "tail": ValueRows(tail.to(dtype)),
            "request": request,
            "is_first": offset == 0,
            "read_slots": torch.where(first > 0, before, -1),
            "write_slots": torch.where(newest, ring, -1),
        }


PREVIOUS_CASES = (
    PreviousCase("no rows", (0,), (0,)),
    PreviousCase("one row at the start", (1,), (0,)),
    PreviousCase("decode rows", (1, 1, 1), (5, 1, 0)),
    PreviousCase("a chunk longer than the ring overwrites what it reads", (9,), (3,)),
    PreviousCase("ragged", (3, 1, 6), (2, 7, 0)),
)
