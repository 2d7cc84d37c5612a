"""The attention block: low-rank queries, one latent for key and value, grouped output."""

from __future__ import annotations

import torch

from engine.cache_view import CacheView
from engine.config import ModelConfig
from engine.network.rows import SegmentRows
from engine.network.select import Selection, select
from engine.network.weights import AttentionWeights
from plugins.formats.rows import RowStore
from plugins.kv_write import norm_and_write, rotated_write
from plugins.linear import linear, linear_pair
from plugins.mega_attention import mega_attention
from plugins.wo_a import wo_a


def write_window(
    x: torch.Tensor,
    weights: AttentionWeights,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    window: RowStore,
    slots: torch.Tensor,
    eps: float,
) -> None:
    """The window rows [T, d] of attention inputs x [T, D]."""
    row = linear(x, weights.wkv)
    rotated_write(row, weights.kv_norm, positions, inv_freq, window, slots, eps=eps)


def latent_and_window(
    u: torch.Tensor,
    weights: AttentionWeights,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    window: RowStore,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The window rows of attention inputs u [T, D], written; and what both the attention and the
    index queries come from, [T, q_lora_rank]."""
    latent, row = linear_pair(u, weights.wq_a, weights.wkv)
    return norm_and_write(
        latent, weights.q_norm, row, weights.kv_norm, positions, inv_freq, window, slots, eps=eps
    )


def queries(q_latent: torch.Tensor, weights: AttentionWeights, config: ModelConfig) -> torch.Tensor:
    """[T, H, d], not yet rotated: the attention operator does that."""
    return torch.unflatten(linear(q_latent, weights.wq_b), -1, (-1, config.head_dim))


def output(o: torch.Tensor, weights: AttentionWeights, config: ModelConfig) -> torch.Tensor:
    """The grouped low-rank output projection of o [T, H, d], [T, D]."""
    return linear(wo_a(o, weights.wo_a, config.o_groups), weights.wo_b)


def attention(
    u: torch.Tensor,
    layer: int,
    weights: AttentionWeights,
    config: ModelConfig,
    rows: SegmentRows,
    cache: CacheView,
    inv_freq: torch.Tensor,
    published: Selection | None,
) -> tuple[torch.Tensor, Selection | None]:
    """Attention of backbone layer `layer` for rows u [T, D]; the layer's entries are written.

    Returns the output [T, D] and the selection that the layers above reuse.
    """
    window = cache.window(layer)
    # Before reading: the rows of a step see each other.
    latent = latent_and_window(
        u, weights, rows.positions, inv_freq, window, rows.window_write, config.rms_norm_eps
    )
    if weights.indexer is not None:
        published = select(
            u, latent, layer, weights.indexer, config, rows, cache, inv_freq, published
        )
    source = config.kv_source(layer)
    o = mega_attention(
        queries(latent, weights, config),
        rows.positions,
        inv_freq,
        window,
        rows.window_keys,
        None if source is None else cache.main(source),
        None if published is None else published.main_slots,
        weights.sink,
        scale=config.softmax_scale,
    )
    return output(o, weights, config), published
