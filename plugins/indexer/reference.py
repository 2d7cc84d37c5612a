"""Index scores: how much each compressed entry matters to a query, from a few small heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plugins.formats.records import RecordLayout
from plugins.indexer.schema import (
    CANDIDATE_TOPK,
    INDEX_QUERIES,
    INDEX_SCORES,
    ROUND_QUERIES,
)
from plugins.indexer.slots import KeySlots, pages_of
from plugins.registry import operator
from plugins.rope import apply_rope
from plugins.topk_select import topk_of_blocks

if TYPE_CHECKING:
    from plugins.formats.rows import RowStore

# Every row takes part in products of one shape, [h, dk] × [dk, 512], so its bits do not depend on
# the batch. 64 rows that read different keys gather 32 MiB at 128 channels in float64.
_ROW_TILE = 64
_KEY_TILE = 512


@operator(ROUND_QUERIES)
def round_queries(queries: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """queries [T, h, dk], each head's rounded as a stored key is; same shape and dtype."""
    return layout.round(queries)


@operator(INDEX_QUERIES)
def index_queries(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    layout: RecordLayout | None,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first operands of index_scores: queries [T, h, dk] rotated by positions [T] and rounded
    as keys of `layout` are (None: not at all), and head_weights [T, h] times `scale`. inv_freq as
    in apply_rope."""
    queries = apply_rope(queries, positions, inv_freq)
    if layout is not None:
        queries = round_queries(queries, layout)
    return queries, head_weights * scale


@operator(INDEX_SCORES)
def index_scores(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: RowStore,
    key_slots: KeySlots,
    request: torch.Tensor,
    num_visible: torch.Tensor,
) -> torch.Tensor:
    """Σ_h head_weights[t, h] · max(0, queries[t, h] · key_j), [T, n] in at least float32.

    queries [T, h, dk] rotated and rounded as the keys are; head_weights [T, h] with both scales
    folded in; key_slots int64 [R, n] or pages of them, entry j of each request; request [T];
    num_visible [T], entries 0 … num_visible − 1 are scored. Columns at or beyond it, and slots −1,
    are −inf.

    Rows of one request should be neighbours: 64 rows of one request read its keys once.
    """
    slots_of = pages_of(key_slots)
    num_rows, num_keys = queries.shape[0], slots_of.count
    acc = torch.promote_types(queries.dtype, torch.float32)
    queries, head_weights = queries.to(acc), head_weights.to(acc).unsqueeze(1)
    scores = queries.new_full((num_rows, num_keys), -torch.inf)
    for row in range(0, num_rows, _ROW_TILE):
        rows = slice(row, row + _ROW_TILE)
        owners = torch.unique(request[rows])
        visible = num_visible[rows].unsqueeze(1)
        limit = min(int(visible.max()), num_keys)
        for key in range(0, limit, _KEY_TILE):
            columns = slice(key, min(key + _KEY_TILE, limit))
            width = columns.stop - columns.start
            slots = slots_of.take(owners if len(owners) == 1 else request[rows], columns)
            column = torch.arange(columns.start, columns.stop, device=slots.device)
            readable = (column < visible) & (slots >= 0)
            tile_keys = keys.read(
                torch.nn.functional.pad(slots, (0, _KEY_TILE - width), value=-1), acc
            )
            tile_keys = tile_keys.expand(visible.shape[0], -1, -1)
            products = torch.bmm(queries[rows], tile_keys.transpose(1, 2)).relu()
            tile = torch.bmm(head_weights[rows], products)[:, 0, :width]
            scores[rows, columns] = tile.masked_fill(~readable, -torch.inf)
    return scores


@operator(CANDIDATE_TOPK)
def candidate_topk(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: RowStore,
    key_slots: KeySlots,
    request: torch.Tensor,
    num_visible: torch.Tensor,
    blocks: torch.Tensor,
    *,
    k: int,
    block_size: int,
) -> torch.Tensor:
    """topk_of_blocks of index_scores: blocks int64 [T, B], entries int64 [T, min(k, n)]. A kernel
    scores the candidates alone.
    """
    scores = index_scores(queries, head_weights, keys, key_slots, request, num_visible)
    return topk_of_blocks(scores, blocks, k=k, block_size=block_size)
