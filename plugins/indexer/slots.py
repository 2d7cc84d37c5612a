"""Slots of all entries of all requests, without writing them down."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedSlots:
    """Slots [R, count]: entry j of a request is row j % rows_per_page of its page
    j // rows_per_page. A long context has more entries than its scores have bytes to spare."""

    # int64 [R, pages] slot of each page's first row, a multiple of rows_per_page; −1 for no page.
    first: torch.Tensor
    rows_per_page: int
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.first.shape[0], self.count

    def take(self, request: torch.Tensor, columns: slice) -> torch.Tensor:
        """Slots [n, columns] of requests int64 [n], −1 where there is none."""
        if self.rows_per_page == 1:
            return self.first[request, columns]
        entry = torch.arange(columns.start, columns.stop, device=self.first.device)
        first = self.first[request][:, entry // self.rows_per_page]
        return torch.where(first >= 0, first + entry % self.rows_per_page, -1)


# Slots −1 where there is none; or pages of them.
KeySlots = torch.Tensor | PagedSlots


def pages_of(slots: KeySlots) -> PagedSlots:
    """Plain slots are pages of one row."""
    if isinstance(slots, PagedSlots):
        return slots
    return PagedSlots(slots, 1, slots.shape[1])
