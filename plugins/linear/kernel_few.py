"""Packed E4M3 weights times a few bfloat16 rows, on Hopper; docs/kernels/linear.md says why in this
way.

A program has some outputs and all of their inputs: its warps share the inputs among them, so that
no other launch adds anything up. As much of the weight as fits goes to shared memory before the
launch ahead has ended, the rest where products have been taken. The rows are rounded here.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from plugins.device.launch import limits, unit_stride
from plugins.device.overlap import overlaps
from plugins.device.overlap_gluon import let_next_begin, wait
from plugins.device.weights import FP8_BLOCKS as _FP8_BLOCKS
from plugins.device.weights import MXFP8, DeviceWeight
from plugins.linear.weight import LinearWeight

# Up to so many rows, and so many inputs.
FEW_ROWS = 8
MOST_INPUTS = 8192
# From so many inputs on a program has fewer outputs, of which all warps share the inputs. Many
# programs would take too long to round several such rows.
_LONG = 2049
_WARPS = 8
_STEP_BYTES = 32 * 1024
# Of a multiprocessor: bytes of shared memory, those that a program costs besides its own, and
# registers.
_SHARED_MEMORY, _RESERVED, _REGISTERS = 233_472, 1024, 65_536

FP8_BLOCKS = gl.constexpr(_FP8_BLOCKS.value)
WARPS = gl.constexpr(_WARPS)
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
def _scale_values(words, WHICH: gl.constexpr):
    """float32 values of the scales in one byte of every word."""
    bits = (words << (23 - 8 * WHICH) if WHICH < 3 else words >> 1) & 0x7F800000
    bits = gl.maximum(bits, 0x00400000) + gl.where(bits == 0x7F800000, 0x00400000, 0)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit(do_not_specialize=["num_rows", "programs", "per_group", "N", "other_N"])
def linear_few(
    x, x_stride, codes, scale, y, N, other_codes, other_scale, other_y, other_N,
    programs, per_group, scale_stride, num_rows, K,
    STORED: gl.constexpr, ROWS: gl.constexpr, SHARES: gl.constexpr, OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """OUTPUTS of N from all K inputs of their group, STEPS times 128 · SHARES of them, for eight
    rows or, with ROWS 1, for one; from program `programs` on, those of another weight. A group has
    `per_group` programs. STAGES steps of the weight are on their way at a time."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SHARES, WARPS // SHARES, 1], [1, 16, 8])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    INPUT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(2, SUMS)
    # Of eight rows of a weight each thread reads eight bytes; no two of them meet in a bank.
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, order=[2, 1, 0])
    COPIED: gl.constexpr = gl.BlockedLayout(
        [1, 1, 16], [1, 4, 8], [SHARES, WARPS // SHARES, 1], [2, 1, 0]
    )
    if OVERLAP:
        let_next_begin()
    program = gl.program_id(0)
    is_other = program >= programs
    program -= gl.where(is_other, programs, 0)
    first = program * OUTPUTS
    codes, scale = gl.where(is_other, other_codes, codes), gl.where(is_other, other_scale, scale)
    y, N = gl.where(is_other, other_y, y), gl.where(is_other, other_N, N)

    output = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPIED)))
    share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPIED)))
    byte = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPIED)))
    at = codes.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    at = at + (output.to(gl.int64) * K)[None, :, None]
    at = at + (share * 128)[:, None, None] + byte[None, None, :]
    is_output = (output < N)[None, :, None]
    words = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, SHARES, OUTPUTS, 128], STAGE)
    for i in gl.static_range(STAGES):
        _copy(words.index(i), at + i * 128 * SHARES, is_output, EVEN)
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
    scales = ()
    for i in gl.static_range(STEPS):
        if EVEN:
            scales += (gl.load(scale_at + i * SHARES),)
        else:
            there = (scale_row < scale_rows)[None, :]
            scales += (gl.load(scale_at + i * SHARES, mask=there, other=0),)
    if OVERLAP:
        wait()
    values, value_scales = _kept_rows(
        x, x_stride, program // per_group * (K // 2), num_rows, ROWS, SHARES, STEPS
    )

    zeros = gl.zeros([SHARES, OUTPUTS, 8], gl.float32, layout=SUMS)
    sums = zeros
    for i in gl.static_range(STEPS):
        async_copy.wait_group(min(STEPS, STAGES + i) - i - 1)
        stage = words.index(i % STAGES)
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
            word = stage.slice(32 * j, 32, dim=2).load(WEIGHT)
            products = mma_v2(word.to(gl.float16), value, zeros)
            sums += products * (of_output[:, :, None] * of_row[:, None, :])
        if i + STAGES < STEPS:
            _copy(stage, at + (i + STAGES) * 128 * SHARES, is_output, EVEN)
    total = gl.sum(sums, axis=0)
    place = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    y_row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
    y_at = y + y_row.to(gl.int64)[None, :] * N + place[:, None]
    there = (y_row < num_rows)[None, :] & (place < N)[:, None]
    gl.store(y_at, total.to(y.dtype.element_ty), mask=there)


