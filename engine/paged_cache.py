"""The serving cache: two pools of pages and one ring of compressor rows per slot.

A page is one contiguous region, so that it can be moved as one: a window page holds
`window_page_rows` rows of every layer, a global page the main entries and index keys of every
source for `global_page_tokens` positions, each kind in a region of its own:

    window page   [layers + draft stages, window_page_rows, row]
    global page   source by source: [entries, main row] then [entries, index codes and scales]

With cache quantisation on a row is the record's bytes, otherwise plain values. Page 0 of either
pool is the null page: never written, never read. The tables belong to the pools' owner; a
`PagedCache` is the view of one step's requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.cache_sizes import global_page_bytes, tail_bytes, tail_capacity, window_page_bytes
from engine.cache_view import every_entry
from engine.config import ModelConfig
from plugins.formats.records import RecordLayout, index_record, main_record, window_record
from plugins.formats.rows import Region, RowStore
from plugins.indexer import KeySlots, PagedSlots
from plugins.registry import runs_kernels


class PoolLayout:
    """Where the rows of every layer and source lie in a page of their pool.

    With `quantize` pages hold packed records (bytes), otherwise values; offsets count elements of
    either. Raises ValueError when pages would split a pair.
    """

    def __init__(
        self, config: ModelConfig, *, global_page_tokens: int, window_page_rows: int, quantize: bool
    ) -> None:
        self.config = config
        self.global_page_tokens = global_page_tokens
        self.window_page_rows = window_page_rows
        self.main_layout = main_record(config.head_dim) if quantize else None
        self.index_layout = index_record(config.index_head_dim) if quantize else None
        self.window_layout = window_record(config.head_dim) if quantize else None
        unit = None if quantize else 1
        self.global_page_elements = global_page_bytes(config, global_page_tokens, value_bytes=unit)
        self.window_page_elements = window_page_bytes(config, window_page_rows, value_bytes=unit)
        self.tail_elements = tail_bytes(config, value_bytes=1)
        self.main: dict[int, Region] = {}
        self.index: dict[int, Region] = {}
        offset = 0
        for source in config.kv_source_layer_ids:
            entries = global_page_tokens // config.ratio(source)
            for regions, width, layout in (
                (self.main, config.head_dim, self.main_layout),
                (self.index, config.index_head_dim, self.index_layout),
            ):
                regions[source] = Region(offset, entries, width)
                offset += entries * (width if layout is None else layout.bytes_per_row)
        layer_elements = self.window_page_elements // config.num_layers_total
        self.window = [
            Region(layer * layer_elements, window_page_rows, config.head_dim)
            for layer in range(config.num_layers_total)
        ]
        ring = tail_capacity(config)
        self.tail = {
            source: Region(i * ring * 2 * config.head_dim, ring, 2 * config.head_dim)
            for i, source in enumerate(config.pair_source_layer_ids)
        }


class CachePools:
    """The memory behind all requests. Pages are handed out by the owner of the page tables.

    `num_global_pages` and `num_window_pages` count the null page. With `quantize` the pools hold
    packed records (uint8), otherwise values of `dtype`; compressor tails are float32, or float64
    for a float64 network. Raises ValueError when pages would split a pair.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_global_pages: int,
        num_window_pages: int,
        num_slots: int,
        global_page_tokens: int,
        window_page_rows: int,
        dtype: torch.dtype,
        quantize: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = PoolLayout(
            config,
            global_page_tokens=global_page_tokens,
            window_page_rows=window_page_rows,
            quantize=quantize,
        )

        def zeros(rows: int, elements: int, kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, elements, dtype=kind, device=device)

        stored = torch.uint8 if quantize else dtype
        tail_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.global_pages = zeros(num_global_pages, self.layout.global_page_elements, stored)
        self.window_pages = zeros(num_window_pages, self.layout.window_page_elements, stored)
        self.tails = zeros(num_slots, self.layout.tail_elements, tail_dtype)
        layout, pages = self.layout, self.global_pages
        self._main = {s: r.store(pages, layout.main_layout) for s, r in layout.main.items()}
        self._index = {s: r.store(pages, layout.index_layout) for s, r in layout.index.items()}
        self._window = [r.store(self.window_pages, layout.window_layout) for r in layout.window]
        self._tail = {s: r.store(self.tails, None) for s, r in layout.tail.items()}

    @property
    def num_bytes(self) -> int:
        return self.global_pages.nbytes + self.window_pages.nbytes + self.tails.nbytes

    def window(self, layer: int) -> RowStore:
        return self._window[layer]

    def main(self, source: int) -> RowStore:
        return self._main[source]

    def index(self, source: int) -> RowStore:
        return self._index[source]

    def tail(self, source: int) -> RowStore:
        return self._tail[source]


