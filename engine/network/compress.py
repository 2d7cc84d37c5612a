"""The compressor of a KV source: main KV entries and index keys, across chunk borders.

A ratio-1 source makes one entry per token. A ratio-2 source pools tokens {2j, 2j + 1}; the entry
is closed by the second one, whose partner is the row before it in the batch or, for a request's
first row, the newest row in the cache's tail. (Technical report, section on CSA2.)
"""

from __future__ import annotations

import torch

from engine.cache_view import CacheView
from engine.network.rows import CompressRows
from engine.network.weights import CompressorWeights
from plugins.compressor import pool_pairs, previous_rows
from plugins.kv_write import rotated_write
from plugins.linear import LinearWeight, linear, wide_linear_pair
from plugins.norm import rms_norm


def compress(
    u: torch.Tensor,
    source: int,
    weights: CompressorWeights,
    rows: CompressRows,
    cache: CacheView,
    inv_freq: torch.Tensor,
    eps: float,
) -> None:
    """Write the entries that rows u [T, D] close, and the newest compressor rows.

    Every row makes an entry, rows that close none write it nowhere: shapes do not depend on data.
    """
    if weights.wgate is None:
        ratio, latent = 1, linear(u, weights.wkv)
    else:
        ratio, latent = 2, _pooled(u, source, weights, weights.wgate, rows, cache)
    latent = rms_norm(latent, weights.norm, eps)
    positions, slots = rows.entry_position[ratio], rows.entry_write[ratio]
    rotated_write(latent, None, positions, inv_freq, cache.main(source), slots, eps=eps)
    keys, norm = linear(latent, weights.index_wk), weights.index_norm
    rotated_write(keys, norm, positions, inv_freq, cache.index(source), slots, eps=eps)


def _pooled(
    u: torch.Tensor,
    source: int,
    weights: CompressorWeights,
    wgate: LinearWeight,
    rows: CompressRows,
    cache: CacheView,
) -> torch.Tensor:
    """The latent [T, d] of the pair (row before, row), and the tail update."""
    current = wide_linear_pair(u, weights.wkv, wgate)
    previous = previous_rows(
        current,
        cache.tail(source),
        rows.request,
        rows.is_first,
        rows.tail_read,
        rows.tail_write,
    )
    a, b = torch.stack([previous, current], dim=1).chunk(2, dim=-1)
    return pool_pairs(a, b).to(u.dtype)
