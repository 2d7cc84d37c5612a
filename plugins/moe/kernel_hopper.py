"""Released FP4 experts of many rows on compute capability 9.0, in Gluon; docs/kernels/moe.md says
why.

As product_float8, but of a block of twelve warps four copy what comes next, and eight multiply:
they decode codes while the tensor core still multiplies those before. Blocks take tiles in turn
until all are done. Sums stay in the tensor core from the first column to the last.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.moe.kernel_hopper_operand import (
    decoded,
    groups,
    operand,
    sums,
    tables,
    words_layout,
)
from plugins.moe.kernel_hopper_tile import largest_of, line, output_of, rows_of, store

# Registers of a thread that copies.
_COPYING = gl.constexpr(56)


@gluon.jit
def _multiply(
    codes, scales, rows, more_rows, full, empty, top, done,
    STEPS: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Weight rows [N] times the rows of a tile and more rows, in steps of 128 columns; `done` steps
    came before."""
    N: gl.constexpr = top.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    OTHER: gl.constexpr = more_rows.shape[1]
    MORE: gl.constexpr = OTHER if OTHER != ROWS else 0
    PAIRS: gl.constexpr = scales.shape[0]
    SCALES: gl.constexpr = gl.SliceLayout(1, groups(WARPS))
    SUMS: gl.constexpr = sums(ROWS, WARPS)
    OTHER_SUMS: gl.constexpr = sums(OTHER, WARPS)
    total = gl.zeros([N, ROWS], gl.float32, SUMS)
    other = total
    if MORE > 0:
        other = gl.zeros([N, MORE], gl.float32, OTHER_SUMS)
    # What the product under way reads: held until it ends, so that nothing is decoded over it.
    first = gl.zeros([N, 4], gl.int32, words_layout(1, WARPS))
    last = first
    for pair in range(STEPS // 2):
        for nth in gl.static_range(2):
            at = done + pair * 2 + nth
            stage = at % STAGES
            mbarrier.wait(full.index(stage), (at // STAGES) & 1)
            fence_async_shared()
            if nth == 0:
                if WIDE:
                    every = codes.index(at // 2 % PAIRS).load(words_layout(4, WARPS))
                    words, next_words = gl.split(gl.permute(every.reshape([N, 2, 16]), (0, 2, 1)))
                both = scales.index(at // 2 % PAIRS).load(words_layout(2, WARPS))
                four, next_four = gl.split(both)
            else:
                four = next_four
                if WIDE:
                    words = next_words
            if not WIDE:
                words = codes.index(stage).load(words_layout(4, WARPS))
            low, high = tables(gl.convert_layout(four, SCALES), top, WARPS)
            low = gl.convert_layout(low, words_layout(1, WARPS))
            high = gl.convert_layout(high, words_layout(1, WARPS))
            even, odd = gl.split(words.reshape([N, 4, 2, 2]))
            word_0, word_2 = gl.split(even)
            word_1, word_3 = gl.split(odd)
            # A word of each group at a time: 32 columns of the right operand as they are stored.
            for part in gl.static_range(4):
                word = (word_0, word_1, word_2, word_3)[part]
                word = gl.convert_layout(word, words_layout(1, WARPS))
                new_first, new_last = decoded(word, low, high)
                weight = operand(new_first, new_last, SUMS, WARPS)
                x = rows.index(stage).slice(part * 32, 32, dim=1)
                product = warpgroup_mma(weight, x.permute((1, 0)), total, is_async=True)
                if MORE > 0:
                    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, OTHER_SUMS, 4))
                    x = more_rows.index(stage).slice(part * 32, 32, dim=1)
                    more = warpgroup_mma(weight, x.permute((1, 0)), other, is_async=True)
                    total, other, _, _, first, last = warpgroup_mma_wait(
                        2, deps=[product, more, first, last, new_first, new_last]
                    )
                else:
                    total, _, _, first, last = warpgroup_mma_wait(
                        1, deps=[product, first, last, new_first, new_last]
                    )
                if part == 0:
                    # Nothing reads the stage before any more.
                    gl.thread_barrier()
                    before = (at + STAGES - 1) % STAGES
                    mbarrier.arrive(empty.index(before), count=1, pred=at > done)
    if MORE > 0:
        total, other, _, _ = warpgroup_mma_wait(0, deps=[total, other, first, last])
    else:
        total, _, _ = warpgroup_mma_wait(0, deps=[total, first, last])
        other = total
    gl.thread_barrier()
    mbarrier.arrive(empty.index((done + STEPS - 1) % STAGES), count=1)
    return total, other


@gluon.jit
def _segment(segments, item, end, TILES: gl.constexpr):
    """Expert, first place and number of rows of an item, or of the last one."""
    at = segments + gl.minimum(item, end - 1) // TILES * 3
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _multiply_tiles(
    codes, scales, rows, more_rows, full, empty,
    powers, segments, num_segments, order, weights, exponents, result, limit,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, WARPS: gl.constexpr,
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
    expert, start, count = _segment(segments, item, end, TILES)
    next_expert, next_start, next_count = _segment(segments, item + step, end, TILES)
    top = largest_of(exponents, expert, item, end, N, OUTPUTS, MATRICES, TILES, SCALES, WARPS)
    row = rows_of(order, start, count, 0, ROWS, MATRICES, LINE)
    other_row = rows_of(order, start, count, ROWS, OTHER, MATRICES, LINE)
    done = 0
    for at in range(item, end, step):
        power, other_power = gl.load(powers + row // TOP_K), gl.load(powers + other_row // TOP_K)
        weight, other_weight = power, other_power
        if MATRICES == 2:
            weight = gl.load(weights + row).to(gl.float32)
            other_weight = gl.load(weights + other_row).to(gl.float32)
        row = rows_of(order, next_start, next_count, 0, ROWS, MATRICES, LINE)
        other_row = rows_of(order, next_start, next_count, ROWS, OTHER, MATRICES, LINE)
        next_top = largest_of(
            exponents, next_expert, at + step, end, N, OUTPUTS, MATRICES, TILES, SCALES, WARPS
        )
        far_expert, far_start, far_count = _segment(segments, at + 2 * step, end, TILES)
        total, other = _multiply(
            codes, scales, rows, more_rows, full, empty, top.to(gl.int32), done,
            COLUMNS // 128, STAGES, WIDE, WARPS,
        )  # fmt: skip
        done += COLUMNS // 128
        first = at % TILES * (N // MATRICES)
        store(
            total, power, weight, 0, start, count, first, expert, exponents, result, limit,
            OUTPUTS, MATRICES, WARPS,
        )  # fmt: skip
        if OTHER != ROWS:
            store(
                other, other_power, other_weight, ROWS, start, count, first, expert, exponents,
                result, limit, OUTPUTS, MATRICES, WARPS,
            )  # fmt: skip
        top = next_top
        expert, start, count = next_expert, next_start, next_count
        next_expert, next_start, next_count = far_expert, far_start, far_count


@gluon.jit
def _copy_codes(codes, code, other_code, row, step, MATRICES: gl.constexpr):
    HALF: gl.constexpr = row.shape[0]
    async_copy.async_copy_global_to_shared(codes.slice(0, HALF), code + step * 16 + row)
    if MATRICES == 2:
        other = codes.slice(HALF, HALF)
        async_copy.async_copy_global_to_shared(other, other_code + step * 16 + row)


@gluon.jit
def _copy_tiles(
    codes, scales, rows, more_rows, full, empty, x, segments, num_segments, order, table,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The copying warps: codes, scales and rows of tokens of every item's steps."""
    N: gl.constexpr = codes.shape[1]
    ROWS: gl.constexpr = rows.shape[1]
    OTHER: gl.constexpr = more_rows.shape[1]
    HALF: gl.constexpr = N // MATRICES
    TILES: gl.constexpr = (OUTPUTS + HALF - 1) // HALF
    # Words of a row that are copied at a time.
    LENGTH: gl.constexpr = 32 if WIDE else 16
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // LENGTH, LENGTH // 4], [4, 1], [1, 0])
    PAIR: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    PAIRS: gl.constexpr = scales.shape[0]
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    OF_BYTES: gl.constexpr = gl.SliceLayout(1, BYTES)
    WORD: gl.constexpr = gl.pointer_type(gl.uint32)
    end = gl.load(num_segments) * TILES
    done = 0
    for item in range(gl.program_id(0), end, gl.num_programs(0)):
        expert, start, count = _segment(segments, item, end, TILES)
        # w1 and w3, or w2: the matrices of an expert have three addresses each.
        address = table + expert.to(gl.int64) * 9 + (0 if MATRICES == 2 else 6)
        code = gl.multiple_of(gl.load(address).to(WORD), 16)
        scale = gl.multiple_of(gl.load(address + 1).to(WORD), 16)
        other_code, other_scale = code, scale
        if MATRICES == 2:
            other_code = gl.multiple_of(gl.load(address + 3).to(WORD), 16)
            other_scale = gl.multiple_of(gl.load(address + 4).to(WORD), 16)
        first = item % TILES * HALF
        place = gl.arange(0, HALF, layout=gl.SliceLayout(1, WORDS))
        row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
        word = gl.arange(0, LENGTH, layout=gl.SliceLayout(0, WORDS))
        code_row = gl.expand_dims(row * (COLUMNS // 8), 1) + gl.expand_dims(word, 0)
        place = gl.arange(0, HALF, layout=gl.SliceLayout(1, PAIR))
        row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
        word = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIR))
        scale_row = gl.expand_dims(row * (COLUMNS // 128), 1) + gl.expand_dims(word, 0)
        byte = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, BYTES)), 0)
        row = rows_of(order, start, count, 0, ROWS, MATRICES, OF_BYTES)
        x_row = gl.expand_dims(row // TOP_K * COLUMNS, 1) + byte
        row = rows_of(order, start, count, ROWS, OTHER, MATRICES, OF_BYTES)
        other_x_row = gl.expand_dims(row // TOP_K * COLUMNS, 1) + byte
        for step in range(COLUMNS // 128):
            stage = (done + step) % STAGES
            mbarrier.wait(empty.index(stage), ((done + step) // STAGES + 1) & 1)
            if not WIDE:
                _copy_codes(codes.index(stage), code, other_code, code_row, step, MATRICES)
            async_copy.async_copy_global_to_shared(rows.index(stage), x + step * 128 + x_row)
            if OTHER != ROWS:
                async_copy.async_copy_global_to_shared(
                    more_rows.index(stage), x + step * 128 + other_x_row
                )
            if step % 2 == 0:
                if WIDE:
                    into = codes.index((done + step) // 2 % PAIRS)
                    _copy_codes(into, code, other_code, code_row, step, MATRICES)
                pair = scales.index((done + step) // 2 % PAIRS)
                async_copy.async_copy_global_to_shared(
                    pair.slice(0, HALF), scale + step + scale_row
                )
                if MATRICES == 2:
                    async_copy.async_copy_global_to_shared(
                        pair.slice(HALF, HALF), other_scale + step + scale_row
                    )
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        done += COLUMNS // 128
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def product_hopper(
    x, powers, segments, num_segments, order, weights, table, exponents, result, limit,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    N: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
    WIDE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As kernel_product.gate_up with MATRICES 2, and as `down` with 1 and TOP_K 1: N / MATRICES
    outputs for the ROWS + MORE rows of a segment at most.

    segments int32 [num_segments, 3]: expert, first place, rows. Any grid of one dimension. WIDE:
    codes are copied for two steps at once. WARPS, 4 or 8, multiply.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    # Of what is copied for two steps, so many are under way that none is written over before its
    # first step has ended.
    PAIRS: gl.constexpr = STAGES // 2 + 1
    if WIDE:
        CODES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        codes = gl.allocate_shared_memory(gl.uint32, [PAIRS, N, 32], CODES)
    else:
        codes = gl.allocate_shared_memory(gl.uint32, [STAGES, N, 16], FLAT)
    scales = gl.allocate_shared_memory(gl.uint32, [PAIRS, N, 2], FLAT)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], SWIZZLED)
    more_rows = rows
    if MORE > 0:
        more_rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, MORE, 128], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply_tiles, (
                codes, scales, rows, more_rows, full, empty,
                powers, segments, num_segments, order, weights, exponents, result, limit,
                TOP_K, COLUMNS, OUTPUTS, MATRICES, STAGES, WIDE, WARPS,
            )),
            (_copy_tiles, (
                codes, scales, rows, more_rows, full, empty, x, segments, num_segments, order,
                table, TOP_K, COLUMNS, OUTPUTS, MATRICES, STAGES, WIDE, WARPS,
            )),
        ],
        [4], [_COPYING],
    )  # fmt: skip
