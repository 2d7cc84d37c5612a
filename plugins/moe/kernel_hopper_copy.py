"""The warps of kernel_hopper.py that copy what the others multiply."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from plugins.device.weights import MXFP8
from plugins.moe.kernel_hopper_tile import output_of, rows_of, segment_of, width_of


@gluon.jit
def _copy_weights(into, matrix, other, first, words, MATRICES: gl.constexpr):
    """Words of codes or scales of both matrices, or of one, of a step that begins at `first`."""
    HALF: gl.constexpr = words.shape[0]
    async_copy.async_copy_global_to_shared(into.slice(0, HALF), matrix + first + words)
    if MATRICES == 2:
        async_copy.async_copy_global_to_shared(into.slice(HALF, HALF), other + first + words)


@gluon.jit
def _copy_rows(rows, stage, x, at, there):
    if rows.dtype == gl.float16:
        async_copy.async_copy_global_to_shared(rows.index(2 * stage), x + at, there)
        async_copy.async_copy_global_to_shared(rows.index(2 * stage + 1), x + 64 + at, there)
    else:
        async_copy.async_copy_global_to_shared(rows.index(stage), x + at, there)


@gluon.jit
def copy_tiles(
    codes, scales, rows, more_rows, full, empty, x, segments, num_segments, order, table,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    LEVELS: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr, STORED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The copying warps: codes, scales and rows of tokens of every item's steps."""
    N: gl.constexpr = codes.shape[1]
    ROWS: gl.constexpr = rows.shape[1]
    OTHER: gl.constexpr = more_rows.shape[1]
    HALF: gl.constexpr = N // MATRICES
    TILES: gl.constexpr = (OUTPUTS + HALF - 1) // HALF
    # Words of a row's codes in a step, and of those that are copied at a time.
    STEP: gl.constexpr = 32 if STORED == MXFP8 else 16
    LENGTH: gl.constexpr = 32 if WIDE else STEP
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // LENGTH, LENGTH // 4], [4, 1], [1, 0])
    # Scales of a step.
    PER: gl.constexpr = scales.shape[2] // 2
    PAIR: gl.constexpr = gl.BlockedLayout([1, 2 * PER], [32, 1], [4, 1], [1, 0])
    PAIRS: gl.constexpr = scales.shape[0]
    # Columns of a line of tokens, and those of 16 bytes.
    LINE: gl.constexpr = rows.shape[2]
    BYTES: gl.constexpr = gl.BlockedLayout([1, LINE // 8], [4, 8], [4, 1], [1, 0])
    OF_BYTES: gl.constexpr = gl.SliceLayout(1, BYTES)
    WORD: gl.constexpr = gl.pointer_type(gl.uint32)
    SCALES: gl.constexpr = gl.pointer_type(scales.dtype)
    end = gl.load(num_segments) * TILES
    done = 0
    for item in range(gl.program_id(0), end, gl.num_programs(0)):
        expert, start, count = segment_of(segments, item, end, TILES)
        # w1 and w3, or w2: the matrices of an expert have three addresses each.
        address = table + expert.to(gl.int64) * 9 + (0 if MATRICES == 2 else 6)
        code = gl.multiple_of(gl.load(address).to(WORD), 16)
        scale = gl.multiple_of(gl.load(address + 1).to(SCALES), 16)
        other_code, other_scale = code, scale
        if MATRICES == 2:
            other_code = gl.multiple_of(gl.load(address + 3).to(WORD), 16)
            other_scale = gl.multiple_of(gl.load(address + 4).to(SCALES), 16)
        first = item % TILES * HALF
        place = gl.arange(0, HALF, layout=gl.SliceLayout(1, WORDS))
        row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
        word = gl.arange(0, LENGTH, layout=gl.SliceLayout(0, WORDS))
        code_row = gl.expand_dims(row * (COLUMNS // 128 * STEP), 1) + gl.expand_dims(word, 0)
        place = gl.arange(0, HALF, layout=gl.SliceLayout(1, PAIR))
        row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
        word = gl.arange(0, 2 * PER, layout=gl.SliceLayout(0, PAIR))
        scale_row = gl.expand_dims(row * (COLUMNS // 128 * PER), 1) + gl.expand_dims(word, 0)
        byte = gl.expand_dims(gl.arange(0, LINE, layout=gl.SliceLayout(0, BYTES)), 0)
        row = rows_of(order, start, count, 0, ROWS, MATRICES, OF_BYTES)
        x_row = gl.expand_dims(row // TOP_K * COLUMNS, 1) + byte
        row = rows_of(order, start, count, ROWS, OTHER, MATRICES, OF_BYTES)
        more_x_row = gl.expand_dims(row // TOP_K * COLUMNS, 1) + byte
        width = width_of(count, ROWS, OTHER if OTHER != ROWS else 0, LEVELS)
        there = gl.expand_dims(gl.arange(0, ROWS, layout=OF_BYTES) < width, 1)
        more_there = gl.expand_dims(ROWS + gl.arange(0, OTHER, layout=OF_BYTES) < width, 1)
        for step in range(COLUMNS // 128):
            stage = (done + step) % STAGES
            mbarrier.wait(empty.index(stage), ((done + step) // STAGES + 1) & 1)
            if not WIDE:
                _copy_weights(codes.index(stage), code, other_code, step * STEP, code_row, MATRICES)
            _copy_rows(rows, stage, x + step * 128, x_row, there)
            if OTHER != ROWS:
                _copy_rows(more_rows, stage, x + step * 128, more_x_row, more_there)
            if step % 2 == 0:
                pair = (done + step) // 2 % PAIRS
                if WIDE:
                    _copy_weights(
                        codes.index(pair), code, other_code, step * STEP, code_row, MATRICES
                    )
                _copy_weights(
                    scales.index(pair), scale, other_scale, step * PER, scale_row, MATRICES
                )
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        done += COLUMNS // 128
    async_copy.commit_group()
    async_copy.wait_group(0)
