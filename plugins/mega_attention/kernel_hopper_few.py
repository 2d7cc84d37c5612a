"""Sparse attention of few rows on Hopper in Gluon; docs/kernels/mega_attention.md has its layout.

A program has a part of a row's keys and some of its heads, so that one row keeps many
multiprocessors busy and none of its steps is long. Products are transposed, keys or columns ×
heads: a product has 64 rows, which few heads would not fill.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from plugins.device.launch import padded
from plugins.mega_attention.kernel_hopper_decode import decode, load_codes, load_slots
from plugins.mega_attention.kernel_hopper_queries import angles, keep_heads, load_heads

_LOG2_E = gl.constexpr(1.4426950408889634)
# Up to so many rows. Up to so many, and the heads of a program: an H200 has 132 multiprocessors.
MOST_ROWS = 4
HEADS = ((2, 16), (4, 32))
# Keys of a program; elements of a program of the join, and parts that it adds at a time.
KEYS = 64
COLUMNS, GROUP = 8, 16


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
    H: gl.constexpr, WIDTH: gl.constexpr, ROTATED: gl.constexpr, HEADS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """Of row program_id(2) and heads program_id(1), a part of KEYS keys: the first `window_parts`
    ones of the window, the others of the entries. Writes sums `parts` float32 [rows, num_parts,
    WIDTH, H], and `stats` float32 [rows, num_parts, 2, H], maxima and denominators."""
    _overlap()
    WARPS: gl.constexpr = 8
    SIDE: gl.constexpr = 64  # rows of a product
    MAIN: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0]))
    WINDOW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEADS // 2, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEADS, 16])
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * HEADS, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    part = gl.program_id(0)
    first_head = gl.program_id(1) * HEADS
    row = gl.program_id(2).to(gl.int64)
    query = gl.allocate_shared_memory(gl.bfloat16, [HEADS, WIDTH], ROWS)
    keys = gl.allocate_shared_memory(gl.bfloat16, [SIDE, WIDTH], ROWS)
    probabilities = gl.allocate_shared_memory(gl.bfloat16, [SIDE, HEADS], NARROW)
    there = gl.allocate_shared_memory(gl.int32, [SIDE], FLAT)
    turn = gl.allocate_shared_memory(gl.float32, [2, WIDTH // 2], FLAT)

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
    x = load_heads(q + row * row_stride, head_stride, first_head, HEADS, H, WIDTH)
    OF_MAIN: gl.constexpr = WIDTH // 8
    OF_WINDOW: gl.constexpr = WIDTH // 4
    # Either loads nothing where its slots are all −1.
    main_codes, main_scales = load_codes(
        main, m, main_pages, MAIN_ROWS, MAIN_ROW, OF_MAIN, WIDTH, WARPS
    )
    window_codes, window_scales = load_codes(
        window, w, window_pages, WINDOW_ROWS, WINDOW_ROW, OF_WINDOW, WIDTH, WARPS
    )
    angles(position, inv_freq, turn, WIDTH, ROTATED)
    keep_heads(query, x, turn, WIDTH)
    tile = keys.slice(0, KEYS)
    if of_window:
        tile.store(decode(window_codes, window_scales, KEYS, WIDTH))
        there.slice(0, KEYS).store(w)
    else:
        tile.store(decode(main_codes, main_scales, KEYS, WIDTH))
        there.slice(0, KEYS).store(m)
    fence_async_shared()
    gl.thread_barrier()
    none = gl.zeros([SIDE, HEADS], gl.float32, layout=SCORES)
    scores = warpgroup_mma(keys, query.permute((1, 0)), none, use_acc=False)
    key = gl.arange(0, SIDE, layout=gl.SliceLayout(1, SCORES))
    seen = (there.load(gl.SliceLayout(1, SCORES)) >= 0) & (key < KEYS)
    scores = gl.where(seen[:, None], scores * (scale * (256.0 * _LOG2_E)), float("-inf"))
    # Finite without keys.
    peak = gl.maximum(gl.max(scores, axis=0), -1e30)
    p = gl.exp2(scores - peak[None, :])
    probabilities.store(p.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    out = gl.zeros([WIDTH, HEADS], gl.float32, layout=SUM)
    out = warpgroup_mma(tile.permute((1, 0)), probabilities.slice(0, KEYS), out, use_acc=False)
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(0, SCORES))
    of_part = row * num_parts + part
    at = stats + of_part * (2 * H) + head
    gl.store(at, peak, mask=head < H)
    gl.store(at + H, gl.sum(p, axis=0), mask=head < H)
    # A kept row's column c holds element 4 · (c & 1) + (c & 6) / 2 of word 4 l + i.
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, SUM))
    word = 4 * (c // 8 % (WIDTH // 32)) + c // (WIDTH // 4)
    element = word * 8 + (c & 1) * 4 + (c >> 1 & 3)
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(0, SUM))
    at = parts + of_part * (WIDTH * H) + element[:, None] * H + head[None, :]
    gl.store(at, out * 256.0, mask=(head < H)[None, :])


@triton.jit
def join_few(
    positions, inv_freq, sink, o, parts, stats, num_parts,
    H: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """COLUMNS elements of all heads of a row, whose parts attention_few wrote; it may still run
    when this kernel begins. Parts in groups of GROUP, of which there are MORE than one; the loads
    of a group wait for nothing."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = head < H
    logit = tl.load(sink + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
    peak = tl.minimum(tl.maximum(logit, -1e30), 1e30)
    pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    pair -= (WIDTH - ROTATED) // 2
    frequency = tl.load(inv_freq + pair, mask=pair >= 0, other=0.0)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + row)
    of_row = row * num_parts
    for first in range(0, num_parts if MORE else 1, GROUP):
        for i in tl.static_range(GROUP):
            at = stats + (of_row + first + i) * (2 * H) + head
            peak = tl.maximum(peak, tl.load(at, mask=there & (first + i < num_parts), other=-1e30))
    total = tl.exp2(logit - peak)
    out = tl.zeros((COLUMNS, HEADS), tl.float32)
    for first in range(0, num_parts if MORE else 1, GROUP):
        for i in tl.static_range(GROUP):
            part = of_row + first + i
            is_there = there & (first + i < num_parts)
            at = stats + part * (2 * H) + head
            grow = tl.exp2(tl.load(at, mask=is_there, other=-1e30) - peak)
            total += tl.load(at + H, mask=is_there, other=0.0) * grow
            at = parts + part * (WIDTH * H) + column[:, None] * H + head[None, :]
            out += tl.load(at, mask=is_there[None, :], other=0.0) * grow[None, :]
    out *= (1.0 / tl.where(total > 0, total, 1.0))[None, :]
    turns = position.to(tl.float64) * frequency * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    even, odd = tl.split(tl.trans(out).reshape(HEADS, COLUMNS // 2, 2))
    turned = tl.join(even * cos + odd * sin, odd * cos - even * sin).reshape(HEADS, COLUMNS)
    at = o + (row * H + head)[:, None] * WIDTH + column[None, :]
    tl.store(at, turned.to(o.dtype.element_ty), mask=there[:, None])


def attend_few(
    q: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    sink: torch.Tensor,
    o: torch.Tensor,
    scale: float,
    window: tuple[Any, ...],
    main: tuple[Any, ...],
    slots: tuple[Any, ...],
) -> None:
    """Writes o [T, H, 512] of few rows q [T, H, 512], bfloat16, contiguous in their last dim.

    window, main: data, page stride, rows of a page, bytes of a row; slots: slots int64, their
    stride and number, of the window and of the entries.
    """
    rows, heads, width = q.shape
    rotated = 2 * inv_freq.shape[0]
    window_parts = triton.cdiv(slots[2], KEYS)
    num_parts = window_parts + triton.cdiv(slots[5], KEYS)
    parts = q.new_empty((rows, num_parts, width, heads), dtype=torch.float32)
    stats = q.new_empty((rows, num_parts, 2, heads), dtype=torch.float32)
    head_block = next(block for most, block in HEADS if rows <= most)
    attention_few[(num_parts, triton.cdiv(heads, head_block), rows)](
        q, q.stride(0), q.stride(1), positions, inv_freq, parts, stats, scale,
        *window, *main, *slots, window_parts, num_parts,
        heads, width, rotated, head_block, KEYS, num_warps=8, maxnreg=128, launch_pdl=True,
    )  # fmt: skip
    group = min(GROUP, triton.next_power_of_2(num_parts))
    join_few[(rows, width // COLUMNS)](
        positions, inv_freq, sink, o, parts, stats, num_parts, heads, width, rotated,
        padded(heads), COLUMNS, group, num_parts > group, num_warps=8, launch_pdl=True,
    )  # fmt: skip
