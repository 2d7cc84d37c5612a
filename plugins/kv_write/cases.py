"""Sizes and hostile inputs of the cache write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plugins.formats.records import RecordLayout, index_record, main_record, window_record
from plugins.formats.rows import PackedRows


@dataclass(frozen=True)
class KvWriteCase:
    """`slots` index a store of `num_slots` packed rows whose bytes start as 0xA5."""

    name: str
    record: Callable[[int], RecordLayout]
    width: int
    slots: tuple[int, ...]
    num_slots: int = 8

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | PackedRows]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        layout = self.record(self.width)
        values = torch.randn(len(self.slots), self.width, generator=draw).to(dtype)
        data = torch.full((self.num_slots, layout.bytes_per_row), 0xA5, dtype=torch.uint8)
        slots = torch.tensor(self.slots, dtype=torch.int64)
        return {"values": values, "rows": PackedRows(data, layout), "slots": slots}


CASES = (
    KvWriteCase("no rows", main_record, 64, ()),
    KvWriteCase("all dropped", main_record, 64, (-1, -1)),
    KvWriteCase("shuffled with drops", main_record, 512, (5, -1, 0, 7, -1, 2)),
    KvWriteCase("window", window_record, 512, (3, 4, 5, 6)),
    KvWriteCase("index", index_record, 128, (1, -1, 0)),
)
