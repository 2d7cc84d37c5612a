"""A linear weight as the operators read it: values, or packed bytes that are decoded on use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from plugins.formats import mxfp8, nvfp4
from plugins.formats.lookup import TABLE_DTYPES, Codes, decode_codes, decode_scale
from plugins.formats.nvfp4 import dequantize_weight
from plugins.formats.released import (
    BLOCK,
    dequantize_fp4_rows,
    dequantize_fp8_blocks,
    dequantize_fp8_rows,
)

# Decoding goes in chunks of rows, so that its float32 intermediates stay in a core's cache.
_CHUNK_VALUES = 1 << 17


class Matrix(Protocol):
    """A weight [N, K] that gives its values: a tensor, or a `PackedMatrix`."""

    def to(self, dtype: torch.dtype) -> torch.Tensor: ...


class PackedFormat(Enum):
    """How the stored bytes of a weight [N, K] become values."""

    FP8_BLOCKS = "fp8"  # E4M3 [N, K], E8M0 [⌈N/32⌉, ⌈K/32⌉]
    FP4_ROWS = "fp4"  # two E2M1 a byte [N, K/2], E8M0 [N, K/32]
    MXFP8 = "mxfp8"  # E4M3 [N, K], E8M0 [N, K/32]
    NVFP4 = "nvfp4"  # two E2M1 a byte [N, K/2], E4M3 [N, K/16], float32 [] for the whole weight


_TWO_A_BYTE = (PackedFormat.FP4_ROWS, PackedFormat.NVFP4)


@dataclass(frozen=True)
class PackedMatrix:
    """A weight [N, K] kept as stored bytes; `dtype` is the compute dtype that it is decoded to.

    The tensors may be mapped from a file. Decoding gives the bits that decoding at load would.
    """

    format: PackedFormat
    shape: tuple[int, int]
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        tensors = (self.codes, self.scale, self.global_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The values in the compute dtype, then in `dtype`."""
        return self.dequantize().to(dtype)

    def dequantize(self) -> torch.Tensor:
        """The values [N, K] in the compute dtype, in new memory."""
        rows, columns = self.shape
        step = max(_CHUNK_VALUES // columns // BLOCK, 1) * BLOCK
        if step >= rows:
            return self._decode(0, rows)
        values = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            values[start:stop] = self._decode(start, stop)
        return values

    def steps(self) -> torch.Tensor:
        """What a code of one stands for, float32 [N, K / group]; K is a multiple of 32."""
        return self._steps(self.scale)[: self.shape[0]]

    def _steps(self, scale: torch.Tensor) -> torch.Tensor:
        if self.global_scale is not None:
            return decode_scale(scale, "e4m3").mul_(self.global_scale)
        step = decode_scale(scale, "e8m0")
        blocks = self.format is PackedFormat.FP8_BLOCKS
        return step.repeat_interleave(BLOCK, 0) if blocks else step

    def _decode(self, start: int, stop: int) -> torch.Tensor:
        codes = self.codes[start:stop]
        if self.format is PackedFormat.FP8_BLOCKS:
            scale = self.scale[start // BLOCK : -(-stop // BLOCK)]
        else:
            scale = self.scale[start:stop]
        if self.dtype in TABLE_DTYPES and self.shape[1] % BLOCK == 0:
            return self._look_up(codes, scale)
        if self.format is PackedFormat.FP8_BLOCKS:
            return dequantize_fp8_blocks(codes, scale, self.dtype)
        if self.format is PackedFormat.FP4_ROWS:
            return dequantize_fp4_rows(codes, scale, self.dtype)
        if self.global_scale is None:
            return dequantize_fp8_rows(codes, scale, self.dtype)
        return dequantize_weight(codes, scale, self.global_scale, self.dtype)

    def _look_up(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The same values through tables, several times faster."""
        kind: Codes = "e2m1" if self.format in _TWO_A_BYTE else "e4m3"
        values = decode_codes(codes, kind, self.dtype)
        step = self._steps(scale)[: codes.shape[0]]
        if self.global_scale is None:
            step = step.to(self.dtype)  # a power of two, and exact times a code, in either dtype
        groups = values.view(*step.shape, -1)
        torch.mul(groups, step.unsqueeze(-1), out=groups)
        return values


@dataclass(frozen=True)
class LinearWeight:
    """A dense weight [N, K] in the compute dtype.

    `quantized_input`: the weight is stored quantised, so its input is rounded to MXFP8 in groups
    of 32 first. That is model semantics of the released FP8 and FP4 layers; whoever loads the
    weight decides it, and a diagnostic run loads with False. With `input_scale`, float32 [], the
    input is rounded to NVFP4 under that scale instead: a W4A4 weight.
    """

    value: torch.Tensor
    quantized_input: bool
    input_scale: torch.Tensor | None = None

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] as the product takes it, in the dtype of x."""
        if self.input_scale is not None:
            return nvfp4.round_input(x, self.input_scale)
        return mxfp8.ACTIVATION.round(x) if self.quantized_input else x

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.value.dtype


class PackedLinearWeight(LinearWeight):
    """The same weight at rest as packed bytes: `value` decodes it anew each time it is read."""

    packed: PackedMatrix

    def __init__(
        self,
        packed: PackedMatrix,
        quantized_input: bool,
        input_scale: torch.Tensor | None = None,
    ) -> None:
        object.__setattr__(self, "packed", packed)
        object.__setattr__(self, "quantized_input", quantized_input)
        object.__setattr__(self, "input_scale", input_scale)

    @property
    def value(self) -> torch.Tensor:
        return self.packed.dequantize()

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype
