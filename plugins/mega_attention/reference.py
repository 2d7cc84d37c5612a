"""Sparse attention: one joint softmax over a row's window and its selected compressed entries.

Keys are also the values, one latent row for all heads. Queries are rotated on the way in and the
output is rotated back on the way out, so a value's rotary part carries the relative position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plugins.mega_attention.schema import MEGA_ATTENTION
from plugins.registry import operator
from plugins.rope import apply_rope

if TYPE_CHECKING:
    from plugins.formats.rows import RowStore

# Every row takes part in products of one shape, [H, d] × [d, 16] and back, so its bits depend
# neither on the batch nor on the padding of its key sets.
_KEY_TILE = 16
_GATHER_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
# Keeps the running maximum finite when a row has no key (and the sink is −inf), or a +inf sink.
_MAX_BOUND = 1e30


@operator(MEGA_ATTENTION)
def mega_attention(
    q: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    window: RowStore,
    window_slots: torch.Tensor,
    main: RowStore | None,
    main_slots: torch.Tensor | None,
    sink: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention output [T, H, d] in q's dtype, rotated back at the query's position.

    q [T, H, d] before RoPE; positions int64 [T]; inv_freq [R/2] of the layer; window_slots
    int64 [T, W] and main_slots int64 [T, K], −1 where there is no key, in any order; sink [H], a
    logit that enters the denominator only. A row without keys, or a +inf sink, gives zeros; a −inf
    sink gives the plain softmax. Rows of a store that no slot names are never read.
    """
    acc = torch.promote_types(q.dtype, torch.float32)
    rotated = apply_rope(q, positions, inv_freq)
    sources = [(window, window_slots)]
    if main is not None and main_slots is not None:
        sources.append((main, main_slots))
    sources = [(store, _whole_tiles(slots)) for store, slots in sources]
    keys_per_row = sum(slots.shape[1] for _, slots in sources)
    row_bytes = max(1, keys_per_row * q.shape[2] * acc.itemsize)
    row_tile = max(1, _GATHER_BYTES[q.device.type] // row_bytes)
    outputs = [q.new_zeros(0, *q.shape[1:])]
    for start in range(0, q.shape[0], row_tile):
        rows = slice(start, start + row_tile)
        valid = torch.cat([slots[rows] >= 0 for _, slots in sources], dim=1)
        keys = torch.cat([store.read(slots[rows], acc) for store, slots in sources], dim=1)
        outputs.append(
            _attend(rotated[rows].to(acc) * scale, keys, valid, sink.to(acc)).to(q.dtype)
        )
    return apply_rope(torch.cat(outputs), positions, inv_freq, inverse=True)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """q [B, H, d], keys [B, n, d], valid [B, n], n a multiple of the key tile; [B, H, d]."""
    tiles = torch.split(keys, _KEY_TILE, dim=1)
    scores = torch.cat([torch.bmm(q, tile.transpose(1, 2)) for tile in tiles], dim=2)
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    # A constant shift: the result does not depend on it, so neither does the gradient.
    peak = torch.maximum(scores.amax(-1), sink).detach().clamp(-_MAX_BOUND, _MAX_BOUND)
    weights = torch.exp(scores - peak.unsqueeze(-1))
    total = torch.exp(sink - peak)
    output = torch.zeros_like(q)
    for tile_weights, tile in zip(torch.split(weights, _KEY_TILE, dim=2), tiles, strict=True):
        total = total + tile_weights.sum(-1)
        output = output + torch.bmm(tile_weights, tile)
    return output / torch.where(total > 0, total, 1.0).unsqueeze(-1)


def _whole_tiles(slots: torch.Tensor) -> torch.Tensor:
    """Slots with −1 up to whole key tiles."""
    return torch.nn.functional.pad(slots, (0, -slots.shape[1] % _KEY_TILE), value=-1)
