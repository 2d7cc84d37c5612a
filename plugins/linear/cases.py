"""Sizes and hostile inputs of the linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.nvfp4 import quantize_weight
from plugins.formats.released import quantize_fp4_rows, quantize_fp8_blocks, quantize_fp8_rows
from plugins.linear.tiles import ROW_TILE
from plugins.linear.weight import LinearWeight, PackedFormat, PackedLinearWeight, PackedMatrix


def packed_weight(
    values: torch.Tensor, stored: PackedFormat, dtype: torch.dtype
) -> PackedLinearWeight:
    """`values` [N, K] quantised, as an input-rounding weight that decodes to `dtype`."""
    global_scale = None
    if stored is PackedFormat.NVFP4:
        codes, scale, global_scale = quantize_weight(values)
    elif stored is PackedFormat.FP4_ROWS:
        codes, scale = quantize_fp4_rows(values)
    else:
        blocks = stored is PackedFormat.FP8_BLOCKS
        codes, scale = (quantize_fp8_blocks if blocks else quantize_fp8_rows)(values)
    shape = (values.shape[0], values.shape[1])
    matrix = PackedMatrix(stored, shape, codes, scale, global_scale, dtype)
    return PackedLinearWeight(matrix, quantized_input=True)


@dataclass(frozen=True)
class LinearCase:
    """`stride`: x is every stride-th column of a wider tensor."""

    name: str
    rows: int
    in_features: int
    out_features: int
    quantized_input: bool = False
    stride: int = 1
    input_scale: float = 1.0

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | LinearWeight]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, self.in_features * self.stride, generator=draw).to(dtype)
        weight = torch.randn(self.out_features, self.in_features, generator=draw).to(dtype)
        x = x.mul_(self.input_scale)[:, :: self.stride]
        return {"x": x, "weight": LinearWeight(weight, self.quantized_input)}


CASES = (
    LinearCase("no rows", 0, 64, 32),
    LinearCase("one row", 1, 64, 32),
    LinearCase("one below a tile", ROW_TILE - 1, 64, 96, quantized_input=True),
    LinearCase("a tile", ROW_TILE, 64, 96, quantized_input=True),
    LinearCase("one above a tile", ROW_TILE + 1, 64, 96, quantized_input=True),
    LinearCase("odd widths", 5, 33, 7),
    LinearCase("one output", 3, 160, 1),
    LinearCase("strided columns", 19, 64, 32, stride=2),
    LinearCase("all below the amax floor", 4, 64, 32, quantized_input=True, input_scale=1e-7),
    LinearCase("long inner dim", 2, 5120, 48),
)


@dataclass(frozen=True)
class PackedCase:
    """A packed weight whose rows differ by up to 2^`spread` in size; its fourth row is zero. The
    third row of x is zero, its second has one large value."""

    name: str
    rows: int
    in_features: int
    out_features: int
    stored: PackedFormat
    spread: int = 8
    stride: int = 1
    input_scale: float = 1.0

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | LinearWeight]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, self.in_features * self.stride, generator=draw)
        x = x.mul_(self.input_scale).to(dtype)[:, :: self.stride]
        x[1:2, 5] = 3e4
        x[2:3] = 0
        values = torch.randn(self.out_features, self.in_features, generator=draw)
        size = torch.randint(-self.spread, self.spread + 1, (self.out_features, 1), generator=draw)
        values *= 2.0 ** (size - 4.0)
        values[3:4] = 0
        return {"x": x, "weight": packed_weight(values, self.stored, dtype)}


PACKED_CASES = (
    PackedCase("no rows", 0, 64, 32, PackedFormat.FP8_BLOCKS),
    PackedCase("one output", 1, 64, 1, PackedFormat.MXFP8),
    PackedCase("blocks, one row", 1, 256, 70, PackedFormat.FP8_BLOCKS),
    PackedCase("blocks, parts of the sum", 3, 1280, 33, PackedFormat.FP8_BLOCKS),
    PackedCase("blocks, a whole tile of rows", 16, 128, 96, PackedFormat.FP8_BLOCKS, stride=2),
    PackedCase("blocks, a ragged tile of rows", 33, 128, 65, PackedFormat.FP8_BLOCKS),
    PackedCase("blocks, scales that are not whole words", 5, 96, 40, PackedFormat.FP8_BLOCKS),
    PackedCase("rows", 18, 256, 40, PackedFormat.MXFP8),
    PackedCase("rows, two tiles of them", 130, 256, 40, PackedFormat.MXFP8),
    PackedCase("rows, distant scales", 3, 256, 40, PackedFormat.MXFP8, spread=60),
    PackedCase("FP4", 3, 320, 70, PackedFormat.FP4_ROWS),
    PackedCase("FP4, parts of the sum", 2, 1152, 20, PackedFormat.FP4_ROWS),
    PackedCase("FP4, in planes", 3, 1280, 70, PackedFormat.FP4_ROWS),
    PackedCase("FP4, half a word of scales", 66, 256, 40, PackedFormat.FP4_ROWS),
    PackedCase("NVFP4", 3, 288, 70, PackedFormat.NVFP4),
    PackedCase("NVFP4, in planes", 17, 512, 40, PackedFormat.NVFP4),
    PackedCase("NVFP4, many rows", 66, 256, 40, PackedFormat.NVFP4),
    PackedCase("all below the amax floor", 4, 256, 32, PackedFormat.MXFP8, input_scale=1e-7),
)
