"""Index scores on a device: as few and as large products as memory allows.

Rows of a request with many rows in the step (prefill) read its keys once; the others (decoding)
gather their keys row by row. Bits may depend on the batch, as products on a device do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from plugins.formats.rows import RowStore

# A run of fewer rows of one request is scored together with other requests' rows.
_LONG_RUN = 32
# Elements of the largest intermediate, products per head or gathered keys.
_TILE_ELEMENTS = 1 << 28


def index_scores(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: RowStore,
    key_slots: torch.Tensor,
    request: torch.Tensor,
    num_visible: torch.Tensor,
) -> torch.Tensor:
    """As the reference, whose arguments and result these are."""
    acc = torch.promote_types(queries.dtype, torch.float32)
    queries, head_weights = queries.to(acc), head_weights.to(acc).unsqueeze(1)
    scores = queries.new_full((queries.shape[0], key_slots.shape[1]), -torch.inf)
    owners, runs, limits = _runs(request, num_visible, key_slots.shape[1])
    heads, width = queries.shape[1:]
    short: list[int] = []
    start = 0
    for owner, count, limit in zip(owners, runs, limits, strict=True):
        rows = range(start, start + count)
        start += count
        if count < _LONG_RUN:
            short += rows
            continue
        slots = key_slots[owner, :limit]
        run_keys = keys.read(slots, acc).T
        tile = max(1, _TILE_ELEMENTS // (heads * max(limit, 1)))
        for first in range(rows.start, rows.stop, tile):
            part = slice(first, min(first + tile, rows.stop))
            products = (queries[part].flatten(0, 1) @ run_keys).relu_()
            products = products.view(-1, heads, limit)
            _put(scores, part, head_weights[part], products, slots, num_visible[part])
    limit = max((limits[i] for i, count in enumerate(runs) if count < _LONG_RUN), default=0)
    tile = max(1, _TILE_ELEMENTS // max(1, limit * max(heads, width)))
    picked = torch.tensor(short, dtype=torch.int64, device=request.device)
    for rows_of_tile in torch.split(picked, tile):
        slots = key_slots[request[rows_of_tile], :limit]
        row_keys = keys.read(slots, acc)
        products = torch.bmm(queries[rows_of_tile], row_keys.transpose(1, 2)).relu_()
        weights, visible = head_weights[rows_of_tile], num_visible[rows_of_tile]
        _put(scores, rows_of_tile, weights, products, slots, visible)
    return scores


def _runs(
    request: torch.Tensor, num_visible: torch.Tensor, num_keys: int
) -> tuple[list[int], list[int], list[int]]:
    """Neighbouring rows of one request: the request, how many rows, the most entries seen."""
    owners, run, counts = torch.unique_consecutive(request, return_inverse=True, return_counts=True)
    limits = torch.zeros_like(owners).scatter_reduce(0, run, num_visible, "amax")
    host: list[list[int]] = torch.stack([owners, counts, limits.clamp(max=num_keys)]).tolist()
    return host[0], host[1], host[2]


def _put(
    scores: torch.Tensor,
    rows: slice | torch.Tensor,
    head_weights: torch.Tensor,
    products: torch.Tensor,
    slots: torch.Tensor,
    num_visible: torch.Tensor,
) -> None:
    """Sum products [t, h, n] over heads into the scores of `rows`; slots [n] or [t, n]."""
    limit = slots.shape[-1]
    tile = torch.bmm(head_weights, products)[:, 0]
    column = torch.arange(limit, device=slots.device)
    readable = (column < num_visible.unsqueeze(1)) & (slots >= 0)
    scores[rows, :limit] = tile.masked_fill(~readable, -torch.inf)
