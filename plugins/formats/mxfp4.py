"""MXFP4: E2M1 values with one E8M0 scale per 32 along the last dim.

scale = 2^ceil(log2(amax / 6)) with amax ≥ 6·2^−126, value = E2M1(x / scale) · scale. Used for index
queries and keys and for routed experts (technical report, FP4 section; the released inference
code). A group that holds a NaN or an infinity reads back as NaN throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.groups import GroupFormat
from plugins.formats.rounding import (
    E2M1_MAX,
    SMALLEST_NORMAL_SCALE,
    ceil_scale,
    decode_e8m0,
    pack_e2m1,
    round_e2m1,
    unpack_e2m1,
)


@dataclass(frozen=True)
class MxFp4(GroupFormat):
    """Two codes a byte; exact in bfloat16 and wider."""

    group: int = 32

    def data_bytes(self, width: int) -> int:
        return width // 2

    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        floor = E2M1_MAX * SMALLEST_NORMAL_SCALE
        return ceil_scale(groups.abs().amax(-1).clamp_(min=floor), E2M1_MAX)

    def _step(self, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return decode_e8m0(scale, dtype)

    def _encode(self, quotients: torch.Tensor) -> torch.Tensor:
        return pack_e2m1(quotients)

    def _decode(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return unpack_e2m1(data, dtype)

    def _snap(self, quotients: torch.Tensor) -> torch.Tensor:
        return round_e2m1(quotients)


# Index queries and keys, and expert weights: one format.
MXFP4 = MxFp4()
