"""Weight formats of the released checkpoint: how stored bytes become numbers, and back.

Dense FP8: E4M3 [N, K] with one E8M0 scale per 32 × 32 block. Experts: int8 [N, K/2] holding two
E2M1 codes a byte (even input in the low nibble) with one E8M0 scale per 32 inputs of a row. Engram
rows: E4M3 [rows, K] with one E8M0 scale per 32 values of a row. Scales arrive as float8_e8m0fnu or
uint8 and are read as raw bytes. Dequantised values are exact in bfloat16 and wider. Quantising
takes the smallest power-of-two scale that does not saturate, so quantising a dequantised weight
gives the same values back. Layout source: the headers of the released files.
"""

from __future__ import annotations

import torch

from plugins.formats import mxfp4, mxfp8
from plugins.formats.rounding import (
    E4M3_MAX,
    SMALLEST_NORMAL_SCALE,
    ceil_scale,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    work_dtype,
)

BLOCK = 32


def dequantize_fp8_blocks(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """E4M3 [N, K] with scales [⌈N/32⌉, ⌈K/32⌉] → [N, K] in `dtype`."""
    _check_scale(scale, (-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)), weight)
    wide = work_dtype(dtype)
    values = decode_e4m3(weight, wide)
    return values.mul_(_spread(decode_e8m0(scale, wide), weight.shape)).to(dtype)


def quantize_fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] → float8_e4m3fn [N, K], float8_e8m0fnu [⌈N/32⌉, ⌈K/32⌉]."""
    wide = weight.detach().to(work_dtype(weight.dtype))
    rows, columns = wide.shape
    padded = torch.nn.functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax((1, 3)).clamp_(min=E4M3_MAX * SMALLEST_NORMAL_SCALE)
    scale = ceil_scale(amax, E4M3_MAX)
    codes = encode_e4m3(wide / _spread(decode_e8m0(scale, wide.dtype), wide.shape))
    return codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def dequantize_fp8_rows(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """E4M3 [..., K] with scales [..., K/32] → [..., K] in `dtype`."""
    _check_scale(scale, (*weight.shape[:-1], weight.shape[-1] // BLOCK), weight)
    return mxfp8.WEIGHT.unpack(weight, scale, dtype)


def quantize_fp8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] → float8_e4m3fn [..., K], float8_e8m0fnu [..., K/32]."""
    codes, scale = mxfp8.WEIGHT.pack(weight)
    return codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def dequantize_fp4_rows(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """int8 or uint8 [..., K/2] with scales [..., K/32] → [..., K] in `dtype`."""
    _check_scale(scale, (*weight.shape[:-1], 2 * weight.shape[-1] // BLOCK), weight)
    return mxfp4.MXFP4.unpack(weight, scale, dtype)


def quantize_fp4_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] → int8 [..., K/2], float8_e8m0fnu [..., K/32]."""
    packed, scale = mxfp4.MXFP4.pack(weight)
    return packed.view(torch.int8), scale.view(torch.float8_e8m0fnu)


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One scale per 32 × 32 block → one per element of `shape`."""
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[: shape[0], : shape[1]]


def _check_scale(scale: torch.Tensor, expected: tuple[int, ...], weight: torch.Tensor) -> None:
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"expected E8M0 scales of shape {expected} for a weight stored as "
            f"{tuple(weight.shape)}, got {tuple(scale.shape)}; released grids are 32 × 32 for "
            "dense FP8 and 1 × 32 for experts and Engram rows"
        )
