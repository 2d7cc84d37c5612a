"""Row stores: flat arrays of equal rows addressed by slot, the memory that cache operators see.

A store hides whether a row is kept as packed bytes (`PackedRows`) or as plain values
(`ValueRows`); reading returns the same numbers either way, because packing is exact once a value
has been quantised. Slot −1 means "no row": reads give zeros, writes are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from plugins.formats.records import RecordLayout


def _place(rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index of `slots` in rows [num_slots, n], or in pages [num_pages, rows_per_page, n] where
    slot = page · rows_per_page + row (a strided view: the page also holds other stores' rows)."""
    if rows.dim() == 2:
        return (slots,)
    return (slots // rows.shape[1], slots % rows.shape[1])


class RowStore(Protocol):
    """Rows [num_slots, width]. Not safe for concurrent writes to one slot in one call."""

    @property
    def width(self) -> int: ...

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows at int64 `slots` [...], as [..., width] in `dtype`; zeros where slot < 0."""
        ...

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Store `values` [n, width] at distinct int64 `slots` [n]; slots < 0 are dropped."""
        ...


class ValueRows:
    """Rows kept as values [num_slots, width] or [num_pages, rows_per_page, width].

    With `layout`, written rows first go through that record's rounding.
    """

    def __init__(self, values: torch.Tensor, layout: RecordLayout | None = None) -> None:
        self.values = values
        self.layout = layout

    @property
    def width(self) -> int:
        return int(self.values.shape[-1])

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = self.values[_place(self.values, slots.clamp(min=0))].to(dtype)
        return torch.where((slots >= 0).unsqueeze(-1), rows, rows.new_zeros(()))

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        kept = slots >= 0
        rows = values[kept]
        if self.layout is not None:
            rows = self.layout.round(rows)
        self.values[_place(self.values, slots[kept])] = rows.to(self.values.dtype)


class PackedRows:
    """Rows kept as the record's real bytes, uint8 [num_slots, bytes_per_row] or pages
    [num_pages, rows_per_page, bytes_per_row], whose bytes are in the record's order of a page."""

    def __init__(self, data: torch.Tensor, layout: RecordLayout) -> None:
        if data.dtype != torch.uint8 or data.shape[-1] != layout.bytes_per_row:
            raise ValueError(
                f"expected uint8 rows of {layout.bytes_per_row} bytes for {layout.name}, "
                f"got {data.dtype} {tuple(data.shape)}"
            )
        if layout.split and data.dim() > 2 and data.stride(-2) != layout.bytes_per_row:
            raise ValueError(
                f"expected pages of {layout.name} rows without gaps, got rows "
                f"{data.stride(-2)} bytes apart; give whole pages of {layout.bytes_per_row} a row"
            )
        self.data = data
        self.layout = layout

    @property
    def width(self) -> int:
        return self.layout.width

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        place = _place(self.data, slots.clamp(min=0))
        data, scale = (part[place] for part in self._parts())
        rows = self.layout.format.unpack(data, scale, dtype)
        return torch.where((slots >= 0).unsqueeze(-1), rows, rows.new_zeros(()))

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        kept = slots >= 0
        place = _place(self.data, slots[kept])
        packed = self.layout.pack(values[kept])
        widths = [self.layout.data_bytes, self.layout.scale_bytes]
        for part, rows in zip(self._parts(), torch.split(packed, widths, dim=-1), strict=True):
            part[place] = rows

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the data and of the scales, each shaped as `self.data` but for the last dim."""
        if self.data.dim() > 2:
            return self.layout.parts(self.data)
        data, scale = self.layout.parts(self.data.unsqueeze(1))
        return data.squeeze(1), scale.squeeze(1)


@dataclass(frozen=True)
class Region:
    """Where a store's rows lie in every page: `rows` rows of `width` values, packed or not, from
    element `offset` on. Slot = page · rows + row. A flat array is pages of one row each."""

    offset: int
    rows: int
    width: int

    def store(self, pages: torch.Tensor, record: RecordLayout | None) -> RowStore:
        """The rows over pages [num_pages, elements]: packed records in uint8, else values."""
        row = record.bytes_per_row if record and pages.dtype == torch.uint8 else self.width
        stop = self.offset + self.rows * row
        view = torch.unflatten(pages[:, self.offset : stop], 1, (self.rows, row))
        if record is not None and pages.dtype == torch.uint8:
            return PackedRows(view, record)
        return ValueRows(view, record)
