"""Packed E2M1 weights times one bfloat16 row, on Hopper, in Gluon; docs/kernels/linear.md says why
in this way.

A program has some outputs and all of their inputs, shared out among its warps, whose codes are on
their way to registers before the launch ahead has ended. Products are exact, and added in float32.
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
from plugins.device.overlap_gluon import let_next_begin, wait
from plugins.device.weights import NVFP4 as _NVFP4
from plugins.device.weights import DeviceWeight
from plugins.linear.kernel_codes import E2M1_UNIT, halves, two_a_byte
from plugins.linear.kernel_rounding import power, rounded
from plugins.linear.weight import LinearWeight

# Inputs of a row, at most, and of a unit, 128 bytes of a row of the weight.
MOST_INPUTS, UNIT = 8192, 256
# Units of a warp, at most, and its outputs.
_MOST_UNITS, _OUTPUTS = 6, 16
# Registers of a thread, by warps: a multiprocessor has three programs of four, or two of eight.
_REGISTERS = {4: 168, 8: 128}

NVFP4 = gl.constexpr(_NVFP4.value)


@gluon.constexpr_function
def _read(shares, outputs, warps):
    """Layout of 64 bytes [S, OUT, 4, 8] of a unit, in words of 16 bits: a thread has the last dim,
    of two rows, which is what an operand of float16 has of it."""
    across = (warps // shares).bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 8, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[0, 16 << i, 0, 0] for i in range(across)]
        + [[1 << i, 0, 0, 0] for i in range(shares.bit_length() - 1)],
        [],
        [shares, outputs, 4, 8],
    )


@gluon.jit
def _scales(words, FIRST: gl.constexpr, SECOND: gl.constexpr, STORED: gl.constexpr):
    """float32 scales [S, OUT, 8] in two bytes of words [S, OUT, 4]."""
    words = words.to(gl.int32)
    if STORED == NVFP4:
        first = ((words >> 8 * FIRST) & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
        second = ((words >> 8 * SECOND) & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
        both = gl.join(first.to(gl.float32), second.to(gl.float32))
    else:
        first, second = (words >> 8 * FIRST) & 0xFF, (words >> 8 * SECOND) & 0xFF
        both = gl.join(power(first), power(second))
    return both.reshape([words.shape[0], words.shape[1], 8])


@gluon.jit
def _kept_row(x, SHARES: gl.constexpr, UNITS: gl.constexpr, WHOLE: gl.constexpr):
    """The row, rounded, in shared memory: float16 [2 · UNITS, S, 128, 1], halves of units as their
    operands are ordered, and float32 scales [UNITS, S, 8]."""
    AT_ONCE: gl.constexpr = gl.num_warps() // SHARES
    PASSES: gl.constexpr = (UNITS + AT_ONCE - 1) // AT_ONCE
    FOUR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[3, 2, 1, 0])
    THREE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    TWO: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LOADED: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 8], [1, 1, 8, 4], [SHARES, AT_ONCE, 1, 1], [3, 2, 1, 0]
    )
    kept = gl.allocate_shared_memory(gl.float16, [PASSES, AT_ONCE, 2, SHARES, 128], FOUR)
    kept_scales = gl.allocate_shared_memory(gl.float32, [PASSES, AT_ONCE, SHARES, 8], THREE)
    PLACES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LOADED))
    share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, PLACES))[:, None]
    unit = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, PLACES))[None, :]
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LOADED))
    group = gl.arange(0, 8, layout=gl.SliceLayout(1, COLUMNS))[:, None]
    column = 32 * group + gl.arange(0, 32, layout=gl.SliceLayout(0, COLUMNS))[None, :]
    read = ()
    for i in gl.static_range(PASSES):
        now = AT_ONCE * i + unit
        there = (now < UNITS) & (share * UNITS + now < WHOLE)
        at = ((share * UNITS + now) * 256)[:, :, None, None] + column[None, None, :, :]
        read += (gl.load(x + at, mask=there[:, :, None, None], other=0.0),)
    for i in gl.static_range(PASSES):
        value, byte_of_group = rounded(read[i].to(gl.float32))
        # [share, unit, half, group, word of eight codes, four of them, even or odd]
        value = value.to(gl.float16).reshape([SHARES, AT_ONCE, 2, 4, 4, 4, 2])
        value = value.permute([1, 2, 0, 4, 3, 6, 5]).reshape([AT_ONCE, 2, SHARES, 128])
        kept.index(i).store(value)
        kept_scales.index(i).store(power(byte_of_group).permute([1, 0, 2]) * E2M1_UNIT)
    values = kept._reinterpret(gl.float16, [2 * PASSES * AT_ONCE, SHARES, 128, 1], THREE)
    value_scales = kept_scales._reinterpret(gl.float32, [PASSES * AT_ONCE, SHARES, 8], TWO)
    return values, value_scales


@gluon.jit
def _operand(words, SUMS: gl.constexpr):
    """Words [S, OUT, 4, 8] as float16 [S, OUT, 128], the columns of _kept_row: in turn eight of
    each group."""
    S: gl.constexpr = words.shape[0]
    OUT: gl.constexpr = words.shape[1]
    value = halves(words).reshape([S, OUT, 4, 4, 2, 4])
    value = value.permute([0, 1, 3, 2, 5, 4]).reshape([S, OUT, 128])
    return gl.convert_layout(value, gl.DotOperandLayout(0, SUMS, 8), assert_trivial=True)


@gluon.jit
def _halved(value, AXIS: gl.constexpr):
    """The two halves of a dim of 128."""
    S: gl.constexpr = value.shape[0]
    if AXIS == 1:
        first, second = gl.split(value.reshape([S, 2, 64, 8]).permute([0, 2, 3, 1]))
    else:
        OUT: gl.constexpr = value.shape[1]
        first, second = gl.split(value.reshape([S, OUT, 2, 64]).permute([0, 1, 3, 2]))
    first = gl.convert_layout(first, value.type.layout, assert_trivial=True)
    return first, gl.convert_layout(second, value.type.layout, assert_trivial=True)


@gluon.jit(do_not_specialize=["N", "other_N", "programs"])
def linear_one(
    x, codes, scale, global_scale, y, N, other_codes, other_scale, other_global, other_y, other_N,
    programs, scale_stride,
    K: gl.constexpr, STORED: gl.constexpr, SHARES: gl.constexpr, OUTPUTS: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """OUTPUTS of N from all K inputs of one row, which is rounded to MXFP8 here; from program
    `programs` on, those of another weight. EVEN: all of a program's outputs and units are there."""
    WARPS: gl.constexpr = gl.num_warps()
    WHOLE: gl.constexpr = K // 256
    UNITS: gl.constexpr = (WHOLE + SHARES - 1) // SHARES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SHARES, WARPS // SHARES, 1], [1, 16, 8])
    INPUT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    let_next_begin()
    program = gl.program_id(0)
    is_other = program >= programs
    first = (program - gl.where(is_other, programs, 0)) * OUTPUTS
    codes, scale = gl.where(is_other, other_codes, codes), gl.where(is_other, other_scale, scale)
    y, N = gl.where(is_other, other_y, y), gl.where(is_other, other_N, N)

    READ: gl.constexpr = _read(SHARES, OUTPUTS, WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, READ))
    share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, ROWS))[:, None]
    output = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, ROWS))[None, :]
    WORDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, READ))
    group = gl.arange(0, 4, layout=gl.SliceLayout(1, WORDS))[:, None]
    word = 8 * group + gl.arange(0, 8, layout=gl.SliceLayout(0, WORDS))[None, :]
    at = codes.to(gl.pointer_type(gl.int16), bitcast=True)
    at = at + (output.to(gl.int64) * (K // 4) + share * (64 * UNITS))[:, :, None, None]
    at = at + word[None, None, :, :]
    # A thread's sums are of two neighbouring groups, or pairs of groups of sixteen.
    zeros = gl.zeros([SHARES, OUTPUTS, 8], gl.float32, SUMS)
    SCALED: gl.constexpr = gl.SliceLayout(3, zeros.reshape([SHARES, OUTPUTS, 4, 2]).type.layout)
    OF_SCALE: gl.constexpr = gl.SliceLayout(2, SCALED)
    scale_share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, OF_SCALE))[:, None]
    scale_output = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, OF_SCALE))[None, :]
    WORD: gl.constexpr = gl.int32 if STORED == NVFP4 else gl.int16
    scale_row = scale_output * (scale_stride // (4 if STORED == NVFP4 else 2))
    scale_at = scale.to(gl.pointer_type(WORD), bitcast=True)
    scale_at = scale_at + (scale_row + scale_share * (4 * UNITS))[:, :, None]
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCALED)))
    scale_at = scale_at + pair[None, None, :]
    kept, scales = (), ()
    for i in gl.static_range(UNITS):
        if EVEN:
            kept += (gl.load(at + 64 * i), gl.load(at + (64 * i + 32)))
            scales += (gl.load(scale_at + 4 * i),)
        else:
            there = ((share * UNITS + i < WHOLE) & (output < N))[:, :, None, None]
            kept += (gl.load(at + 64 * i, mask=there, other=0),)
            kept += (gl.load(at + (64 * i + 32), mask=there, other=0),)
            there = ((scale_share * UNITS + i < WHOLE) & (scale_output < N))[:, :, None]
            scales += (gl.load(scale_at + 4 * i, mask=there, other=0),)
    wait()
    values, value_scales = _kept_row(x, SHARES, UNITS, WHOLE)

    # Four threads have a group each of a row, whose products would meet in one sum. So a column of
    # sums meets one thread's values and, of all others, zeros: eight columns, the groups of a unit.
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, INPUT)))
    place = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, INPUT)))
    apart = place[None, None, :] - (column // 8 % 4)[None, :, None]
    total = zeros
    for i in gl.static_range(UNITS):
        sums, others = zeros, zeros
        for half in gl.static_range(2):
            value = values.index(2 * i + half).load(INPUT).broadcast_to([SHARES, 128, 8])
            mask = gl.where(apart == 4 * half, -1, 0).to(gl.int16)
            value = gl.inline_asm_elementwise(
                "and.b32 $0, $1, $2;", "=r,r,r", [value, mask.broadcast_to([SHARES, 128, 8])],
                dtype=gl.float16, is_pure=True, pack=2,
            )  # fmt: skip
            weight = _operand(kept[2 * i + half], SUMS)
            if STORED == NVFP4:
                low_value, high_value = _halved(value, 1)
                low_weight, high_weight = _halved(weight, 2)
                sums = mma_v2(low_weight, low_value, sums)
                others = mma_v2(high_weight, high_value, others)
            else:
                sums = mma_v2(weight, value, sums)
        of_row = value_scales.index(i).load(gl.SliceLayout(1, SUMS))[:, None, :]
        if STORED == NVFP4:
            low = gl.convert_layout(_scales(scales[i], 0, 2, STORED), SUMS, assert_trivial=True)
            high = gl.convert_layout(_scales(scales[i], 1, 3, STORED), SUMS, assert_trivial=True)
            total += (sums * low + others * high) * of_row
        else:
            step = gl.convert_layout(_scales(scales[i], 0, 1, STORED), SUMS, assert_trivial=True)
            total += sums * (step * of_row)
    result = gl.sum(gl.sum(total, axis=2), axis=0)
    if STORED == NVFP4:
        result = result * gl.load(gl.where(is_other, other_global, global_scale))
    place = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    gl.store(y + place, result.to(y.dtype.element_ty), mask=place < N)


class OneTiles(NamedTuple):
    """Of one program: outputs, shares of the inputs, warps, and registers of a thread."""

    outputs: int
    shares: int
    warps: int
    registers: int


def one_tiles(inner: int) -> OneTiles:
    """For `inner` inputs, a multiple of UNIT and at most MOST_INPUTS."""
    shares = int(triton.next_power_of_2(triton.cdiv(inner // UNIT, _MOST_UNITS)))
    warps = max(4, shares)
    return OneTiles(_OUTPUTS * warps // shares, shares, warps, _REGISTERS[warps])


def takes_one(x: torch.Tensor, kept: LinearWeight, weight: DeviceWeight, groups: int = 1) -> bool:
    """Whether linear_one multiplies x [T, K] with `weight` [N, K], the form of `kept` on the
    device."""
    inner = weight.shape[1]
    rounds = kept.quantized_input and kept.input_scale is None
    whole = inner % UNIT == 0 and inner <= MOST_INPUTS
    ours = two_a_byte(weight.stored) and weight.words and whole and groups == 1
    one = x.shape[0] == 1 and x.dtype == torch.bfloat16
    return ours and rounds and one and limits(x.device).warp_groups


def one_products(x: torch.Tensor, weights: tuple[DeviceWeight, ...]) -> tuple[torch.Tensor, ...]:
    """x [1, K] times one weight [N, K], or two of the same K and format: [1, N] each, in one
    launch."""
    x, first, other = unit_stride(x), weights[0], weights[-1]
    inner = first.shape[1]
    ys = tuple(x.new_empty((1, one.shape[0])) for one in weights)
    tile = one_tiles(inner)
    programs = [triton.cdiv(one.shape[0], tile.outputs) for one in weights]
    even = all(one.shape[0] % tile.outputs == 0 for one in weights)
    linear_one[(sum(programs),)](
        x, first.codes, first.scale, first.global_scale, ys[0], first.shape[0],
        other.codes, other.scale, other.global_scale, ys[-1], other.shape[0], programs[0],
        first.scale_stride, inner, first.stored, tile.shares, tile.outputs,
        even and inner // UNIT % tile.shares == 0,
        num_warps=tile.warps, maxnreg=tile.registers, launch_pdl=True,
    )  # fmt: skip
    return ys
