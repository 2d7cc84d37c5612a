"""Experts of many rows on compute capability 9.0, in Gluon; docs/kernels/moe.md says why.

Of a block of twelve warps four copy what comes next, and eight multiply: they decode codes while
the tensor core still multiplies those before. Blocks take tiles in turn until all are done. Sums
stay in the tensor core from the first column to the last. FP4 and MXFP8 are multiplied as E4M3,
NVFP4 as float16.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from plugins.device.weights import MXFP8, NVFP4
from plugins.moe.kernel_hopper_copy import copy_tiles
from plugins.moe.kernel_hopper_operand import groups
from plugins.moe.kernel_hopper_product import multiply
from plugins.moe.kernel_hopper_tile import largest_of, line, rows_of, segment_of, store

# Registers of a thread that copies.
_COPYING = gl.constexpr(56)


@gluon.jit
def _tile(
    codes, scales, rows, more_rows, full, empty, top, done, row, more_row, start, count, first,
    expert, powers, weights, table, exponents, result, limit,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    MORE: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr, STORED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Outputs `first` on for rows `row` [ROWS] of a segment, and for MORE others."""
    ROWS: gl.constexpr = row.shape[0]
    power, more_power = gl.load(powers + row // TOP_K), gl.load(powers + more_row // TOP_K)
    weight, more_weight = power, more_power
    if MATRICES == 2:
        weight = gl.load(weights + row).to(gl.float32)
        more_weight = gl.load(weights + more_row).to(gl.float32)
    total, more = multiply(
        codes, scales, rows, more_rows, full, empty, top, done,
        ROWS, MORE, COLUMNS // 128, STAGES, WIDE, STORED, WARPS,
    )  # fmt: skip
    store(
        total, power, weight, 0, start, count, first, expert, table, exponents, result, limit,
        OUTPUTS, MATRICES, STORED, WARPS,
    )  # fmt: skip
    if MORE > 0:
        store(
            more, more_power, more_weight, ROWS, start, count, first, expert, table, exponents,
            result, limit, OUTPUTS, MATRICES, STORED, WARPS,
        )  # fmt: skip


@gluon.jit
def _multiply_tiles(
    codes, scales, rows, more_rows, full, empty,
    powers, segments, num_segments, order, weights, table, exponents, result, limit,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    MORE: gl.constexpr, LEVELS: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
    STORED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The multiplying warps. What an item needs beside its stages is loaded while the items before
    it are multiplied."""
    N: gl.constexpr = codes.shape[1]
    ROWS: gl.constexpr = rows.shape[1]
    OTHER: gl.constexpr = more_rows.shape[1]
    TILES: gl.constexpr = (OUTPUTS + N // MATRICES - 1) // (N // MATRICES)
    SCALES: gl.constexpr = gl.SliceLayout(1, groups(WARPS))
    LINE: gl.constexpr = line(WARPS)
    end = gl.load(num_segments) * TILES
    step = gl.num_programs(0)
    item = gl.program_id(0)
    expert, start, count = segment_of(segments, item, end, TILES)
    next_expert, next_start, next_count = segment_of(segments, item + step, end, TILES)
    top = gl.full([N], 0, gl.uint8, SCALES)
    if STORED != NVFP4:
        top = largest_of(exponents, expert, item, end, N, OUTPUTS, MATRICES, TILES, SCALES, WARPS)
    row = rows_of(order, start, count, 0, ROWS, MATRICES, LINE)
    more_row = rows_of(order, start, count, ROWS, OTHER, MATRICES, LINE)
    done = 0
    for at in range(item, end, step):
        next_row = rows_of(order, next_start, next_count, 0, ROWS, MATRICES, LINE)
        next_more_row = rows_of(order, next_start, next_count, ROWS, OTHER, MATRICES, LINE)
        next_top = top
        if STORED != NVFP4:
            next_top = largest_of(
                exponents, next_expert, at + step, end, N, OUTPUTS, MATRICES, TILES, SCALES, WARPS
            )
        far_expert, far_start, far_count = segment_of(segments, at + 2 * step, end, TILES)
        first = at % TILES * (N // MATRICES)
        steps = codes, scales, rows, more_rows, full, empty, top.to(gl.int32), done
        of_item = start, count, first, expert, powers, weights, table, exponents, result, limit
        if LEVELS >= 2 and count <= ROWS // 4:
            few = rows_of(order, start, count, 0, ROWS // 4, MATRICES, LINE)
            _tile(
                *steps, few, few, *of_item,
                TOP_K, COLUMNS, OUTPUTS, MATRICES, 0, STAGES, WIDE, STORED, WARPS,
            )  # fmt: skip
        elif LEVELS >= 1 and count <= ROWS // 2:
            few = rows_of(order, start, count, 0, ROWS // 2, MATRICES, LINE)
            _tile(
                *steps, few, few, *of_item,
                TOP_K, COLUMNS, OUTPUTS, MATRICES, 0, STAGES, WIDE, STORED, WARPS,
            )  # fmt: skip
        elif MORE > 0 and count <= ROWS:
            _tile(
                *steps, row, row, *of_item,
                TOP_K, COLUMNS, OUTPUTS, MATRICES, 0, STAGES, WIDE, STORED, WARPS,
            )  # fmt: skip
        else:
            _tile(
                *steps, row, more_row, *of_item,
                TOP_K, COLUMNS, OUTPUTS, MATRICES, MORE, STAGES, WIDE, STORED, WARPS,
            )  # fmt: skip
        done += COLUMNS // 128
        row, more_row, top = next_row, next_more_row, next_top
        expert, start, count = next_expert, next_start, next_count
        next_expert, next_start, next_count = far_expert, far_start, far_count


@gluon.jit
def product_hopper(
    x, powers, segments, num_segments, order, weights, table, exponents, result, limit,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    STORED: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr,
    LEVELS: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As kernel_product.gate_up with MATRICES 2, and as `down` with 1 and TOP_K 1: N / MATRICES
    outputs for the ROWS + MORE rows of a segment at most, as wide as width_of says.

    x: E4M3 codes, for NVFP4 float16, with a power of two a row. segments int32 [num_segments, 3]:
    expert, first place, rows. Any grid of one dimension. WIDE: codes are copied for two steps at
    once, not of MXFP8. WARPS, 4 or 8, multiply.
    """
    HALVES: gl.constexpr = STORED == NVFP4
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Of what is copied for two steps, so many are under way that none is written over before its
    # first step has ended.
    PAIRS: gl.constexpr = STAGES // 2 + 1
    # Words of codes that are copied at a time.
    LENGTH: gl.constexpr = 32 if WIDE or STORED == MXFP8 else 16
    CODES: gl.constexpr = FLAT if LENGTH == 16 else gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    codes = gl.allocate_shared_memory(gl.uint32, [PAIRS if WIDE else STAGES, N, LENGTH], CODES)
    # Scales of two steps in words, or as each thread takes two of them.
    SCALE: gl.constexpr = gl.uint16 if HALVES else gl.uint32
    scales = gl.allocate_shared_memory(SCALE, [PAIRS, N, 8 if HALVES else 2], FLAT)
    # Lines of 128 bytes.
    LINE: gl.constexpr = 64 if HALVES else 128
    LINES: gl.constexpr = 2 * STAGES if HALVES else STAGES
    KIND: gl.constexpr = gl.float16 if HALVES else gl.float8e4nv
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16 if HALVES else 8, rank=2)
    rows = gl.allocate_shared_memory(KIND, [LINES, ROWS, LINE], SWIZZLED)
    more_rows = rows
    if MORE > 0:
        more_rows = gl.allocate_shared_memory(KIND, [LINES, MORE, LINE], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply_tiles, (
                codes, scales, rows, more_rows, full, empty,
                powers, segments, num_segments, order, weights, table, exponents, result, limit,
                TOP_K, COLUMNS, OUTPUTS, MATRICES, MORE, LEVELS, STAGES, WIDE, STORED, WARPS,
            )),
            (copy_tiles, (
                codes, scales, rows, more_rows, full, empty, x, segments, num_segments, order,
                table, TOP_K, COLUMNS, OUTPUTS, MATRICES, LEVELS, STAGES, WIDE, STORED, WARPS,
            )),
        ],
        [4], [_COPYING],
    )  # fmt: skip
