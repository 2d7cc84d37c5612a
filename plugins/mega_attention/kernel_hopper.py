"""Sparse attention of some rows on Hopper in Gluon; docs/kernels/mega_attention.md has its layout.

Of a block of sixteen warps, eight decode packed rows into shared memory and eight multiply, for a
part of a row's keys. Gluon is the Triton language with layouts, shared memory and barriers written
out; nothing interprets it, so kernel.py stays for every other device and every other kind of row.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.device.launch import limits
from plugins.device.rows import MXFP8, NVFP4_WORDS, DeviceRows
from plugins.mega_attention.kernel_hopper_decode import decode_tiles, share
from plugins.mega_attention.kernel_hopper_queries import (
    PAIRS,
    ROTATED,
    keep_angles,
    keep_queries,
    load_frequencies,
    load_queries,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
WIDTH, HEADS, TILE = 512, 64, 64
# Up to so many rows, and the keys of a part: so many programs that the 132 multiprocessors of an
# H200 still take them at once. More rows are those of kernel_hopper_whole.py, fewer of
# kernel_hopper_few.py.
CHUNKS = ((66, 320),)
# Keys that the first part has from the window, the rest being entries.
_WINDOW = 128


@gluon.jit
def _multiply_tiles(
    q, row_stride, head_stride, positions, inv_freq, parts, stats, scale,
    query, keys, bias, probabilities, maxima, turn, full, empty,
    window_keys, main_keys, window_chunk, chunk, lead, num_parts, num_items,
    H: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: a running softmax over tiles in two warp groups, of which each has
    half a tile's scores and half the columns of the sum [HEADS, WIDTH]."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, WIDTH // 4, 16])
    OF_SUM: gl.constexpr = gl.SliceLayout(1, SUM)
    done = 0
    position = gl.load(positions + gl.program_id(0) // num_parts)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        row, window_first, window_end, main_first, main_end = share(
            item, num_parts, window_keys, main_keys, window_chunk, chunk, lead
        )
        tiles = gl.cdiv(window_end - window_first, TILE) + gl.cdiv(main_end - main_first, TILE)
        blocks = load_queries(q + row * row_stride, head_stride, 0, HEADS, H, 8, False)
        keep_angles(position, load_frequencies(inv_freq, 8), turn)
        keep_queries(blocks, turn, query, False)
        # Of the next row, long before it is asked for.
        position = gl.load(
            positions + gl.minimum(item + gl.num_programs(0), num_items - 1) // num_parts
        )
        fence_async_shared()
        gl.thread_barrier()
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
        # The reference's bound: keeps the maximum finite without keys.
        peak = gl.full([HEADS], -1e30, gl.float32, layout=head.type.layout)
        none = gl.zeros([HEADS, TILE], gl.float32, layout=SCORES)
        out = gl.zeros([HEADS, WIDTH], gl.float32, layout=SUM)
        # A warp group's share of the denominator: the groups meet once, at the end.
        total = gl.sum(none.reshape([HEADS, 2, TILE // 2]), axis=2)
        if tiles > 0:
            mbarrier.wait(full.index(done % 2), (done // 2) & 1)
            tile = keys.index(done % 2).permute((1, 0))
            scores = warpgroup_mma(query, tile, none, use_acc=False)
            for at in range(done, done + tiles):
                stage = at % 2
                flags = bias.index(stage).load(gl.SliceLayout(0, SCORES))
                scores = scores * scale + flags[None, :]
                # Either warp group has the maxima of its half.
                own = gl.max(scores.reshape([HEADS, 2, TILE // 2]), axis=2)
                maxima.store(own.permute([1, 0]).reshape([2 * HEADS]))
                gl.thread_barrier()
                higher = gl.maximum(
                    maxima.slice(0, HEADS).load(head.type.layout),
                    maxima.slice(HEADS, HEADS).load(head.type.layout),
                )
                higher = gl.maximum(peak, higher)
                shrink = gl.exp2(peak - higher)
                p = gl.exp2(scores - higher[:, None])
                peak = higher
                probabilities.store(p.to(gl.bfloat16))
                fence_async_shared()
                share_shrink = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))
                share_sum = gl.sum(p.reshape([HEADS, 2, TILE // 2]), axis=2)
                total = total * share_shrink[:, None] + share_sum
                out = out * gl.convert_layout(shrink, OF_SUM)[:, None]
                gl.thread_barrier()
                going = warpgroup_mma(probabilities, keys.index(stage), out, is_async=True)
                if at + 1 < done + tiles:
                    following = (at + 1) % 2
                    mbarrier.wait(full.index(following), ((at + 1) // 2) & 1)
                    tile = keys.index(following).permute((1, 0))
                    coming = warpgroup_mma(query, tile, none, use_acc=False, is_async=True)
                    out = warpgroup_mma_wait(1, deps=[going])
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(stage), count=1)
                    scores = warpgroup_mma_wait(0, deps=[coming])
                else:
                    out = warpgroup_mma_wait(0, deps=[going])
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(stage), count=1)
        done += tiles
        whole = gl.convert_layout(gl.sum(total, axis=1), head.type.layout)
        first_head = (row * num_parts + item % num_parts) * H
        of_head = first_head + head
        gl.store(stats + 2 * of_head, peak, mask=head < H)
        gl.store(stats + 2 * of_head + 1, whole, mask=head < H)
        row_head = gl.arange(0, HEADS, layout=OF_SUM)
        column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, SUM))
        of_sum = (first_head + row_head)[:, None] * WIDTH + column[None, :]
        gl.store(parts + of_sum, out * 256.0, mask=(row_head < H)[:, None])


@gluon.jit(
    do_not_specialize=[
        "window_keys", "main_keys", "window_chunk", "chunk", "lead", "num_parts", "num_items",
    ]
)  # fmt: skip
def attention_hopper(
    q, row_stride, head_stride, positions, inv_freq, parts, stats, scale,
    window, window_pages, WINDOW_ROWS: gl.constexpr, WINDOW_ROW: gl.constexpr,
    main, main_pages, MAIN_ROWS: gl.constexpr, MAIN_ROW: gl.constexpr,
    window_slots, window_stride, window_keys, main_slots, main_stride, main_keys,
    window_chunk, chunk, lead, num_parts, num_items,
    H: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Programs take items, parts of rows, in turn. Part p has the window keys from p · window_chunk
    on and the entries from p · chunk − lead on."""
    # The kernel before this one may still run, and the next one may come.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = gl.allocate_shared_memory(gl.bfloat16, [HEADS, WIDTH], ROWS)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, WIDTH], ROWS)
    probabilities = gl.allocate_shared_memory(gl.bfloat16, [HEADS, TILE], ROWS)
    bias = gl.allocate_shared_memory(gl.float32, [2, TILE], FLAT)
    maxima = gl.allocate_shared_memory(gl.float32, [2 * HEADS], FLAT)
    turn = gl.allocate_shared_memory(gl.float32, [2, PAIRS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply_tiles, (
                q, row_stride, head_stride, positions, inv_freq, parts, stats,
                scale * (256.0 * _LOG2_E), query, keys, bias, probabilities, maxima, turn, full,
                empty,
                window_keys, main_keys, window_chunk, chunk, lead, num_parts, num_items,
                H, WIDTH, HEADS, TILE,
            )),
            (decode_tiles, (
                q, row_stride, head_stride, keys, bias, full, empty,
                window, window_pages, WINDOW_ROWS, WINDOW_ROW,
                main, main_pages, MAIN_ROWS, MAIN_ROW,
                window_slots.to(gl.pointer_type(gl.int32), bitcast=True), window_stride,
                window_keys, main_slots.to(gl.pointer_type(gl.int32), bitcast=True), main_stride,
                main_keys, window_chunk, chunk, lead, num_parts, num_items, H, WIDTH, TILE, 8,
            )),
        ],
        [8], [72],
    )  # fmt: skip


class Cut(NamedTuple):
    """How a row's keys are cut into parts, which a second kernel joins."""

    window_chunk: int
    chunk: int
    lead: int
    parts: int


def cut(rows: int, window_keys: int, main_keys: int) -> Cut | None:
    """None where there are so many rows that none is cut. Where parts begin depends on `rows` only:
    slots −1 at the end of a key set move nothing."""
    chunk = next((keys for most, keys in CHUNKS if rows <= most), 0)
    if chunk == 0:
        return None
    parts = max(1, -(-(_WINDOW + main_keys) // chunk))
    return Cut(window_keys, chunk, _WINDOW, parts)


def takes(q: torch.Tensor, rotated: int, window: DeviceRows, main: DeviceRows | None) -> bool:
    """Whether the kernel is made for these queries, of which `rotated` elements turn, and rows, and
    the device is a Hopper."""
    if not limits(q.device).warp_groups or rotated != ROTATED:
        return False
    packed = window.stored == MXFP8.value and (main is None or main.stored == NVFP4_WORDS.value)
    return packed and q.dtype == torch.bfloat16 and q.shape[1] <= HEADS and q.shape[2] == WIDTH
