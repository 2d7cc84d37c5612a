"""MXFP4: E2M1 values with one E8M0 scale per 32 along the last dim.

scale = 2^ceil(log2(amax / 6)) with amax ≥ 6·2^−126, value = E2M1(x / scale) · scale. Used for index
queries and keys and for routed experts (technical report, FP4 section; the released inference
code). A group that holds a NaN or an infinity reads back as NaN throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.rounding import (
    E2M1_MAX,
    SMALLEST_NORMAL_SCALE,
    ceil_scale,
    decode_e8m0,
    grouped,
    pack_e2m1,
    round_e2m1,
    split_last,
    straight_through,
    unpack_e2m1,
    work_dtype,
)


@dataclass(frozen=True)
class MxFp4:
    group: int = 32

    def data_bytes(self, width: int) -> int:
        return width // 2

    def scale_bytes(self, width: int) -> int:
        return width // self.group

    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        floor = E2M1_MAX * SMALLEST_NORMAL_SCALE
        return ceil_scale(groups.abs().amax(-1).clamp_(min=floor), E2M1_MAX)

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., n] → nibble pairs uint8 [..., n / 2] and E8M0 codes uint8 [..., n / group]."""
        groups = grouped(values, self.group)
        scale = self._scale(groups)
        packed = pack_e2m1(groups / decode_e8m0(scale, groups.dtype).unsqueeze(-1))
        return packed.flatten(-2), scale

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Inverse of pack, [..., n] in `dtype`; exact in bfloat16 and wider."""
        wide = work_dtype(dtype)
        groups = split_last(unpack_e2m1(data, wide), self.group)
        return (groups * decode_e8m0(scale, wide).unsqueeze(-1)).flatten(-2).to(dtype)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """unpack(pack(values)) in the dtype of `values`, gradient straight through."""
        return straight_through(self._round, values)

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        groups = grouped(values, self.group)
        scale = decode_e8m0(self._scale(groups), groups.dtype).unsqueeze(-1)
        return round_e2m1(groups / scale).mul_(scale).flatten(-2).to(values.dtype)


# Index queries and keys, and expert weights: one format.
MXFP4 = MxFp4()
