"""The ratio-2 compressor: the row before each row, the pooling of two tokens to one latent, and
both with the norm behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plugins.compressor.schema import POOL_PAIRS, POOLED_ROWS, PREVIOUS_ROWS
from plugins.norm import rms_norm
from plugins.registry import operator

if TYPE_CHECKING:
    from plugins.formats.rows import RowStore


@operator(POOL_PAIRS)
def pool_pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Σ_t softmax_t(b)[g, t] · a[g, t] over the pair t, per channel.

    a (values) and b (gate logits) [G, 2, d]; returns [G, d] in at least float32, before the norm.
    """
    acc = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(acc), b.to(acc)
    e = torch.exp(b - b.amax(1, keepdim=True).detach())
    first, second = (e * a).unbind(1)
    weight_first, weight_second = e.unbind(1)
    return (first + second) / (weight_first + weight_second)


@operator(PREVIOUS_ROWS)
def previous_rows(
    current: torch.Tensor,
    tail: RowStore,
    request: torch.Tensor,
    is_first: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """The row before each row of current [T, c], [T, c]; then `current` is kept in the tail.

    Rows of a request are neighbours. Where is_first bool [T], the row before comes from the tail
    at read_slots int64 [R] of its request int64 [T], zeros at −1. write_slots int64 [T], −1 for
    rows that need not be kept.
    """
    # Read before writing: a long chunk reuses the slot of the row that its first row needs.
    stored = tail.read(read_slots, current.dtype)[request]
    previous = torch.where(is_first.unsqueeze(-1), stored, current.roll(1, dims=0))
    tail.write(write_slots, current)
    return previous


@operator(POOLED_ROWS)
def pooled_rows(
    norm: torch.Tensor,
    current: torch.Tensor,
    tail: RowStore,
    request: torch.Tensor,
    is_first: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """The latents [T, d], in the dtype of norm [d] and normalised by it, of the pairs (row before,
    row) of current [T, 2·d], values beside gate logits; the rest as in previous_rows."""
    previous = previous_rows(current, tail, request, is_first, read_slots, write_slots)
    a, b = torch.stack([previous, current], dim=1).chunk(2, dim=-1)
    return rms_norm(pool_pairs(a, b).to(norm.dtype), norm, eps)
