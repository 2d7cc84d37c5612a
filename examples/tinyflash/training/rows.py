"""Cache rows for training: every row of a batch written once, whole, and kept in the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.batch import RaggedBatch
from engine.cache_sizes import tail_capacity
from engine.cache_view import every_entry
from engine.config import ModelConfig
from plugins.formats.records import RecordLayout, index_record, main_record, window_record
from plugins.indexer import KeySlots

# Layout name → an equivalent of its rounding that is faster on a CUDA device.
FUSED_ROUNDING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def round_rows(layout: RecordLayout, values: torch.Tensor) -> torch.Tensor:
    """layout.round(values), by its fused equivalent where one is installed."""
    fused = FUSED_ROUNDING.get(layout.name) if values.is_cuda else None
    return layout.round(values) if fused is None else fused(values)


class DirectRows:
    """A row store of `num_rows` rows whose one write replaces it.

    Reads gather with index_select, whose gradient is an atomic sum; indexing would sort.
    """

    def __init__(
        self, values: torch.Tensor, layout: RecordLayout | None = None, num_rows: int = 0
    ) -> None:
        self.values = values
        self.layout = layout
        self.num_rows = num_rows

    @property
    def width(self) -> int:
        return int(self.values.shape[-1])

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = self.values.index_select(0, slots.clamp(min=0).flatten())
        rows = rows.view(*slots.shape, -1).to(dtype)
        return torch.where((slots >= 0).unsqueeze(-1), rows, rows.new_zeros(()))

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the store: `values` [n, width] are rows `slots` [n], all rows when n is their
        number; the others read as zeros."""
        rows = values if self.layout is None else round_rows(self.layout, values)
        if len(rows) < self.num_rows:
            empty = rows.new_zeros(self.num_rows, rows.shape[1])
            rows = empty.index_copy(0, slots, rows)
        self.values = rows


class TrainingCache:
    """The cache view of whole conversations from position 0, each of even length.

    Window rows and entries are numbered through the batch: request r's position p is row
    query_start[r] + p, its entry e of ratio 2 is query_start[r] / 2 + e.
    """

    def __init__(self, config: ModelConfig, batch: RaggedBatch, dtype: torch.dtype) -> None:
        self._start = batch.query_start
        self._end = batch.query_start[1:] - batch.query_start[:-1]
        self.tail_capacity = tail_capacity(config)
        self.window_layout: RecordLayout | None = window_record(config.head_dim)
        self.index_layout: RecordLayout | None = index_record(config.index_head_dim)
        device = batch.tokens.device

        def rows(width: int, layout: RecordLayout | None, num_rows: int = 0) -> DirectRows:
            return DirectRows(torch.zeros(0, width, dtype=dtype, device=device), layout, num_rows)

        self._window = [
            rows(config.head_dim, self.window_layout, batch.num_rows)
            for _ in range(config.num_layers_total)
        ]
        sources = config.kv_source_layer_ids
        self._main = {s: rows(config.head_dim, main_record(config.head_dim)) for s in sources}
        self._index = {s: rows(config.index_head_dim, self.index_layout) for s in sources}
        self._tail = {s: rows(2 * config.head_dim, None) for s in config.pair_source_layer_ids}

    def window(self, layer: int) -> DirectRows:
        return self._window[layer]

    def main(self, source: int) -> DirectRows:
        return self._main[source]

    def index(self, source: int) -> DirectRows:
        return self._index[source]

    def tail(self, source: int) -> DirectRows:
        return self._tail[source]

    def window_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        inside = (position >= 0) & (position < self._end[request])
        return torch.where(inside, self._start[request] + position, -1)

    def entry_slots(self, ratio: int, request: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        inside = (entry >= 0) & (entry < self._end[request] // ratio)
        return torch.where(inside, self._start[request] // ratio + entry, -1)

    def tail_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return torch.full_like(request + position, -1)

    def key_slots(self, ratio: int, num_requests: int, num_entries: int) -> KeySlots:
        return every_entry(self, ratio, num_requests, num_entries, self._start.device)
