"""RMS normalisation over the last dim."""

from __future__ import annotations

import torch

from plugins.norm.schema import SCHEMA
from plugins.registry import operator


@operator(SCHEMA)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight; x [..., D], weight [D] → [..., D] in the dtype of x.

    Computed in float32, in float64 for float64 input. A row of zeros stays zero.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * inverse * weight.to(wide)).to(x.dtype)