@dataclass(frozen=True)
class StepTables:
    """The page tables of one step's requests, integer tensors on the pools' device.

    `global_pages[r, p // global_page_tokens]` is the page of position p's entries,
    `window_pages[r, (p // window_page_rows) % columns]` the page of its window row: a ring of
    columns, because rows below the window are gone. 0 is "no page".
    """

    slots: torch.Tensor  # [R] slot of each request, for the compressor tails
    global_pages: torch.Tensor  # [R, global columns]
    window_pages: torch.Tensor  # [R, window columns]


class Pools(Protocol):
    """The stores of all requests: memory, or tensors of a graph."""

    @property
    def layout(self) -> PoolLayout: ...

    def window(self, layer: int) -> RowStore: ...

    def main(self, source: int) -> RowStore: ...

    def index(self, source: int) -> RowStore: ...

    def tail(self, source: int) -> RowStore: ...


class PagedCache:
    """The CacheView of one step over `pools`.

    The tables' owner must keep every page alive that the step reads or writes: all of a request's
    rows of the step plus the window before the first one must fit in its ring of columns.
    """

    def __init__(self, pools: Pools, tables: StepTables) -> None:
        self._pools = pools
        self._tables = tables

    def window(self, layer: int) -> RowStore:
        return self._pools.window(layer)

    def main(self, source: int) -> RowStore:
        return self._pools.main(source)

    def index(self, source: int) -> RowStore:
        return self._pools.index(source)

    def tail(self, source: int) -> RowStore:
        return self._pools.tail(source)

    @property
    def tail_capacity(self) -> int:
        return tail_capacity(self._pools.layout.config)

    @property
    def window_layout(self) -> RecordLayout | None:
        return self._pools.layout.window_layout

    @property
    def index_layout(self) -> RecordLayout | None:
        return self._pools.layout.index_layout

    def window_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        rows, table = self._pools.layout.window_page_rows, self._tables.window_pages
        if runs_kernels(table):
            return _in_one_launch(table, request, position, rows, ring=True)
        column = (position // rows) % table.shape[1]
        return _page_slots(table[request, column], position, rows)

    def entry_slots(self, ratio: int, request: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        rows, table = self._pools.layout.global_page_tokens // ratio, self._tables.global_pages
        if runs_kernels(table):
            return _in_one_launch(table, request, entry, rows, ring=False)
        column = entry // rows
        page = table[request, column.clamp(0, table.shape[1] - 1)]
        page = torch.where(column < table.shape[1], page, 0)
        return _page_slots(page, entry, rows)

    def key_slots(self, ratio: int, num_requests: int, num_entries: int) -> KeySlots:
        """Pages on a device, whose kernels look them up: written down, the slots of long contexts
        are an eighth of the bytes of the keys, and several passes over them."""
        rows, table = self._pools.layout.global_page_tokens // ratio, self._tables.global_pages
        if not runs_kernels(table):
            return every_entry(self, ratio, num_requests, num_entries, table.device)
        from plugins.device.pages import first_slots

        width = max(table.shape[1], -(-num_entries // rows))
        return PagedSlots(first_slots(table, rows, width), rows, num_entries)

    def tail_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        capacity, slots = self.tail_capacity, self._tables.slots
        if runs_kernels(slots):
            from plugins.device.pages import tail_slots

            made: torch.Tensor = tail_slots(slots, request, position, capacity)
            return made
        ring = slots[request].long() * capacity + position % capacity
        return torch.where(position >= 0, ring, -1)


def _in_one_launch(
    table: torch.Tensor, request: torch.Tensor, row: torch.Tensor, rows_per_page: int, *, ring: bool
) -> torch.Tensor:
    """request [T] or [T, 1], row [T] or [T, n]."""
    from plugins.device.pages import page_slots

    slots: torch.Tensor = page_slots(table, request.flatten(), row, rows_per_page, ring=ring)
    return slots


def _page_slots(page: torch.Tensor, row: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    slots = page.long() * rows_per_page + row % rows_per_page
    return torch.where((row >= 0) & (page > 0), slots, -1)
