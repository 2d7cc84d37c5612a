"""MXFP8: E4M3 values with one E8M0 scale per group along the last dim.

scale = 2^ceil(log2(amax / 448)), value = E4M3(x / scale) · scale (technical report, FP8 section;
the released inference code). A group that holds a NaN or an infinity reads back as NaN throughout:
nothing is checked while packing, and nothing is silently repaired.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.rounding import (
    E4M3_MAX,
    SMALLEST_NORMAL_SCALE,
    ceil_scale,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    grouped,
    round_e4m3,
    split_last,
    straight_through,
    work_dtype,
)


@dataclass(frozen=True)
class MxFp8:
    """`amax_floor`: amax is taken no smaller than this, part of the trained semantics."""

    amax_floor: float
    group: int = 32

    def data_bytes(self, width: int) -> int:
        return width

    def scale_bytes(self, width: int) -> int:
        return width // self.group

    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        return ceil_scale(groups.abs().amax(-1).clamp_(min=self.amax_floor), E4M3_MAX)

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., n] → E4M3 codes uint8 [..., n] and E8M0 codes uint8 [..., n / group]."""
        groups = grouped(values, self.group)
        scale = self._scale(groups)
        codes = encode_e4m3(groups / decode_e8m0(scale, groups.dtype).unsqueeze(-1))
        return codes.flatten(-2), scale

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Inverse of pack, [..., n] in `dtype`; exact in bfloat16 and wider."""
        wide = work_dtype(dtype)
        groups = split_last(decode_e4m3(data, wide), self.group)
        return (groups * decode_e8m0(scale, wide).unsqueeze(-1)).flatten(-2).to(dtype)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """unpack(pack(values)) in the dtype of `values`, gradient straight through."""
        return straight_through(self._round, values)

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        groups = grouped(values, self.group)
        scale = decode_e8m0(self._scale(groups), groups.dtype).unsqueeze(-1)
        return round_e4m3(groups / scale).mul_(scale).flatten(-2).to(values.dtype)


# Window rows, and the input of every FP8 or FP4 linear.
ACTIVATION = MxFp8(amax_floor=1e-4)
# Released and re-quantised weights: only the scale's own range bounds amax.
WEIGHT = MxFp8(amax_floor=E4M3_MAX * SMALLEST_NORMAL_SCALE)
