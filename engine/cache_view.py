"""What the network reads and writes between steps, and nothing about where it lives.

A cache is a set of row stores (one per layer or source) plus three maps from (request, position)
to a slot of those stores. Operators receive a store and slots, so contiguous memory, shuffled
pages, packed bytes and plain values are all one code path.
See docs/adr/0002-cache-view.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from plugins.formats.records import RecordLayout
    from plugins.formats.rows import RowStore
    from plugins.indexer import KeySlots


class CacheView(Protocol):
    """The cache of the requests of one step.

    `request` arguments index the step's requests (0 … R − 1) and broadcast against the second
    argument. Every map returns int64 slots, −1 where there is no row: a negative position or
    entry, or a page that is not there. Stores drop writes to −1 and read zeros from it.

    A window row may only be read at or above the floors of the batch; below them its slot may
    belong to another request. The caller masks, the view does not.
    """

    def window(self, layer: int) -> RowStore:
        """Window rows [*, head_dim] of `layer` (backbone layers, then draft stages)."""
        ...

    def main(self, source: int) -> RowStore:
        """Compressed main KV entries [*, head_dim] of KV source `source`."""
        ...

    def index(self, source: int) -> RowStore:
        """Index keys [*, index_head_dim] of KV source `source`."""
        ...

    def tail(self, source: int) -> RowStore:
        """Compressor rows (a, b) [*, 2·head_dim] of ratio-2 source `source`, never quantised."""
        ...

    @property
    def tail_capacity(self) -> int:
        """How many of a request's newest positions the tail holds; older slots are reused."""
        ...

    @property
    def window_layout(self) -> RecordLayout | None:
        """The rounding of a window row, None with cache quantisation off. The rows of a draft
        block are never stored and still go through it."""
        ...

    @property
    def index_layout(self) -> RecordLayout | None:
        """The rounding of an index key, None with cache quantisation off. Index queries are
        rounded the same way."""
        ...

    def window_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor: ...

    def entry_slots(
        self, ratio: int, request: torch.Tensor, entry: torch.Tensor
    ) -> torch.Tensor: ...

    def tail_slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor: ...

    def key_slots(self, ratio: int, num_requests: int, num_entries: int) -> KeySlots:
        """`entry_slots` of the first entries of every request, [num_requests, num_entries]."""
        ...


def every_entry(
    cache: CacheView,
    ratio: int,
    num_requests: int,
    num_entries: int,
    device: torch.device | str,
) -> torch.Tensor:
    """`CacheView.key_slots` written down, by the view's own `entry_slots`."""
    import torch

    request = torch.arange(num_requests, device=device).unsqueeze(-1)
    return cache.entry_slots(ratio, request, torch.arange(num_entries, device=device))
