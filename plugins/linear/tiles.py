"""Fixed row tiles: on a CPU, a row's result must not depend on which rows share its step.

A GEMM library picks its blocking, and with it the order of additions, from the matrix shapes. With
one shape for every call that choice is made once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

ROW_TILE = 16


def row_tiled(x: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """fn(x), evaluated on tiles of ROW_TILE rows; x [T, K], fn maps [t, K] to [t, N] row by row.

    The last tile is padded with zero rows. Tiling applies on a CPU in float32 and narrower without
    gradients; elsewhere (float64 comparisons, training, devices) fn sees all rows at once.
    """
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if x.device.type != "cpu" or x.dtype == torch.float64 or needs_grad or x.shape[0] == 0:
        return fn(x)
    rows = x.shape[0]
    padding = -rows % ROW_TILE
    if padding:
        x = torch.cat([x, x.new_zeros(padding, x.shape[1])])
    tiles = [fn(x[start : start + ROW_TILE]) for start in range(0, rows, ROW_TILE)]
    return tiles[0][:rows] if len(tiles) == 1 else torch.cat(tiles)[:rows]
