"""The cache write: the store's record format is applied on the way in."""

from __future__ import annotations

import torch

from plugins.formats.rows import RowStore
from plugins.kv_write.schema import NORM_AND_WRITE, ROTATED_WRITE, SCHEMA
from plugins.norm import rms_norm
from plugins.registry import operator
from plugins.rope import apply_rope


@operator(SCHEMA)
def kv_write(values: torch.Tensor, rows: RowStore, slots: torch.Tensor) -> None:
    """Store values [n, width] at distinct int64 slots [n] of `rows`; slots < 0 are dropped."""
    rows.write(slots, values)


@operator(ROTATED_WRITE)
def rotated_write(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    rows: RowStore,
    slots: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Store x [n, width], normalised by norm [width] unless it is None and rotated by
    positions [n], at int64 slots [n] of `rows` as kv_write does. inv_freq as in apply_rope."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    kv_write(apply_rope(x, positions, inv_freq), rows, slots)


@operator(NORM_AND_WRITE)
def norm_and_write(
    latent: torch.Tensor,
    latent_norm: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    rows: RowStore,
    slots: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """latent [n, K] normalised by latent_norm [K], and rotated_write of x: the two need nothing of
    each other and come from the same rows."""
    rotated_write(x, norm, positions, inv_freq, rows, slots, eps=eps)
    return rms_norm(latent, latent_norm, eps)
