"""Which compressed entries each row attends to: index scores, candidate blocks, top-k.

Index sources select, the layers above reuse their selection. The candidate source also publishes
blocks of candidates, and every later index source chooses among those. (Technical report, section
on CSA2.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.cache_view import CacheView
from engine.config import ModelConfig
from engine.network.rows import SegmentRows
from engine.network.weights import IndexerWeights
from plugins.formats.rows import RowStore
from plugins.indexer import KeySlots, candidate_topk, index_queries, index_scores
from plugins.linear import linear
from plugins.topk_select import candidate_blocks, topk_of_blocks, topk_select


class Selection(NamedTuple):
    """What an index source publishes for the layers above it, within one segment of one step."""

    main_slots: torch.Tensor  # [T, K] slots of the selected entries, −1 padded
    candidates: torch.Tensor | None  # [T, B] blocks, −1 padded; None until their source scored


def select(
    u: torch.Tensor,
    q_latent: torch.Tensor,
    layer: int,
    weights: IndexerWeights,
    config: ModelConfig,
    rows: SegmentRows,
    cache: CacheView,
    inv_freq: torch.Tensor,
    published: Selection | None,
) -> Selection:
    """The selection of index source `layer` for rows u [T, D], q_latent [T, q_lora_rank].

    While the longest context of the step has no more entries than the selection may hold, all
    visible ones are taken without scoring: every candidate block would be kept too, because a
    valid configuration has enough of them.
    """
    ratio = config.ratio(layer)
    num_entries = rows.key_slots[ratio].shape[1]
    num_visible = rows.num_visible[ratio]
    candidates = published.candidates if published is not None else None
    if num_entries <= config.index_topk:
        entry = torch.arange(num_entries, device=u.device)
        entries = torch.where(entry < num_visible.unsqueeze(-1), entry, -1)
    else:
        k, block_size = config.index_topk, config.candidate_block_size
        scored = _scored(u, q_latent, layer, weights, config, rows, cache, inv_freq)
        if candidates is None:
            scores = index_scores(*scored)
            num_blocks = 0
            if layer == config.candidate_source_layer_id:
                num_blocks = config.candidate_topk_blocks
                candidates = candidate_blocks(
                    scores, num_visible, block_size=block_size, num_blocks=num_blocks
                )
            is_known = not torch.compiler.is_exporting()  # how many entries there are
            fewer = is_known and k < num_blocks < num_entries // (2 * block_size)
            if candidates is not None and fewer:
                # The same entries, found among fewer columns.
                entries = topk_of_blocks(scores, candidates, k=k, block_size=block_size)
            else:
                entries = topk_select(scores, k)
        else:
            entries = candidate_topk(*scored, candidates, k=k, block_size=block_size)
    return Selection(cache.entry_slots(ratio, rows.request.unsqueeze(-1), entries), candidates)


def _scored(
    u: torch.Tensor,
    q_latent: torch.Tensor,
    layer: int,
    weights: IndexerWeights,
    config: ModelConfig,
    rows: SegmentRows,
    cache: CacheView,
    inv_freq: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, RowStore, KeySlots, torch.Tensor, torch.Tensor]:
    """The operands of index_scores."""
    heads, width = config.index_n_heads, config.index_head_dim
    ratio, source = config.ratio(layer), config.kv_source(layer)
    assert source is not None, "an index source has a KV source"
    queries = torch.unflatten(linear(q_latent, weights.wq_b), -1, (heads, width))
    queries, head_weights = index_queries(
        queries,
        linear(u, weights.weights_proj),
        rows.positions,
        inv_freq,
        cache.index_layout,
        scale=width**-0.5 * heads**-0.5,
    )
    return (
        queries,
        head_weights,
        cache.index(source),
        rows.key_slots[ratio],
        rows.request,
        rows.num_visible[ratio],
    )
