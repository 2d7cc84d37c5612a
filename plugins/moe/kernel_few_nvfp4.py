"""A tile of an expert in NVFP4, chosen or shared, for kernel_few.py."""

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
from plugins.moe.kernel_hopper_operand import groups, sums, words_layout
from plugins.moe.kernel_hopper_tile import arranged, line, output_of, store_values
from plugins.moe.kernel_nvfp4 import UNIT, eight_values, operand, two_scales


@gluon.jit
def _product_256(total, codes, scales, rows, at: gl.constexpr, WARPS: gl.constexpr):
    """total + 256 columns of weight rows [N] times those of `rows` from `at` on."""
    N: gl.constexpr = codes.shape[0]
    SUMS: gl.constexpr = total.type.layout
    ONE: gl.constexpr = words_layout(1, WARPS)
    halves = gl.split(gl.permute(codes.reshape([N, 2, 16]), (0, 2, 1)))
    both = gl.split(gl.permute(scales.reshape([N, 2, 4]), (0, 2, 1)))
    # What the product under way reads: held until it ends, so that nothing is decoded over it.
    none = gl.zeros([N, 4], gl.int32, ONE)
    h0, h1, h2, h3, h4, h5, h6, h7 = none, none, none, none, none, none, none, none
    for half in gl.static_range(2):
        two = two_scales(gl.convert_layout(both[half], ONE).to(gl.int32))
        even, odd = gl.split(halves[half].reshape([N, 4, 2, 2]))
        word_0, word_2 = gl.split(even)
        word_1, word_3 = gl.split(odd)
        words = (word_0, word_1, word_2, word_3)
        for i in gl.static_range(2):
            a = eight_values(gl.convert_layout(words[2 * i], ONE), two[i])
            b = eight_values(gl.convert_layout(words[2 * i + 1], ONE), two[i])
            x = rows.slice(at + half * 128 + i * 64, 64, dim=1).permute((1, 0))
            product = warpgroup_mma(operand(a, b, SUMS, WARPS), x, total, is_async=True)
            total, _, _, _, _, _, _, _, _, h0, h1, h2, h3, h4, h5, h6, h7 = warpgroup_mma_wait(
                1,
                deps=[
                    product, h0, h1, h2, h3, h4, h5, h6, h7,
                    a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3],
                ],
            )  # fmt: skip
    return warpgroup_mma_wait(0, deps=[total, h0, h1, h2, h3, h4, h5, h6, h7])[0]


@gluon.jit
def nvfp4_tile(
    tile, expert, start, count, from_row, x, powers, order, weights, table, result, limit,
    CHOSEN: gl.constexpr, TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr,
    MATRICES: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rows from_row on of an expert, in steps of PARTS times 256 columns."""
    EACH: gl.constexpr = N // MATRICES
    STEPS: gl.constexpr = COLUMNS // (PARTS * 256)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CODES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    EIGHT: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    OF_VALUES: gl.constexpr = gl.SliceLayout(1, VALUES)
    WORD: gl.constexpr = gl.pointer_type(gl.uint32)
    codes = gl.allocate_shared_memory(gl.uint32, [STAGES * PARTS, N, 32], CODES)
    scales = gl.allocate_shared_memory(gl.uint16, [STAGES * PARTS, N, 8], FLAT)
    rows = gl.allocate_shared_memory(gl.float16, [STAGES, ROWS, PARTS * 256], SWIZZLED)

    FIRST: gl.constexpr = 0 if MATRICES == 2 else 6
    code = address(table, expert, FIRST, WORD)
    scale = address(table, expert, FIRST + 1, gl.pointer_type(gl.uint16))
    apart, scales_apart = 0, 0
    if MATRICES == 2:
        apart = apart_of(table, expert, 0) // 4
        scales_apart = apart_of(table, expert, 1) // 2
    first = tile * EACH
    place = gl.arange(0, N, layout=gl.SliceLayout(1, WORDS))
    row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
    offset = (place // EACH).to(gl.int64) * gl.multiple_of(apart, 4) + row * (COLUMNS // 8)
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))
    code_at = code + (gl.expand_dims(offset, 1) + gl.expand_dims(column, 0))
    place = gl.arange(0, N, layout=gl.SliceLayout(1, EIGHT))
    row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
    offset = (place // EACH).to(gl.int64) * gl.multiple_of(scales_apart, 8) + row * (COLUMNS // 32)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, EIGHT))
    scale_at = scale + (gl.expand_dims(offset, 1) + gl.expand_dims(column, 0))
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            copy_weights(codes, scales, i, i, code_at, scale_at, PARTS)
        async_copy.commit_group()
    factor = gl.load(address(table, expert, FIRST + 2, gl.pointer_type(gl.float32))) * UNIT
    other = factor
    if MATRICES == 2:
        other = gl.load(address(table, expert, 5, gl.pointer_type(gl.float32))) * UNIT
    wait()
    if MATRICES == 2:
        let_next_begin()
    row, _ = tokens_of(order, start, count, from_row, ROWS, TOP_K, MATRICES, CHOSEN, OF_VALUES)
    column = gl.expand_dims(gl.arange(0, PARTS * 256, layout=gl.SliceLayout(0, VALUES)), 0)
    x_at = x + (gl.expand_dims(row * COLUMNS, 1) + column)
    there = gl.expand_dims(from_row + gl.arange(0, ROWS, layout=OF_VALUES) < count, 1)
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            copy_rows(rows, i, i, x_at, there, 1)
        async_copy.commit_group()
    row, pair = tokens_of(order, start, count, from_row, ROWS, TOP_K, MATRICES, CHOSEN, line(WARPS))
    power = gl.load(powers + row)
    weight = gl.full([ROWS], 1.0, gl.float32, line(WARPS))
    if MATRICES == 2 and CHOSEN:
        weight = gl.load(weights + pair).to(gl.float32)
    total = gl.zeros([N, ROWS], gl.float32, sums(ROWS, WARPS, 16))
    stage, next_stage = tile * 0, tile * 0 + (STAGES - 1)
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        ahead = step + STAGES - 1
        if ahead < STEPS:
            copy_weights(codes, scales, next_stage, ahead, code_at, scale_at, PARTS)
            copy_rows(rows, next_stage, ahead, x_at, there, 1)
        async_copy.commit_group()
        for nth in gl.static_range(PARTS):
            part = stage * PARTS + nth
            words = codes.index(part).load(words_layout(4, WARPS))
            eight = scales.index(part).load(groups(WARPS))
            total = _product_256(total, words, eight, rows.index(stage), nth * 256, WARPS)
        next_stage = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    value = arranged(total, MATRICES, WARPS)
    place = gl.arange(0, N, layout=gl.SliceLayout(1, value.type.layout))
    power = gl.convert_layout(power, gl.SliceLayout(0, value.type.layout))
    factor = gl.where(place % MATRICES == 0, factor, other)
    value *= gl.expand_dims(factor, 1) * gl.expand_dims(power, 0)
    store_values(
        value, weight, from_row, start, count, first, result, limit, OUTPUTS, MATRICES, WARPS
    )
