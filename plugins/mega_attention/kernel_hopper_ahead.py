"""The warps that decode for whole rows, of the sparse attention on Hopper: codes wait in shared
memory, a tile of entries or half a tile of window rows, on their way while the one before is
decoded.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from plugins.mega_attention.kernel_hopper_decode import (
    decode_by,
    fetch_queries,
    flags,
    load_scales,
    load_slots,
    rows_at,
    scale_values,
    words_at,
)


@gluon.jit
def _copy_codes(
    data, slots, page_stride, buffer, ROWS: gl.constexpr, ROW: gl.constexpr, WORDS: gl.constexpr,
    WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `load_codes`, the words on their way to `buffer`, zeros at slot −1."""
    row = rows_at(data, slots, page_stride, ROWS, ROW)
    at, read = words_at(row, slots, WORDS, WARPS)
    async_copy.async_copy_global_to_shared(buffer, at, mask=read)
    async_copy.commit_group()
    return load_scales(row, slots, WORDS, WIDTH, WARPS)


@gluon.jit
def _wide(row):
    """For addresses."""
    return row.to(gl.int64)


@gluon.jit
def decode_rows(
    q, row_stride, head_stride, keys, bias, buffer, full, empty,
    window, window_pages, WINDOW_ROWS: gl.constexpr, WINDOW_ROW: gl.constexpr,
    main, main_pages, MAIN_ROWS: gl.constexpr, MAIN_ROW: gl.constexpr,
    all_window_slots, window_stride, window_keys, all_main_slots, main_stride, main_keys, num_rows,
    H: gl.constexpr, WIDTH: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Entries first, then window rows; a row has an even number of tiles, of which the last may
    hold no key. Whoever reads a tile fences it: a fence here would wait for what is on its way."""
    HALF: gl.constexpr = TILE // 2
    OF_MAIN: gl.constexpr = WIDTH // 8
    OF_WINDOW: gl.constexpr = WIDTH // 4
    MAIN: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0]))
    WINDOW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
    NARROW: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    wide = buffer._reinterpret(gl.uint32, [HALF, OF_WINDOW], FLAT)
    odd = (gl.cdiv(window_keys, TILE) + gl.cdiv(main_keys, TILE)) % 2
    last = (gl.cdiv(window_keys, TILE) + odd) * TILE
    tile = 0
    for item in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row = _wide(item)
        fetch_queries(q + row * row_stride, head_stride, H, WIDTH, WARPS)
        window_slots = all_window_slots + 2 * row * window_stride
        main_slots = all_main_slots + 2 * row * main_stride
        w0 = load_slots(window_slots, 0, window_keys, HALF, WINDOW)
        w1 = load_slots(window_slots, HALF, window_keys, HALF, WINDOW)
        here = load_slots(main_slots, 0, main_keys, TILE, MAIN)
        # Other threads' last copies, of what is behind the end, fill the same words with zeros.
        async_copy.wait_group(0)
        gl.thread_barrier()
        scales = _copy_codes(
            main, here, main_pages, buffer, MAIN_ROWS, MAIN_ROW, OF_MAIN, WIDTH, WARPS
        )
        coming = load_slots(main_slots, TILE, main_keys, TILE, MAIN)
        for first in range(0, main_keys, TILE):
            stage = tile % 2
            async_copy.wait_group(0)
            words = buffer.load(NARROW)
            scale = scale_values(scales, False)
            scales = _copy_codes(
                main, coming, main_pages, buffer, MAIN_ROWS, MAIN_ROW, OF_MAIN, WIDTH, WARPS
            )
            after = load_slots(main_slots, first + 2 * TILE, main_keys, TILE, MAIN)
            mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
            bias.index(stage).store(flags(here))
            keys.index(stage).store(decode_by(words, scale, TILE, WIDTH, True))
            gl.thread_barrier()
            mbarrier.arrive(full.index(stage), count=1)
            here, coming = coming, after
            tile += 1
        async_copy.wait_group(0)
        gl.thread_barrier()
        scales = _copy_codes(
            window, w0, window_pages, wide, WINDOW_ROWS, WINDOW_ROW, OF_WINDOW, WIDTH, WARPS
        )
        for first in range(0, last, TILE):
            stage = tile % 2
            rows, added = keys.index(stage), bias.index(stage)
            async_copy.wait_group(0)
            words = wide.load(WIDE)
            scale = scale_values(scales, True)
            scales = _copy_codes(
                window, w1, window_pages, wide, WINDOW_ROWS, WINDOW_ROW, OF_WINDOW, WIDTH, WARPS
            )
            after = load_slots(window_slots, first + TILE, window_keys, HALF, WINDOW)
            mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
            added.slice(0, HALF).store(flags(w0))
            rows.slice(0, HALF).store(decode_by(words, scale, HALF, WIDTH, True))
            w0 = after
            async_copy.wait_group(0)
            words = wide.load(WIDE)
            scale = scale_values(scales, True)
            scales = _copy_codes(
                window, w0, window_pages, wide, WINDOW_ROWS, WINDOW_ROW, OF_WINDOW, WIDTH, WARPS
            )
            after = load_slots(window_slots, first + TILE + HALF, window_keys, HALF, WINDOW)
            added.slice(HALF, HALF).store(flags(w1))
            rows.slice(HALF, HALF).store(decode_by(words, scale, HALF, WIDTH, True))
            w1 = after
            gl.thread_barrier()
            mbarrier.arrive(full.index(stage), count=1)
            tile += 1
