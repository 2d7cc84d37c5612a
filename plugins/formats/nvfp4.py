"""NVFP4: E2M1 values with one E4M3 scale per 16 along the last dim.

The cache form has no global scale: amax ≥ 6·2^−9, scale = E4M3(amax / 6) rounded to nearest (it
may round down, then ±6 saturates), value = E2M1(x / scale) · scale (technical report, FP4 section;
the released inference code). The weight form has a global float32 scale, as NVIDIA ModelOpt lays
it out. A group that holds a NaN or an infinity reads back as NaN throughout.

Dividing by 6 or by a four-bit scale never moves a quotient onto a tie that the exact quotient
misses (a neighbour of a tie stays more than half a unit away), so one rounded division in the work
dtype is as good as exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e4m3,
    encode_e4m3,
    grouped,
    pack_e2m1,
    round_e2m1,
    split_last,
    straight_through,
    unpack_e2m1,
    work_dtype,
)

_E4M3_NAN = 0x7F
_SMALLEST_SCALE = 2.0**-9


@dataclass(frozen=True)
class NvFp4:
    group: int = 16

    def data_bytes(self, width: int) -> int:
        return width // 2

    def scale_bytes(self, width: int) -> int:
        return width // self.group

    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        amax = groups.abs().amax(-1).clamp_(min=E2M1_MAX * _SMALLEST_SCALE)
        return encode_e4m3(amax / E2M1_MAX).masked_fill_(~amax.isfinite(), _E4M3_NAN)

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., n] → nibble pairs uint8 [..., n / 2] and E4M3 codes uint8 [..., n / group]."""
        groups = grouped(values, self.group)
        scale = self._scale(groups)
        packed = pack_e2m1(groups / decode_e4m3(scale, groups.dtype).unsqueeze(-1))
        return packed.flatten(-2), scale

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Inverse of pack, [..., n] in `dtype`; exact in bfloat16 and wider (six bits)."""
        wide = work_dtype(dtype)
        groups = split_last(unpack_e2m1(data, wide), self.group)
        return (groups * decode_e4m3(scale, wide).unsqueeze(-1)).flatten(-2).to(dtype)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """unpack(pack(values)) in the dtype of `values`, gradient straight through."""
        return straight_through(self._round, values)

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        groups = grouped(values, self.group)
        scale = decode_e4m3(self._scale(groups), groups.dtype).unsqueeze(-1)
        return round_e2m1(groups / scale).mul_(scale).flatten(-2).to(values.dtype)


# The main compressed KV.
CACHE = NvFp4()


@dataclass(frozen=True)
class GlobalNvFp4(NvFp4):
    """Rows of a weight in ModelOpt's form: one float32 global scale for the whole table."""

    global_scale: float = 1.0

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("rows of a weight are packed by the builder, not while serving")

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Code value · (block scale · global scale), [..., n] in `dtype`."""
        wide = work_dtype(dtype)
        step = decode_e4m3(scale, wide).mul_(self.global_scale)
        groups = split_last(unpack_e2m1(data, wide), self.group)
        return (groups * step.unsqueeze(-1)).flatten(-2).to(dtype)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("rows of a weight are packed by the builder, not while serving")


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ModelOpt's NVFP4 weight: [N, K] → (uint8 [N, K/2], float8_e4m3fn [N, K/16], float32 []).

    global = amax / (6·448), block scale = E4M3(clamp(block amax / 6 / global, 2^−9, 448)), all in
    float32. An all-zero weight gets global scale 1.
    """
    groups = grouped(weight.to(torch.float32), CACHE.group)
    block_amax = groups.abs().amax(-1)
    amax = block_amax.amax()
    global_scale = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), 1.0)
    relative = (block_amax / E2M1_MAX / global_scale).clamp_(_SMALLEST_SCALE, E4M3_MAX)
    scale = encode_e4m3(relative)
    step = decode_e4m3(scale, torch.float32) * global_scale
    packed = pack_e2m1(groups / step.unsqueeze(-1)).flatten(-2)
    return packed, scale.view(torch.float8_e4m3fn), global_scale


def dequantize_weight(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Inverse of quantize_weight: code value · (block scale · global scale), [N, K] in `dtype`.

    The two scales meet first, as in ModelOpt: in float32 the order decides the last bit.
    """
    wide = work_dtype(dtype)
    step = decode_e4m3(scale, wide) * global_scale.to(wide)
    groups = split_last(unpack_e2m1(packed, wide), CACHE.group)
    return (groups * step.unsqueeze(-1)).flatten(-2).to(dtype)
