"""MXFP8: E4M3 values with one E8M0 scale per group along the last dim.

scale = 2^ceil(log2(amax / 448)), value = E4M3(x / scale) · scale (technical report, FP8 section;
the released inference code). A group that holds a NaN or an infinity reads back as NaN throughout:
nothing is checked while packing, and nothing is silently repaired.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.groups import GroupFormat
from plugins.formats.rounding import (
    E4M3_MAX,
    SMALLEST_NORMAL_SCALE,
    ceil_scale,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    round_e4m3,
)


@dataclass(frozen=True)
class MxFp8(GroupFormat):
    """`amax_floor`: amax is taken no smaller than this, part of the trained semantics. Exact in
    bfloat16 and wider."""

    amax_floor: float
    group: int = 32

    def data_bytes(self, width: int) -> int:
        return width

    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        return ceil_scale(groups.abs().amax(-1).clamp_(min=self.amax_floor), E4M3_MAX)

    def _step(self, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return decode_e8m0(scale, dtype)

    def _encode(self, quotients: torch.Tensor) -> torch.Tensor:
        return encode_e4m3(quotients)

    def _decode(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return decode_e4m3(data, dtype)

    def _snap(self, quotients: torch.Tensor) -> torch.Tensor:
        return round_e4m3(quotients)


# Window rows, and the input of every FP8 or FP4 linear.
ACTIVATION = MxFp8(amax_floor=1e-4)
# Released and re-quantised weights: only the scale's own range bounds amax.
WEIGHT = MxFp8(amax_floor=E4M3_MAX * SMALLEST_NORMAL_SCALE)
