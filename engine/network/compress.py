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
from plugins.compressor import pooled_rows
from plugins.kv_write import rotated_write
from plugins.linear import linear, wide_linear_pair
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
        ratio, latent = 1, rms_norm(linear(u, weights.wkv), weights.norm, eps)
    else:
        ratio = 2
        latent = pooled_rows(
            weights.norm,
            wide_linear_pair(u, weights.wkv, weights.wgate),
            cache.tail(source),
            rows.request,
            rows.is_first,
            rows.tail_read,
            rows.tail_write,
            eps=eps,
        )
    positions, slots = rows.entry_position[ratio], rows.entry_write[ratio]
    rotated_write(latent, None, positions, inv_freq, cache.main(source), slots, eps=eps)
    keys, norm = linear(latent, weights.index_wk), weights.index_norm
    rotated_write(keys, norm, positions, inv_freq, cache.index(source), slots, eps=eps)
