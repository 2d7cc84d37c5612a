"""The reference cache: every row of every request in its own place, nothing is ever reused."""

from __future__ import annotations

import torch

from engine.cache_sizes import tail_capacity
from engine.cache_view import every_entry
from engine.config import ModelConfig
from plugins.formats.records import RecordLayout, index_record, main_record, window_record
from plugins.formats.rows import ValueRows
from plugins.indexer import KeySlots


class ContiguousCache:
    """Plain values of `dtype`; with `quantize` every written row carries its record's rounding.

    Holds positions 0 … max_length − 1 of `num_requests` requests. Writing and reading keep the
    autograd graph (rounding passes gradients straight through), so a training step may run
    through a cache made for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_requests: int,
        max_length: int,
        dtype: torch.dtype,
        *,
        quantize: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config = config
        self._num_requests = num_requests
        self._max_length = max_length
        self._dtype = dtype
        self._device = device
        self._window_layout = window_record(config.head_dim) if quantize else None
        self._main_layout = main_record(config.head_dim) if quantize else None
        self._index_layout = index_record(config.index_head_dim) if quantize else None
        self._entries = {
            source: -(-max_length // config.ratio(source)) for source in config.kv_source_layer_ids
        }
        self._main = {
            s: self._rows(n, config.head_dim, self._main_layout) for s, n in self._entries.items()
        }
        self._index = {
            s: self._rows(n, config.index_head_dim, self._index_layout)
            for s, n in self._entries.items()
        }
        self._allocate_private()

    def _allocate_private(self) -> None:
        config = self._config
        tail_dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        self._window = [
            self._rows(self._max_length, config.head_dim, self._window_layout)
            for _ in range(config.num_layers_total)
        ]
        self._tail = {
            source: self._rows(self.tail_capacity, 2 * config.head_dim, None, tail_dtype)
            for source in config.pair_source_layer_ids
        }

    def _rows(
        self,
        per_request: int,
        width: int,
        layout: RecordLayout | None,
        dtype: torch.dtype | None = None,
    ) -> ValueRows:
        shape = (self._num_requests * per_request, width)
        return ValueRows(
            torch.zeros(shape, dtype=dtype or self._dtype, device=self._device), layout
        )

    def with_fresh_private(self) -> ContiguousCache:
        """A cache that shares the global entries and has empty windows and tails: the state
        right after a prefix hit."""
        twin = object.__new__(ContiguousCache)
        twin.__dict__.update(self.__dict__)
        twin._allocate_private()
        return twin

    def window(self, layer: int) -> ValueRows:
        return self._window[layer]

    def main(self, source: int) -> ValueRows:
        return self._main[source]

    def index(self, source: int) -> ValueRows:
        return self._index[source]

    def tail(self, source: int) -> ValueRows:
        return self._tail[source]

    @property
    def tail_capacity(self) -> int:
        return tail_capacity(self._config)

    @property
    def window_layout(self) -> RecordLayout | None:
        return self._window_layout

    @property
    def index_layout(self) -> RecordLayout | None:
        return self._index_layout

    def window_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return _slots(request, position, self._max_length)

    def entry_slots(self, ratio: int, request: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        return _slots(request, entry, -(-self._max_length // ratio))

    def tail_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        ring = request * self.tail_capacity + position % self.tail_capacity
        return torch.where(position >= 0, ring, -1)

    def key_slots(self, ratio: int, num_requests: int, num_entries: int) -> KeySlots:
        return every_entry(self, ratio, num_requests, num_entries, self._device)


def _slots(request: torch.Tensor, row: torch.Tensor, per_request: int) -> torch.Tensor:
    return torch.where((row >= 0) & (row < per_request), request * per_request + row, -1)
