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

from plugins.formats.groups import GroupFormat
from plugins.formats.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e4m3,
    encode_e4m3,
    grouped,
    pack_e2m1,
    round_e2m1,
    split_last,
    unpack_e2m1,
    work_dtype,
)

_E4M3_NAN = 0x7F
_SMALLEST_SCALE = 2.0**-9


@dataclass(frozen=True)
class NvFp4(GroupFormat):
    """Two codes a byte. `global_scale` multiplies every scale, one for all rows or float32 [n, 1];
    the cache form has none, and is then exact in bfloat16 and wider (six bits)."""

    group: int = 16
    global_scale: float | torch.Tensor | None = None

    def data_bytes(self, width: int) -> int:
        return width // 2

    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        step = groups.abs().amax(-1) / E2M1_MAX
        if self.global_scale is not None:
            step = step / self.global_scale
        step = step.clamp_(min=_SMALLEST_SCALE)
        return encode_e4m3(step).masked_fill_(~step.isfinite(), _E4M3_NAN)

    def _step(self, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        step = decode_e4m3(scale, dtype)
        # The two scales meet first, as in ModelOpt: in float32 the order decides the last bit.
        return step if self.global_scale is None else step.mul_(self.global_scale)

    def _encode(self, quotients: torch.Tensor) -> torch.Tensor:
        return pack_e2m1(quotients)

    def _decode(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return unpack_e2m1(data, dtype)

    def _snap(self, quotients: torch.Tensor) -> torch.Tensor:
        return round_e2m1(quotients)


# The main compressed KV.
CACHE = NvFp4()


def round_input(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """x [n, K] as an NVFP4 by NVFP4 (W4A4) product takes it, in the dtype of x.

    Block scales are found as they come, over the static `input_scale`, float32 [] or [n, 1], of
    calibration: amax / (6·448). A block beyond that amax saturates. (NVIDIA ModelOpt's dynamic
    block quantizer.)
    """
    return NvFp4(global_scale=input_scale).round(x)


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
