"""Rotary embedding of the last dims as adjacent pairs (2k, 2k + 1)."""

from __future__ import annotations

import torch

from plugins.registry import operator
from plugins.rope.schema import SCHEMA


@operator(SCHEMA)
def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """Rotate the last R = 2·len(inv_freq) dims of x [T, ..., d] by positions[t] · inv_freq[k].

    positions int64 [T], inv_freq float64 [R/2]; `inverse` rotates by the negative angle. Angles are
    float64 always (at position 10⁶ a float32 angle is off by 0.06 rad); the rotation is float32, or
    float64 for float64 input. Returns the dtype of x.
    """
    rotated = 2 * inv_freq.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    angle = positions.to(torch.float64).unsqueeze(-1) * inv_freq.to(torch.float64)
    per_row = (x.shape[0],) + (1,) * (x.dim() - 2) + (rotated // 2,)
    cos = angle.cos().to(wide).view(per_row)
    sin = angle.sin().to(wide).view(per_row)
    if inverse:
        sin = -sin
    turning = x[..., x.shape[-1] - rotated :].to(wide)
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return torch.cat([x[..., : x.shape[-1] - rotated], turned.flatten(-2).to(x.dtype)], dim=-1)
