"""Sparse attention of few rows on Hopper in Gluon; docs/kernels/mega_attention.md has its layout.

A program has a part of a row's keys and some of its heads, so that one row keeps many
multiprocessors busy and none of its steps is long. Products are transposed, keys or columns ×
heads: a product has 64 rows, which few heads would not fill.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from plugins.mega_attention.kernel_hopper_decode import decode, load_codes, load_slots
from plugins.mega_attention.kernel_hopper_queries import (
    PAIRS,
    keep_angles,
    keep_queries,
    load_frequencies,
    load_queries,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
# Up to so many rows: keys and heads of a program. An H200 has 132 multiprocessors.
CUTS = ((2, 64, 16), (4, 64, 32), (13, 128, 32), (26, 128, 64))


@gluon.jit
def _overlap():
    """The kernel before this one may still run, and the next one may come."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["window_keys", "main_keys", "window_parts", "num_parts"]
)  # fmt: skip
def attention_few(
    q, row_stride, head_stride, positions, inv_freq, parts, stats, scale,
    window, window_pages, WINDOW_ROWS: gl.constexpr, WINDOW_ROW: gl.constexpr,
    main, main_pages, MAIN_ROWS: gl.constexpr, MAIN_ROW: gl.constexpr,
    window_slots, window_stride, window_keys, main_slots, main_stride, main_keys,
    window_parts, num_parts,
    H: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Of row program_id(2) and heads program_id(1), a part of KEYS keys: the first `window_parts`
    ones of the window, the others of the entries. Writes sums `parts` float32 [rows, num_parts, H,
    WIDTH] by kept columns, and `stats` float32 [rows, num_parts, H, 2], maxima and denominators."""
    _overlap()
    WARPS: gl.constexpr = 8
    MAIN: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0]))
    WINDOW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
    # A product has 64 rows a warp group: of 64 keys, either group has half the heads.
    SPREAD: gl.constexpr = KEYS // 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4 * SPREAD, 2 // SPREAD], [16, HEADS * SPREAD // 2, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEADS, 16])
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * HEADS, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    part = gl.program_id(0)
    first_head = gl.program_id(1) * HEADS
    row = gl.program_id(2).to(gl.int64)
    query = gl.allocate_shared_memory(gl.bfloat16, [HEADS, WIDTH], ROWS)
    keys = gl.allocate_shared_memory(gl.bfloat16, [KEYS, WIDTH], ROWS)
    probabilities = gl.allocate_shared_memory(gl.bfloat16, [KEYS, HEADS], NARROW)
    there = gl.allocate_shared_memory(gl.int32, [KEYS], FLAT)
    turn = gl.allocate_shared_memory(gl.float32, [2, PAIRS], FLAT)

    of_window = part < window_parts
    first = part * KEYS
    window_end = gl.minimum(first + KEYS, window_keys)
    window_end = gl.where(of_window, window_end, 0)
    main_first = first - window_parts * KEYS
    main_end = gl.minimum(main_first + KEYS, main_keys)
    main_end = gl.where(of_window, main_first, main_end)
    window_slots += row * window_stride
    main_slots += row * main_stride
    low = gl.pointer_type(gl.int32)
    w = load_slots(window_slots.to(low, bitcast=True), first, window_end, KEYS, WINDOW)
    m = load_slots(main_slots.to(low, bitcast=True), main_first, main_end, KEYS, MAIN)
    position = gl.load(positions + row)
    OF_MAIN: gl.constexpr = WIDTH // 8
    OF_WINDOW: gl.constexpr = WIDTH // 4
    # Either loads nothing where its slots are all −1.
    main_codes, main_scales = load_codes(
        main, m, main_pages, MAIN_ROWS, MAIN_ROW, OF_MAIN, WIDTH, WARPS
    )
    window_codes, window_scales = load_codes(
        window, w, window_pages, WINDOW_ROWS, WINDOW_ROW, OF_WINDOW, WIDTH, WARPS
    )
    blocks = load_queries(q + row * row_stride, head_stride, first_head, HEADS, H, WARPS, False)
    keep_angles(position, load_frequencies(inv_freq, WARPS), turn)
    keep_queries(blocks, turn, query, False)
    if of_window:
        keys.store(decode(window_codes, window_scales, KEYS, WIDTH, False))
        there.store(w)
    else:
        keys.store(decode(main_codes, main_scales, KEYS, WIDTH, False))
        there.store(m)
    fence_async_shared()
    gl.thread_barrier()
    none = gl.zeros([KEYS, HEADS], gl.float32, layout=SCORES)
    scores = warpgroup_mma(keys, query.permute((1, 0)), none, use_acc=False)
    seen = there.load(gl.SliceLayout(1, SCORES)) >= 0
    scores = gl.where(seen[:, None], scores * (scale * (256.0 * _LOG2_E)), float("-inf"))
    # Finite without keys.
    peak = gl.maximum(gl.max(scores, axis=0), -1e30)
    p = gl.exp2(scores - peak[None, :])
    probabilities.store(p.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    out = gl.zeros([WIDTH, HEADS], gl.float32, layout=SUM)
    out = warpgroup_mma(keys.permute((1, 0)), probabilities, out, use_acc=False)
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(0, SCORES))
    of_part = (row * num_parts + part) * H
    gl.store(stats + 2 * (of_part + head), peak, mask=head < H)
    gl.store(stats + 2 * (of_part + head) + 1, gl.sum(p, axis=0), mask=head < H)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, SUM))
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(0, SUM))
    of_sum = (of_part + head)[None, :] * WIDTH + column[:, None]
    gl.store(parts + of_sum, out * 256.0, mask=(head < H)[None, :])


class Cut(NamedTuple):
    """keys and heads of a program; how many parts the window's keys make, and both sets' keys."""

    keys: int
    heads: int
    window_parts: int
    parts: int


def cut(rows: int, window_keys: int, main_keys: int) -> Cut | None:
    """How few rows are cut, None where there are more. Where parts begin depends on `rows` only:
    slots −1 at the end of a key set move nothing."""
    for most, keys, heads in CUTS:
        if rows <= most:
            window_parts = -(-window_keys // keys)
            parts = max(1, window_parts - (-main_keys // keys))
            return Cut(keys, heads, window_parts, parts)
    return None
