"""Packed E4M3 weights times a few bfloat16 rows, on Hopper; docs/kernels/linear.md says why in this
way.

A program has some outputs and all of their inputs: its warps share the inputs among them, so that
no other launch adds anything up. Words of the weight go from memory to the registers in which their
product takes them, the first of them before the launch ahead has ended. The rows are rounded here.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from plugins.device.launch import limits, unit_stride
from plugins.device.overlap import overlaps
from plugins.device.weights import FP8_BLOCKS as _FP8_BLOCKS
from plugins.device.weights import MXFP8, DeviceWeight
from plugins.linear.weight import LinearWeight

# Up to so many rows, and so many inputs: those of the rows lie in shared memory.
FEW_ROWS = 8
MOST_INPUTS = 8192
_WARPS = 8

FP8_BLOCKS = gl.constexpr(_FP8_BLOCKS.value)
# Two words of two bfloat16 values each, times $3, rounded to four E4M3 codes.
_CODES = gl.constexpr("""
{
.reg .b32 low, high;
.reg .b16 c0, c1;
shl.b32 low, $1, 16;
and.b32 high, $1, 0xFFFF0000;
mul.rn.f32 low, low, $3;
mul.rn.f32 high, high, $3;
cvt.rn.satfinite.e4m3x2.f32 c0, high, low;
shl.b32 low, $2, 16;
and.b32 high, $2, 0xFFFF0000;
mul.rn.f32 low, low, $3;
mul.rn.f32 high, high, $3;
cvt.rn.satfinite.e4m3x2.f32 c1, high, low;
mov.b32 $0, {c0, c1};
}
""")


@gluon.jit
def _largest(a, b):
    """The larger magnitudes of two words' halves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; and.b32 a, $1, 0x7FFF7FFF; and.b32 b, $2, 0x7FFF7FFF; "
        "max.u16x2 $0, a, b; }",
        "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _round(words, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """E4M3 codes, in words of four, and float32 scales [ROWS, WORDS / 16] of rows in words."""
    GROUPS: gl.constexpr = WORDS // 16
    v0, v1 = gl.split(words.reshape([ROWS, GROUPS, 4, 2, 2]))
    v0, v1 = gl.split(_largest(v0, v1))
    most = _largest(v0, v1)
    most = gl.maximum(most & 0xFFFF, (most >> 16) & 0xFFFF)
    amax = gl.maximum(gl.max(most, axis=2) << 16, 0x38D1B717)
    exponent = amax >> 23
    byte = exponent - 8 + ((amax & 0x7FFFFF) > 0x600000).to(gl.int32)
    byte = gl.where(exponent == 255, 255, byte)
    inverse = ((254 - gl.minimum(byte, 253)) << 23).to(gl.float32, bitcast=True)
    scale = gl.where(byte == 255, 0x7FC00000, byte << 23).to(gl.float32, bitcast=True)
    inverse = gl.expand_dims(inverse, 2).broadcast_to([ROWS, GROUPS, 4])
    w0, w1 = gl.split(words.reshape([ROWS, WORDS // 2, 2]))
    inverse = gl.join(inverse, inverse).reshape([ROWS, WORDS // 2])
    inverse = gl.convert_layout(inverse, w0.type.layout, assert_trivial=True)
    codes = gl.inline_asm_elementwise(
        _CODES, "=r,r,r,r", [w0, w1, inverse], dtype=gl.int32, is_pure=True, pack=1
    )
    return codes, scale


@gluon.jit
def _wait():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _let_next_begin():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _scale_values(words, WHICH: gl.constexpr):
    """float32 values of the scales in one byte of every word."""
    bits = (words << (23 - 8 * WHICH) if WHICH < 3 else words >> 1) & 0x7F800000
    bits = gl.maximum(bits, 0x00400000) + gl.where(bits == 0x7F800000, 0x00400000, 0)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit(do_not_specialize=["num_rows", "programs", "N", "other_N"])
def product_few(
    x, x_stride, codes, scale, y, N, other_codes, other_scale, other_y, other_N, programs,
    scale_stride, num_rows, K,
    STORED: gl.constexpr, ROWS: gl.constexpr, SHARES: gl.constexpr, OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr, AHEAD: gl.constexpr, READ: gl.constexpr, EVEN: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """OUTPUTS of N from all K inputs, STEPS times 128 · SHARES of them, for eight rows or, with
    ROWS 1, for one; from program `programs` on, those of another weight. Words are read AHEAD
    steps before their product."""
    WARPS: gl.constexpr = SHARES * OUTPUTS // 16
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SHARES, OUTPUTS // 16, 1], [1, 16, 8])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    INPUT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(2, SUMS)
    WORDS: gl.constexpr = 64 * SHARES  # of a step
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LOADED: gl.constexpr = gl.BlockedLayout(
        [1, 4], [1, 32], [1, WARPS] if ROWS == 1 else [WARPS, 1], [1, 0]
    )
    if OVERLAP:
        _let_next_begin()
    program = gl.program_id(0)
    is_other = program >= programs
    first = (program - gl.where(is_other, programs, 0)) * OUTPUTS
    codes, scale = gl.where(is_other, other_codes, codes), gl.where(is_other, other_scale, scale)
    y, N = gl.where(is_other, other_y, y), gl.where(is_other, other_N, N)

    output = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, WEIGHT)))
    share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(2, WEIGHT)))
    byte = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, WEIGHT)))
    at = codes.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    at = at + (output.to(gl.int64) * K)[None, :, None]
    at = at + (share * 128)[:, None, None] + byte[None, None, :]
    # Scales: a word of four for every share, and for every output or, in blocks, sixteen of them.
    none = gl.zeros([SHARES, OUTPUTS], gl.int32, layout=OF_OUTPUT)
    TALL: gl.constexpr = none.reshape([SHARES, OUTPUTS // 16, 16]).type.layout
    OF_SCALE: gl.constexpr = gl.SliceLayout(2, TALL) if STORED == FP8_BLOCKS else OF_OUTPUT
    SCALED: gl.constexpr = OUTPUTS // 16 if STORED == FP8_BLOCKS else OUTPUTS
    scale_row = gl.arange(0, SCALED, layout=gl.SliceLayout(0, OF_SCALE))
    if STORED == FP8_BLOCKS:
        scale_row = (first + 16 * scale_row) // 32
        scale_rows = (N + 31) // 32
    else:
        scale_row = first + scale_row
        scale_rows = N
    scale_share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, OF_SCALE))
    scale_at = scale.to(gl.pointer_type(gl.int32), bitcast=True) + scale_share[:, None]
    scale_at = scale_at + (scale_row * (scale_stride // 4))[None, :]
    word, scales = (), ()
    for i in gl.static_range(STEPS):
        if i < AHEAD:
            word += _load_step(at + i * 128 * SHARES, (output < N)[None, :, None], EVEN)
        if EVEN:
            scales += (gl.load(scale_at + i * SHARES),)
        else:
            there = (scale_row < scale_rows)[None, :]
            scales += (gl.load(scale_at + i * SHARES, mask=there, other=0),)
    if OVERLAP:
        _wait()
    # The rows, rounded: codes, and scales of 32 of them.
    kept = gl.allocate_shared_memory(gl.int32, [STEPS, 4 * SHARES, ROWS, 8], PLAIN)
    kept_scales = gl.allocate_shared_memory(gl.float32, [STEPS, 4 * SHARES, ROWS], LINE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    column = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LOADED))
    x_at = x.to(gl.pointer_type(gl.int32), bitcast=True)
    x_at = x_at + row.to(gl.int64)[:, None] * (x_stride // 2) + column[None, :]
    is_row = (row < num_rows)[:, None]
    read = ()
    for i in gl.static_range(min(STEPS, READ)):
        read += (gl.load(x_at + i * WORDS, mask=is_row, other=0),)
    for i in gl.static_range(STEPS):
        if i + READ < STEPS:
            read += (gl.load(x_at + (i + READ) * WORDS, mask=is_row, other=0),)
        rounded, of_group = _round(read[i], ROWS, WORDS)
        rounded = rounded.reshape([ROWS, SHARES, 4, 8]).permute([2, 1, 0, 3])
        kept.index(i).store(rounded.reshape([4 * SHARES, ROWS, 8]))
        of_group = of_group.reshape([ROWS, SHARES, 4]).permute([2, 1, 0])
        kept_scales.index(i).store(of_group.reshape([4 * SHARES, ROWS]))
    values = kept._reinterpret(gl.float8e4nv, [4 * STEPS, SHARES, ROWS, 32], PLAIN)
    value_scales = kept_scales._reinterpret(gl.float32, [4 * STEPS, SHARES, ROWS], LINE)

    zeros = gl.zeros([SHARES, OUTPUTS, 8], gl.float32, layout=SUMS)
    sums = zeros
    for i in gl.static_range(STEPS):
        if i + AHEAD < STEPS:
            ahead = at + (i + AHEAD) * 128 * SHARES
            word += _load_step(ahead, (output < N)[None, :, None], EVEN)
        for j in gl.static_range(4):
            value = values.index(4 * i + j).permute([0, 2, 1]).load(INPUT).to(gl.float16)
            of_row = value_scales.index(4 * i + j).load(gl.SliceLayout(1, SUMS))
            if ROWS == 1:
                value = value.broadcast_to([SHARES, 32, 8])
                of_row = of_row.broadcast_to([SHARES, 8])
            of_output = _scale_values(scales[i], j)
            if STORED == FP8_BLOCKS:
                of_output = gl.expand_dims(of_output, 2)
                of_output = of_output.broadcast_to([SHARES, OUTPUTS // 16, 16])
                of_output = of_output.reshape([SHARES, OUTPUTS])
                of_output = gl.convert_layout(of_output, OF_OUTPUT, assert_trivial=True)
            products = mma_v2(word[4 * i + j].to(gl.float16), value, zeros)
            sums += products * (of_output[:, :, None] * of_row[:, None, :])
    total = gl.sum(sums, axis=0)
    place = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    y_row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
    y_at = y + y_row.to(gl.int64)[None, :] * N + place[:, None]
    there = (y_row < num_rows)[None, :] & (place < N)[:, None]
    gl.store(y_at, total.to(y.dtype.element_ty), mask=there)


@gluon.jit
def _load_step(at, there, EVEN: gl.constexpr):
    """Four times 32 columns. EVEN: all of them are there."""
    word = ()
    for j in gl.static_range(4):
        if EVEN:
            word += (gl.load(at + j * 32, cache_modifier=".cg"),)
        else:
            word += (gl.load(at + j * 32, mask=there, other=0.0, cache_modifier=".cg"),)
    return word


class FewTiles(NamedTuple):
    """Of one program: outputs, warps that share the inputs of each, and steps through them. ahead,
    read: steps whose words and rows are on their way at a time."""

    outputs: int
    shares: int
    steps: int
    ahead: int
    read: int


def few_tiles(rows: int, inner: int) -> FewTiles:
    """For `inner` inputs, a multiple of 256."""
    shares = 2
    if inner > 2048:
        shares = next(x for x in (8, 4, 2) if inner % (128 * x) == 0)
    read = 4 if rows == 1 else 2
    return FewTiles(16 * _WARPS // shares, shares, inner // (128 * shares), 5, read)


def takes_few(x: torch.Tensor, kept: LinearWeight, weight: DeviceWeight) -> bool:
    """Whether product_few multiplies x [T, K] with `weight` [N, K], the form of `kept` on the
    device: a small one, whose programs run at once, one on each multiprocessor."""
    outputs, inner = weight.shape
    device = limits(x.device)
    if not (device.warp_groups and 0 < x.shape[0] <= FEW_ROWS and weight.words):
        return False
    if inner % 256 or inner > MOST_INPUTS or x.dtype != torch.bfloat16:
        return False
    at_once = outputs <= few_tiles(1, inner).outputs * device.multiprocessors
    rounds = kept.quantized_input and kept.input_scale is None
    # Rows are read in words of two.
    aligned = x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    return at_once and rounds and aligned and weight.stored in (_FP8_BLOCKS.value, MXFP8.value)


def few_products(x: torch.Tensor, weights: tuple[DeviceWeight, ...]) -> tuple[torch.Tensor, ...]:
    """x [T, K] times one weight [N, K], or two of the same K and format: [T, N] each, in one
    launch."""
    x = unit_stride(x)
    first, other = weights[0], weights[-1]
    outputs, inner = first.shape
    ys = tuple(x.new_empty((x.shape[0], one.shape[0])) for one in weights)
    tile = few_tiles(x.shape[0], inner)
    programs = [triton.cdiv(one.shape[0], tile.outputs) for one in weights]
    even = all(one.shape[0] % tile.outputs == 0 for one in weights)
    overlap = overlaps(x.device)
    product_few[(sum(programs),)](
        x, x.stride(0), first.codes, first.scale, ys[0], outputs,
        other.codes, other.scale, ys[-1], other.shape[0], programs[0],
        first.scale_stride, x.shape[0], inner,
        first.stored, 1 if x.shape[0] == 1 else FEW_ROWS, tile.shares, tile.outputs, tile.steps,
        tile.ahead, tile.read, even, overlap,
        num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip
    return ys
