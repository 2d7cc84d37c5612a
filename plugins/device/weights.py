"""Packed weights as kernels see them, and the load of a tile of their values.

A tile holds rows of the weight; its values are those of plugins/linear/weight.py, bit for bit.
Scales are read as words of four where rows of them are aligned, because single bytes cannot be
copied asynchronously: a loop would wait for memory at every step.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from plugins.device.numbers import E2M1_UNIT, e2m1_pair, e4m3_scale, e8m0_scale

if TYPE_CHECKING:
    from plugins.linear.weight import PackedMatrix

# How a weight is stored, a compile-time number of every kernel that reads one.
FP8_BLOCKS = tl.constexpr(0)  # E4M3, an E8M0 scale per 32 × 32
MXFP8 = tl.constexpr(1)  # E4M3, an E8M0 scale per 32 of a row
MXFP4 = tl.constexpr(2)  # two E2M1 a byte, an E8M0 scale per 32 of a row
NVFP4 = tl.constexpr(3)  # two E2M1 a byte, an E4M3 scale per 16 of a row, a float32 for all
_FORMATS = {"fp8": 0, "mxfp8": 1, "fp4": 2, "nvfp4": 3}


class DeviceWeight(NamedTuple):
    """A weight [N, K]. `scale_stride`: scales of a row of them. `words`: they may be read four at a
    time."""

    shape: tuple[int, int]
    codes: torch.Tensor
    scale: torch.Tensor
    scale_stride: int
    global_scale: torch.Tensor
    stored: int
    words: bool

    def arguments(self) -> tuple[Any, ...]:
        """codes, scale, scale_stride, global_scale, and the compile-time stored and words."""
        return tuple(self)[1:]


def device_weight(matrix: PackedMatrix) -> DeviceWeight | None:
    """None for a weight whose rows are not whole groups."""
    if matrix.shape[1] % 32:
        return None
    codes = matrix.codes.view(torch.uint8).contiguous()
    scale = matrix.scale.view(torch.uint8).contiguous()
    stride = scale.shape[1]
    words = stride % 4 == 0 and scale.data_ptr() % 4 == 0
    none = scale  # a stand-in: only one format has a global scale
    factor = none if matrix.global_scale is None else matrix.global_scale
    stored = _FORMATS[matrix.format.value]
    return DeviceWeight(matrix.shape, codes, scale, stride, factor, stored, words)


@triton.jit
def _scales(
    scale, row, scale_stride, first, K, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """int32 bytes [N, GROUPS] of the groups from column `first` on of scale rows `row`."""
    at = row[:, None].to(tl.int64) * scale_stride + first // GROUP
    if WORDS:
        word = tl.arange(0, GROUPS // 4)
        words = scale.to(tl.pointer_type(tl.uint32), bitcast=True)
        read = (first // GROUP + 4 * word < scale_stride)[None, :]
        four = tl.load(words + at // 4 + word[None, :], mask=read, other=0)
        byte = (four[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 0xFF
        byte = byte.reshape(row.shape[0], GROUPS)
    else:
        group = tl.arange(0, GROUPS)
        read = (first // GROUP + group < scale_stride)[None, :]
        byte = tl.load(scale + at + group[None, :], mask=read, other=0)
    return byte.to(tl.int32)


@triton.jit
def load_weight(
    codes, scale, scale_stride, global_scale, STORED: tl.constexpr, WORDS: tl.constexpr,
    row, first, K, EVEN: tl.constexpr, COLUMNS: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """float32 values [N, COLUMNS] of rows `row` from column `first` on; zeros from column K on.

    EVEN: the tile ends before K. FLOAT8: E4M3 is decoded by the device's own conversion.
    """
    N: tl.constexpr = row.shape[0]
    GROUP: tl.constexpr = 16 if STORED == NVFP4 else 32
    GROUPS: tl.constexpr = COLUMNS // GROUP
    scale_row = row // 32 if STORED == FP8_BLOCKS else row
    byte = _scales(scale, scale_row, scale_stride, first, K, GROUP, GROUPS, WORDS)
    # The two scales of NVFP4 meet first, as in the reference.
    step = e4m3_scale(byte) * tl.load(global_scale) if STORED == NVFP4 else e8m0_scale(byte)
    PER_BYTE: tl.constexpr = 2 if (STORED == MXFP4) | (STORED == NVFP4) else 1
    column = tl.arange(0, COLUMNS // PER_BYTE)
    at = row[:, None].to(tl.int64) * (K // PER_BYTE) + first // PER_BYTE + column[None, :]
    if EVEN:
        code = tl.load(codes + at)
    else:
        code = tl.load(codes + at, mask=(first + PER_BYTE * column < K)[None, :], other=0)
    if PER_BYTE == 2:
        low, high = e2m1_pair(code.to(tl.int32).reshape(N, GROUPS, GROUP // 2))
        step = (step * E2M1_UNIT)[:, :, None]
        values = tl.join(low * step, high * step)
    else:
        if FLOAT8:
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            value = e4m3_scale(code.to(tl.int32))
        values = value.reshape(N, GROUPS, GROUP) * step[:, :, None]
    return values.reshape(N, COLUMNS)