@gluon.jit
def _kept_rows(
    x, x_stride, first, num_rows, ROWS: gl.constexpr, SHARES: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """The rows from word `first` on, rounded, in shared memory: codes [4 · STEPS, SHARES, ROWS, 32]
    and the scales of 32 of them."""
    WORDS: gl.constexpr = 64 * SHARES  # of a step
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LOADED: gl.constexpr = gl.BlockedLayout(
        [1, 4], [1, 32], [1, WARPS] if ROWS == 1 else [WARPS, 1], [1, 0]
    )
    kept = gl.allocate_shared_memory(gl.int32, [STEPS, 4 * SHARES, ROWS, 8], PLAIN)
    kept_scales = gl.allocate_shared_memory(gl.float32, [STEPS, 4 * SHARES, ROWS], LINE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    column = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LOADED))
    x_at = x.to(gl.pointer_type(gl.int32), bitcast=True) + first
    x_at = x_at + row.to(gl.int64)[:, None] * (x_stride // 2) + column[None, :]
    is_row = (row < num_rows)[:, None]
    READ: gl.constexpr = 8 if ROWS == 1 else 2  # steps whose rows are on their way at a time
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
    return values, value_scales


@gluon.jit
def _copy(stage, at, is_output, EVEN: gl.constexpr):
    """A step of the weight. EVEN: all of its outputs are there."""
    if EVEN:
        async_copy.async_copy_global_to_shared(stage, at, cache_modifier=".cg")
    else:
        async_copy.async_copy_global_to_shared(stage, at, mask=is_output, cache_modifier=".cg")
    async_copy.commit_group()


class FewTiles(NamedTuple):
    """Of one program: outputs, shares of the inputs, steps through one, steps whose words are in
    shared memory at a time, and registers of a thread."""

    outputs: int
    shares: int
    steps: int
    stages: int
    registers: int


def few_tiles(rows: int, outputs: int, inner: int, multiprocessors: int) -> FewTiles:
    """For `inner` inputs, a multiple of 256. A row's bits depend on the shares, so that these do
    not depend on the number of rows."""
    shares = 2
    if inner >= _LONG:
        shares = next(x for x in (8, 4, 2) if inner % (128 * x) == 0)
    steps = inner // (128 * shares)
    sizes = (x for x in (128, 64, 32) if x * 128 * shares <= _STEP_BYTES)
    tile = next((x for x in sizes if outputs >= x * 3 * multiprocessors // 2), 16)
    tile = max(tile, 16 * _WARPS // shares)
    # All programs run at once if four a multiprocessor do, so that all ask for words early.
    at_once = triton.cdiv(triton.cdiv(outputs, tile), multiprocessors)
    at_once = at_once if at_once <= 4 else 2
    kept = (1 if rows == 1 else FEW_ROWS) * (inner + inner // 8)
    room = (_SHARED_MEMORY // at_once - _RESERVED - kept) // (tile * 128 * shares)
    registers = min(255, _REGISTERS // (at_once * _WARPS * 32) // 8 * 8)
    return FewTiles(tile, shares, steps, min(steps, max(2, room)), registers)


def takes_few(x: torch.Tensor, kept: LinearWeight, weight: DeviceWeight, groups: int = 1) -> bool:
    """Whether linear_few multiplies x [T, G·K] with `weight` [G·N, K], the form of `kept` on the
    device."""
    (rows, _), (outputs, inner), device = x.shape, weight.shape, limits(x.device)
    if not (device.warp_groups and 0 < rows <= FEW_ROWS and weight.words):
        return False
    if inner % 256 or inner > MOST_INPUTS or x.dtype != torch.bfloat16:
        return False
    tile = few_tiles(rows, outputs, inner, device.multiprocessors)
    if rows > 1 and inner >= _LONG and outputs > tile.outputs * device.multiprocessors:
        return False
    if groups > 1 and outputs // groups % tile.outputs:
        return False
    rounds = kept.quantized_input and kept.input_scale is None
    # Rows are read in words of two.
    aligned = x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    return rounds and aligned and weight.stored in (_FP8_BLOCKS.value, MXFP8.value)


def few_products(
    x: torch.Tensor, weights: tuple[DeviceWeight, ...], groups: int = 1
) -> tuple[torch.Tensor, ...]:
    """x [T, G·K] times one weight [G·N, K], group by group, or two [N, K] of the same K and format:
    [T, G·N] each, in one launch."""
    x = unit_stride(x)
    first, other = weights[0], weights[-1]
    outputs, inner = first.shape
    ys = tuple(x.new_empty((x.shape[0], one.shape[0])) for one in weights)
    device = limits(x.device)
    tile = few_tiles(x.shape[0], outputs, inner, device.multiprocessors)
    programs = [triton.cdiv(one.shape[0], tile.outputs) for one in weights]
    even = all(one.shape[0] % tile.outputs == 0 for one in weights)
    overlap = overlaps(x.device)
    linear_few[(sum(programs),)](
        x, x.stride(0), first.codes, first.scale, ys[0], outputs,
        other.codes, other.scale, ys[-1], other.shape[0], programs[0],
        programs[0] // groups if groups > 1 else sum(programs),
        first.scale_stride, x.shape[0], inner,
        first.stored, 1 if x.shape[0] == 1 else FEW_ROWS, tile.shares, tile.outputs, tile.steps,
        tile.stages, even, overlap,
        num_warps=_WARPS, maxnreg=tile.registers, launch_pdl=overlap,
    )  # fmt: skip
    return ys
