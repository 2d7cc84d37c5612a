"""What makes a cache row of a projection: norm, rotation and write."""

from __future__ import annotations

import torch

from plugins.formats.rows import RowStore
from plugins.kv_write.reference import kv_write
from plugins.norm import rms_norm
from plugins.registry import runs_kernels
from plugins.rope import apply_rope


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
    run = rotated_pieces
    if runs_kernels(x) and not torch.compiler.is_exporting():
        from plugins.kv_write import kernel

        run = kernel.rotated_write
    run(x, norm, positions, inv_freq, rows, slots, eps=eps)


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
    if runs_kernels(x) and not torch.compiler.is_exporting():
        from plugins.kv_write import kernel

        made: torch.Tensor = kernel.norm_and_write(
            latent, latent_norm, x, norm, positions, inv_freq, rows, slots, eps=eps
        )
        return made
    rotated_pieces(x, norm, positions, inv_freq, rows, slots, eps=eps)
    return rms_norm(latent, latent_norm, eps)


def rotated_pieces(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    rows: RowStore,
    slots: torch.Tensor,
    *,
    eps: float,
) -> None:
    """rotated_write, operator by operator."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    kv_write(apply_rope(x, positions, inv_freq), rows, slots)
