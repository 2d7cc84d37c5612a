"""A tile of an expert in E4M3, chosen or shared, for kernel_few.py."""

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
from plugins.device.weights import FP8_BLOCKS as _FP8_BLOCKS
from plugins.moe.kernel_few_parts import address, apart_of, copy_rows, copy_weights, tokens_of
from plugins.moe.kernel_hopper_operand import sums
from plugins.moe.kernel_hopper_tile import activated

FP8_BLOCKS = gl.constexpr(_FP8_BLOCKS.value)


@gluon.jit
def _scale_values(words, WHICH: gl.constexpr):
    """float32 values of the scales in one byte of every word."""
    bits = ((words << (23 - 8 * WHICH) if WHICH < 3 else words >> 1) & 0x7F800000).to(gl.int32)
    bits = gl.maximum(bits, 0x00400000) + gl.where(bits == 0x7F800000, 0x00400000, 0)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def float8_tile(
    tile, expert, start, count, from_row, x, powers, order, weights, table, result, limit,
    STORED: gl.constexpr, CHOSEN: gl.constexpr, TOP_K: gl.constexpr, COLUMNS: gl.constexpr,
    OUTPUTS: gl.constexpr, MATRICES: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rows from_row on of an expert, in steps of PARTS times 128 columns, whose sums of 32 are
    scaled in float32."""
    EACH: gl.constexpr = N // MATRICES
    STEPS: gl.constexpr = COLUMNS // (PARTS * 128)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    SUMS: gl.constexpr = sums(ROWS, WARPS)
    CHUNKS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    BYTE: gl.constexpr = gl.pointer_type(gl.float8e4nv)
    WORD: gl.constexpr = gl.pointer_type(gl.uint32)
    codes = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PARTS, N, 128], SWIZZLED)
    scales = gl.allocate_shared_memory(gl.uint32, [STAGES * PARTS, N, 1], FLAT)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, PARTS * 128], SWIZZLED)

    FIRST: gl.constexpr = 0 if MATRICES == 2 else 6
    code = address(table, expert, FIRST, BYTE)
    scale = address(table, expert, FIRST + 1, WORD)
    apart, scales_apart = 0, 0
    if MATRICES == 2:
        apart = apart_of(table, expert, 0)
        scales_apart = apart_of(table, expert, 1) // 4
    first = tile * EACH
    place = gl.arange(0, N, layout=gl.SliceLayout(1, CHUNKS))
    row = gl.minimum(first + place % EACH, OUTPUTS - 1)
    offset = (place // EACH).to(gl.int64) * gl.multiple_of(apart, 16) + row * COLUMNS
    byte = gl.arange(0, 128, layout=gl.SliceLayout(0, CHUNKS))
    code_at = code + (gl.expand_dims(offset, 1) + gl.expand_dims(byte, 0))
    place = gl.arange(0, N, layout=gl.SliceLayout(1, SCALES))
    row = gl.minimum(first + place % EACH, OUTPUTS - 1)
    if STORED == FP8_BLOCKS:
        row = row // 32
    offset = (place // EACH).to(gl.int64) * scales_apart + row * (COLUMNS // 128)
    scale_at = scale + gl.expand_dims(offset, 1)
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            copy_weights(codes, scales, i, i, code_at, scale_at, PARTS)
        async_copy.commit_group()
    wait()
    if MATRICES == 2:
        let_next_begin()
    # Codes of rows lie in the order of a chosen expert's products.
    column = gl.arange(0, PARTS * 128, layout=gl.SliceLayout(0, WORDS))
    byte = column % 128
    at = column - byte + byte % 8 // 4 * 16 + byte // 32 * 4 + byte % 32 // 8 * 32 + byte % 4
    at = gl.max_contiguous(gl.multiple_of(at, 4), 4)
    OF_WORDS: gl.constexpr = gl.SliceLayout(1, WORDS)
    row, _ = tokens_of(order, start, count, from_row, ROWS, TOP_K, MATRICES, CHOSEN, OF_WORDS)
    x_at = x + (gl.expand_dims(row * COLUMNS, 1) + gl.expand_dims(at, 0))
    there = gl.expand_dims(from_row + gl.arange(0, ROWS, layout=OF_WORDS) < count, 1)
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            copy_rows(rows, i, i, x_at, there, 1)
        async_copy.commit_group()
    zeros = gl.zeros([N, ROWS], gl.float32, SUMS)
    total = zeros
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
            products = ()
            for i in gl.static_range(4):
                a = codes.index(part).slice(i * 32, 32, dim=1)
                b = rows.index(stage).slice(nth * 128 + i * 32, 32, dim=1).permute((1, 0))
                products += (warpgroup_mma(a, b, zeros, use_acc=False, is_async=True),)
            four = scales.index(part).reshape([N]).load(gl.SliceLayout(1, SUMS))
            products = warpgroup_mma_wait(0, deps=products)
            for i in gl.static_range(4):
                total += products[i] * gl.expand_dims(_scale_values(four, i), 1)
        next_stage = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    OF_SUMS: gl.constexpr = gl.SliceLayout(0, SUMS)
    row, pair = tokens_of(order, start, count, from_row, ROWS, TOP_K, MATRICES, CHOSEN, OF_SUMS)
    value = total * gl.expand_dims(gl.load(powers + row), 0)
    if MATRICES == 2:
        BOTH: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
        both = gl.permute(value.reshape([2, EACH, ROWS]), (1, 2, 0))
        gate, linear = gl.split(gl.convert_layout(both, BOTH))
        value = activated(gate, linear, limit)
        if CHOSEN:
            weight = gl.load(weights + pair).to(gl.float32)
            OF_VALUE: gl.constexpr = gl.SliceLayout(0, value.type.layout)
            value *= gl.expand_dims(gl.convert_layout(weight, OF_VALUE), 0)
    row = from_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, value.type.layout))
    output = first + gl.arange(0, EACH, layout=gl.SliceLayout(1, value.type.layout))
    at = gl.expand_dims((start + row).to(gl.int64) * OUTPUTS, 0) + gl.expand_dims(output, 1)
    there = gl.expand_dims(row < count, 0) & gl.expand_dims(output < OUTPUTS, 1)
    gl.store(result + at, value.to(result.dtype.element_ty), mask=there)
