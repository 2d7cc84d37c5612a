"""The serving cache: two pools of pages and one ring of compressor rows per slot.

A page is one contiguous region, so that it can be moved as one: a window page holds
`window_page_rows` rows of every layer, a global page the main entries and index keys of every
source for `global_page_tokens` positions, each kind in a region of its own:

    window page   [layers + draft stages, window_page_rows, row]
    global page   source by source: [entries, main row] then [entries, index row]

With cache quantisation on a row is the record's bytes, otherwise plain values. Page 0 of either
pool is the null page: never written, never read. The tables belong to the pools' owner; a
`PagedCache` is the view of one step's requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache_sizes import global_page_bytes, tail_bytes, tail_capacity, window_page_bytes
from engine.config import ModelConfig
from plugins.formats.records import RecordLayout, index_record, main_record, window_record
from plugins.formats.rows import PackedRows, RowStore, ValueRows


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
        self.config = config
        self.global_page_tokens = global_page_tokens
        self.window_page_rows = window_page_rows
        self.window_layout = window_record(config.head_dim) if quantize else None
        self.index_layout = index_record(config.index_head_dim) if quantize else None
        self._main_layout = main_record(config.head_dim) if quantize else None

        stored = torch.uint8 if quantize else dtype
        value_bytes = None if quantize else dtype.itemsize
        tail_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.global_page_bytes = global_page_bytes(
            config, global_page_tokens, value_bytes=value_bytes
        )
        self.window_page_bytes = window_page_bytes(
            config, window_page_rows, value_bytes=value_bytes
        )
        self.tail_bytes = tail_bytes(config, value_bytes=tail_dtype.itemsize)

        def zeros(rows: int, num_bytes: int, kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, num_bytes // kind.itemsize, dtype=kind, device=device)

        self.global_pages = zeros(num_global_pages, self.global_page_bytes, stored)
        self.window_pages = zeros(num_window_pages, self.window_page_bytes, stored)
        self.tails = zeros(num_slots, self.tail_bytes, tail_dtype)
        self._main, self._index = self._global_stores()
        self._window = self._window_stores()
        self._tail = self._tail_stores()

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

    def _global_stores(self) -> tuple[dict[int, RowStore], dict[int, RowStore]]:
        main: dict[int, RowStore] = {}
        index: dict[int, RowStore] = {}
        offset = 0
        for source in self.config.kv_source_layer_ids:
            entries = self.global_page_tokens // self.config.ratio(source)
            for stores, width, layout in (
                (main, self.config.head_dim, self._main_layout),
                (index, self.config.index_head_dim, self.index_layout),
            ):
                row = width if layout is None else layout.bytes_per_row
                region = self.global_pages[:, offset : offset + entries * row]
                stores[source] = _store(torch.unflatten(region, 1, (entries, row)), layout)
                offset += entries * row
        return main, index

    def _window_stores(self) -> list[RowStore]:
        layers, rows = self.config.num_layers_total, self.window_page_rows
        pages = torch.unflatten(self.window_pages, 1, (layers, rows, -1))
        return [_store(pages[:, layer], self.window_layout) for layer in range(layers)]

    def _tail_stores(self) -> dict[int, RowStore]:
        sources = self.config.pair_source_layer_ids
        if not sources:
            return {}
        rings = torch.unflatten(self.tails, 1, (len(sources), tail_capacity(self.config), -1))
        return {source: _store(rings[:, i], None) for i, source in enumerate(sources)}


def _store(pages: torch.Tensor, layout: RecordLayout | None) -> RowStore:
    return ValueRows(pages) if layout is None else PackedRows(pages, layout)


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


class PagedCache:
    """The CacheView of one step over `pools`.

    The tables' owner must keep every page alive that the step reads or writes: all of a request's
    rows of the step plus the window before the first one must fit in its ring of columns.
    """

    def __init__(self, pools: CachePools, tables: StepTables) -> None:
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
        return tail_capacity(self._pools.config)

    @property
    def window_layout(self) -> RecordLayout | None:
        return self._pools.window_layout

    @property
    def index_layout(self) -> RecordLayout | None:
        return self._pools.index_layout

    def window_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        rows, table = self._pools.window_page_rows, self._tables.window_pages
        column = (position // rows) % table.shape[1]
        return _page_slots(table[request, column], position, rows)

    def entry_slots(self, ratio: int, request: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        rows, table = self._pools.global_page_tokens // ratio, self._tables.global_pages
        column = entry // rows
        page = table[request, column.clamp(0, table.shape[1] - 1)]
        page = torch.where(column < table.shape[1], page, 0)
        return _page_slots(page, entry, rows)

    def tail_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        capacity = self.tail_capacity
        ring = self._tables.slots[request].long() * capacity + position % capacity
        return torch.where(position >= 0, ring, -1)


def _page_slots(page: torch.Tensor, row: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    slots = page.long() * rows_per_page + row % rows_per_page
    return torch.where((row >= 0) & (page > 0), slots, -1)
