"""Packed weights times a few bfloat16 rows, on Hopper; docs/kernels/linear.md says why in this
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
from plugins.device.weights import NVFP4 as _NVFP4
from plugins.device.weights import DeviceWeight
from plugins.linear.kernel_codes import halves, two_a_byte
from plugins.linear.kernel_few_rows import kept_rows
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

FP8_BLOCKS, NVFP4 = gl.constexpr(_FP8_BLOCKS.value), gl.constexpr(_NVFP4.value)
WARPS = gl.constexpr(_WARPS)


@gluon.jit
def _scale_values(words, WHICH: gl.constexpr):
    """float32 values of the scales in one byte of every word."""
    bits = (words << (23 - 8 * WHICH) if WHICH < 3 else words >> 1) & 0x7F800000
    bits = gl.maximum(bits, 0x00400000) + gl.where(bits == 0x7F800000, 0x00400000, 0)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _blocks(words, SUMS: gl.constexpr):
    """Words [S, OUT, 16] of four E2M1 codes as two float16 [S, OUT, 32], one behind the other."""
    S: gl.constexpr = words.shape[0]
    OUT: gl.constexpr = words.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    value = halves(words).reshape([S, OUT, 2, 4, 2, 4]).permute([0, 1, 3, 5, 4, 2])
    first, second = gl.split(value)
    first = gl.convert_layout(first.reshape([S, OUT, 32]), OPERAND, assert_trivial=True)
    second = gl.convert_layout(second.reshape([S, OUT, 32]), OPERAND, assert_trivial=True)
    return first, second


@gluon.jit
def _scaled(value, words, HALF: gl.constexpr):
    """value [S, OUT, 32] times the E4M3 scales of its sixteens, two bytes of words [S, OUT]: codes
    times scales are exact in float16."""
    S: gl.constexpr = value.shape[0]
    OUT: gl.constexpr = value.shape[1]
    TWO: gl.constexpr = value.reshape([S, OUT, 2, 16]).type.layout
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, TWO))))
    word = gl.convert_layout(words, gl.SliceLayout(2, gl.SliceLayout(3, TWO)), assert_trivial=True)
    byte = (word >> (16 * HALF))[:, :, None] >> (8 * which)[None, None, :]
    scale = (byte & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    scale = scale[:, :, :, None].broadcast_to([S, OUT, 2, 16]).reshape([S, OUT, 32])
    scale = gl.convert_layout(scale, value.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [value, scale], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit(do_not_specialize=["num_rows", "programs", "per_group", "N", "other_N"])
def linear_few(
    x, x_stride, codes, scale, global_scale, y, N,
    other_codes, other_scale, other_global, other_y, other_N,
    programs, per_group, scale_stride, num_rows, K,
    STORED: gl.constexpr, ROWS: gl.constexpr, SHARES: gl.constexpr, OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """OUTPUTS of N from all K inputs of their group, STEPS times 128 · SHARES of them, for eight
    rows or, with ROWS 1, for one; from program `programs` on, those of another weight. A group has
    `per_group` programs. STAGES steps of the weight are on their way at a time."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SHARES, WARPS // SHARES, 1], [1, 16, 8])
    FP4: gl.constexpr = two_a_byte(STORED)
    BLOCKS: gl.constexpr = 8 if FP4 else 4  # of 32 columns, of a step
    WIDTH: gl.constexpr = 64 if FP4 else 128  # words of 16 bits or codes, of a step
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2 if FP4 else 8)
    INPUT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(2, SUMS)
    # Of eight rows of a weight each thread reads eight bytes; no two of them meet in a bank.
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(WIDTH // 8, 1, 8, order=[2, 1, 0])
    COPIED: gl.constexpr = gl.BlockedLayout(
        [1, 1, WIDTH // 8], [1, 4, 8], [SHARES, WARPS // SHARES, 1], [2, 1, 0]
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
    word = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPIED)))
    WORD: gl.constexpr = gl.int16 if FP4 else gl.float8e4nv
    at = codes.to(gl.pointer_type(WORD), bitcast=True)
    at = at + (output.to(gl.int64) * (K // 4 if FP4 else K))[None, :, None]
    at = at + (share * WIDTH)[:, None, None] + word[None, None, :]
    is_output = (output < N)[None, :, None]
    words = gl.allocate_shared_memory(WORD, [STAGES, SHARES, OUTPUTS, WIDTH], STAGE)
    for i in gl.static_range(STAGES):
        _copy(words.index(i), at + i * WIDTH * SHARES, is_output, EVEN)
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
    SCALE_WORDS: gl.constexpr = (4 if STORED == NVFP4 else 2) if FP4 else 1  # of a step
    scale_at = scale.to(gl.pointer_type(gl.int32), bitcast=True)
    scale_at = scale_at + (scale_share * SCALE_WORDS)[:, None]
    scale_at = scale_at + (scale_row * (scale_stride // 4))[None, :]
    scales = ()
    for i in gl.static_range(STEPS):
        for j in gl.static_range(SCALE_WORDS):
            if EVEN:
                scales += (gl.load(scale_at + (i * SHARES * SCALE_WORDS + j)),)
            else:
                there = (scale_row < scale_rows)[None, :]
                at_word = scale_at + (i * SHARES * SCALE_WORDS + j)
                scales += (gl.load(at_word, mask=there, other=0),)
    if OVERLAP:
        wait()
    values, value_scales = kept_rows(
        x, x_stride, program // per_group * (K // 2), num_rows, ROWS, SHARES, STEPS, FP4
    )

    zeros = gl.zeros([SHARES, OUTPUTS, 8], gl.float32, layout=SUMS)
    sums = zeros
    for i in gl.static_range(STEPS):
        async_copy.wait_group(min(STEPS, STAGES + i) - i - 1)
        stage = words.index(i % STAGES)
        for j in gl.static_range(BLOCKS):
            value = values.index(BLOCKS * i + j).permute([0, 2, 1]).load(INPUT).to(gl.float16)
            of_row = value_scales.index(BLOCKS * i + j).load(gl.SliceLayout(1, SUMS))
            if ROWS == 1:
                value = value.broadcast_to([SHARES, 32, 8])
                of_row = of_row.broadcast_to([SHARES, 8])
            if FP4:
                if j % 2 == 0:
                    word, after = _blocks(stage.slice(8 * j, 16, dim=2).load(WEIGHT), SUMS)
                else:
                    word = after
            else:
                word = stage.slice(32 * j, 32, dim=2).load(WEIGHT).to(gl.float16)
            if STORED == NVFP4:
                word = _scaled(word, scales[4 * i + j // 2], j % 2)
                sums += mma_v2(word, value, zeros) * of_row[:, None, :]
            else:
                of_output = _scale_values(scales[(BLOCKS * i + j) // 4], j % 4)
                if STORED == FP8_BLOCKS:
                    of_output = gl.expand_dims(of_output, 2)
                    of_output = of_output.broadcast_to([SHARES, OUTPUTS // 16, 16])
                    of_output = of_output.reshape([SHARES, OUTPUTS])
                    of_output = gl.convert_layout(of_output, OF_OUTPUT, assert_trivial=True)
                products = mma_v2(word, value, zeros)
                sums += products * (of_output[:, :, None] * of_row[:, None, :])
        if i + STAGES < STEPS:
            _copy(stage, at + (i + STAGES) * WIDTH * SHARES, is_output, EVEN)
    total = gl.sum(sums, axis=0)
    if STORED == NVFP4:
        total = total * gl.load(gl.where(is_other, other_global, global_scale))
    place = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    y_row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
    y_at = y + y_row.to(gl.int64)[None, :] * N + place[:, None]
    there = (y_row < num_rows)[None, :] & (place < N)[:, None]
    gl.store(y_at, total.to(y.dtype.element_ty), mask=there)


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


def few_tiles(
    rows: int, outputs: int, inner: int, multiprocessors: int, *, stored: int
) -> FewTiles:
    """For `inner` inputs, a multiple of 256. A row's bits depend on the shares, so that these do
    not depend on the number of rows."""
    line = 256 if two_a_byte(stored) else 128  # inputs of a share's step
    shares = next(x for x in (8, 4, 2, 1) if (x <= 2 or inner >= _LONG) and inner % (line * x) == 0)
    steps = inner // (line * shares)
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
    tile = few_tiles(rows, outputs, inner, device.multiprocessors, stored=weight.stored)
    if rows > 1 and inner >= _LONG and outputs > tile.outputs * device.multiprocessors:
        return False
    if groups > 1 and outputs // groups % tile.outputs:
        return False
    rounds = kept.quantized_input and kept.input_scale is None
    # Rows are read in words of two.
    aligned = x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    return rounds and aligned


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
    tile = few_tiles(x.shape[0], outputs, inner, device.multiprocessors, stored=first.stored)
    programs = [triton.cdiv(one.shape[0], tile.outputs) for one in weights]
    even = all(one.shape[0] % tile.outputs == 0 for one in weights)
    overlap = overlaps(x.device)
    linear_few[(sum(programs),)](
        x, x.stride(0), first.codes, first.scale, first.global_scale, ys[0], outputs,
        other.codes, other.scale, other.global_scale, ys[-1], other.shape[0], programs[0],
        programs[0] // groups if groups > 1 else sum(programs),
        first.scale_stride, x.shape[0], inner,
        first.stored, 1 if x.shape[0] == 1 else FEW_ROWS, tile.shares, tile.outputs, tile.steps,
        tile.stages, even, overlap,
        num_warps=_WARPS, maxnreg=tile.registers, launch_pdl=overlap,
    )  # fmt: skip
    return ys
