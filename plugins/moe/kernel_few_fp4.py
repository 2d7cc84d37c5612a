"""A tile of an expert in released FP4 for kernel_few.py, as kernel_float8.py says."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.device.overlap_gluon import let_next_begin, wait
from plugins.moe.kernel_few_parts import address, apart_of, copy_rows, copy_weights, tokens_of
from plugins.moe.kernel_float8 import EIGHT_CODES
from plugins.moe.kernel_hopper_operand import groups, operand, sums, tables, words_layout
from plugins.moe.kernel_hopper_tile import FLOAT8, largest_of, line, output_of, store

# An operand is one register here, and so is 0x40404040: the compiler would move a constant to one
# again for every word.
_EIGHT_CODES = gl.constexpr(EIGHT_CODES.value.replace("$7", "$4").replace("0x40404040", "$5"))


@gluon.jit
def _decoded(words, low, high, forty):
    return gl.inline_asm_elementwise(
        _EIGHT_CODES, "=&r,=&r,r,r,r,r", [words, low, high, forty], dtype=(gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _product_256(codes, four, rows, at, top, forty, WARPS: gl.constexpr):
    """256 columns of weight rows [N] times those of `rows`, two buffers from `at` on."""
    N: gl.constexpr = top.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    SUMS: gl.constexpr = sums(ROWS, WARPS)
    ONE: gl.constexpr = words_layout(1, WARPS)
    SCALES: gl.constexpr = gl.SliceLayout(1, groups(WARPS))
    halves = gl.split(gl.permute(codes.reshape([N, 2, 16]), (0, 2, 1)))
    fours = gl.split(four)
    part = gl.zeros([N, ROWS], gl.float32, SUMS)
    # What the product under way reads: held until it ends, so that nothing is decoded over it.
    first = gl.zeros([N, 4], gl.int32, ONE)
    last = first
    for half in gl.static_range(2):
        low, high = tables(gl.convert_layout(fours[half], SCALES), top, WARPS)
        low, high = gl.convert_layout(low, ONE), gl.convert_layout(high, ONE)
        even, odd = gl.split(halves[half].reshape([N, 4, 2, 2]))
        word_0, word_2 = gl.split(even)
        word_1, word_3 = gl.split(odd)
        for i in gl.static_range(4):
            word = gl.convert_layout((word_0, word_1, word_2, word_3)[i], ONE)
            new_first, new_last = _decoded(word, low, high, forty)
            x = rows.index(at + half).slice(i * 32, 32, dim=1).permute((1, 0))
            weight = operand(new_first, new_last, SUMS, WARPS)
            product = warpgroup_mma(weight, x, part, is_async=True)
            part, _, _, first, last = warpgroup_mma_wait(
                1, deps=[product, first, last, new_first, new_last]
            )
    part, _, _ = warpgroup_mma_wait(0, deps=[part, first, last])
    return part


@gluon.jit
def fp4_tile(
    tile, expert, start, count, from_row, x, powers, order, weights, table, exponents, result,
    limit,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    N: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Rows from_row on of a chosen expert, in steps of PARTS times 256 columns."""
    EACH: gl.constexpr = N // MATRICES
    STEPS: gl.constexpr = COLUMNS // (PARTS * 256)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CODES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    PAIR: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    OF_BYTES: gl.constexpr = gl.SliceLayout(1, BYTES)
    WORD: gl.constexpr = gl.pointer_type(gl.uint32)
    codes = gl.allocate_shared_memory(gl.uint32, [STAGES * PARTS, N, 32], CODES)
    scales = gl.allocate_shared_memory(gl.uint32, [STAGES * PARTS, N, 2], FLAT)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES * PARTS, ROWS, 128], SWIZZLED)

    FIRST: gl.constexpr = 0 if MATRICES == 2 else 6
    code = address(table, expert, FIRST, WORD)
    scale = address(table, expert, FIRST + 1, WORD)
    apart, scales_apart = 0, 0
    if MATRICES == 2:
        apart = apart_of(table, expert, 0) // 4
        scales_apart = apart_of(table, expert, 1) // 4
    first = tile * EACH
    place = gl.arange(0, N, layout=gl.SliceLayout(1, WORDS))
    row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
    offset = (place // EACH).to(gl.int64) * gl.multiple_of(apart, 4) + row * (COLUMNS // 8)
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))
    code_at = code + (gl.expand_dims(offset, 1) + gl.expand_dims(column, 0))
    place = gl.arange(0, N, layout=gl.SliceLayout(1, PAIR))
    row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
    offset = (place // EACH).to(gl.int64) * gl.multiple_of(scales_apart, 4) + row * (COLUMNS // 128)
    column = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIR))
    scale_at = scale + (gl.expand_dims(offset, 1) + gl.expand_dims(column, 0))
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            copy_weights(codes, scales, i, i, code_at, scale_at, PARTS)
        async_copy.commit_group()
    top = largest_of(
        exponents, expert, tile, tile + 1, N, OUTPUTS, MATRICES, (OUTPUTS + EACH - 1) // EACH,
        gl.SliceLayout(1, groups(WARPS)), WARPS,
    ).to(gl.int32)  # fmt: skip
    wait()
    if MATRICES == 2:
        let_next_begin()
    row, _ = tokens_of(order, start, count, from_row, ROWS, TOP_K, MATRICES, True, OF_BYTES)
    byte = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, BYTES)), 0)
    x_at = x + (gl.expand_dims(row * COLUMNS, 1) + byte)
    there = gl.expand_dims(from_row + gl.arange(0, ROWS, layout=OF_BYTES) < count, 1)
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            copy_rows(rows, i, i, x_at, there, 2 * PARTS)
        async_copy.commit_group()
    row, pair = tokens_of(order, start, count, from_row, ROWS, TOP_K, MATRICES, True, line(WARPS))
    power = gl.load(powers + row)
    weight = power
    if MATRICES == 2:
        weight = gl.load(weights + pair).to(gl.float32)

    # More than the compiler knows to be constant.
    forty = gl.full([N, 4], 0x40404040, gl.int32, words_layout(1, WARPS)) + (count >> 30)
    total = gl.zeros([N, ROWS], gl.float32, sums(ROWS, WARPS))
    stage, next_stage = tile * 0, tile * 0 + (STAGES - 1)
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        ahead = step + STAGES - 1
        if ahead < STEPS:
            copy_weights(codes, scales, next_stage, ahead, code_at, scale_at, PARTS)
            copy_rows(rows, next_stage, ahead, x_at, there, 2 * PARTS)
        async_copy.commit_group()
        for nth in gl.static_range(PARTS):
            part = stage * PARTS + nth
            words = codes.index(part).load(words_layout(4, WARPS))
            four = scales.index(part).load(words_layout(2, WARPS))
            total += _product_256(words, four, rows, 2 * part, top, forty, WARPS)
        next_stage = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    store(
        total, power, weight, from_row, start, count, first, expert, table, exponents, result,
        limit, OUTPUTS, MATRICES, FLOAT8, WARPS,
    )  # fmt: skip
