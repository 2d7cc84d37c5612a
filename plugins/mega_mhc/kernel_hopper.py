"""The pass over many rows of bfloat16 streams on Hopper, in Gluon; docs/kernels/mega_mhc.md.

A program keeps one part's coefficients in shared memory for good. Its groups of four warps take
blocks of rows in turn, each at its own pace, and copy two tiles ahead of it to shared memory: a
fence before a product waits for loads into registers, but not for such copies. Bits are those of
kernel_pass.py, tile by tile.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.device.launch import limits

# Rows of a block, channels of a tile, tiles of a part.
ROWS, TILE, TILES = 16, 64, 5
# Groups of four warps, and the registers of a thread that so many leave it.
GROUPS, REGISTERS = 3, 168
SIZES = {"ROWS": ROWS, "TILE": TILE, "TILES": TILES, "GROUPS": GROUPS, "REGISTERS": REGISTERS}


@gluon.jit
def _after_previous():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _upper(x):
    bits = x.to(gl.uint32, bitcast=True) >> 16
    return bits.to(gl.uint16).to(gl.bfloat16, bitcast=True)


# Streams are read as words of two channels: single ones cost an instruction more to take apart.


@gluon.jit
def _words(pointer):
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _word(low, high):
    """Two float32 rounded to bfloat16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _low(word):
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _high(word):
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _keep_coefficients(
    coefficients, fn, first, group: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr,
    TILE: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A group's share of a part's columns of fn, for each tile and stream three times eight mixes:
    their upper bfloat16 halves, then their lower ones. All loads are under way at once."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    EACH: gl.constexpr = (4 * TILES + GROUPS - 1) // GROUPS
    mix = gl.arange(0, 8, layout=gl.SliceLayout(1, LINES))
    column = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, LINES))
    at = fn + mix[:, None] * (4 * WIDTH) + column[None, :]
    loaded = ()
    for k in gl.static_range(EACH):
        if k * GROUPS + group < 4 * TILES:
            stream = (k * GROUPS + group) % 4
            tile = (k * GROUPS + group) // 4
            for eight in gl.static_range(3):
                one = gl.load(at + (eight * 32 * WIDTH + stream * WIDTH + tile * TILE))
                loaded = loaded + (one,)  # noqa: RUF005 (kernels know no unpacking)
    for k in gl.static_range(EACH):
        if k * GROUPS + group < 4 * TILES:
            for eight in gl.static_range(3):
                x = loaded[3 * k + eight].to(gl.float32)
                high = _upper(x)
                both = gl.join(high, _upper(x - high.to(gl.float32)))
                both = both.permute([2, 0, 1]).reshape([16, TILE])
                coefficients.index((k * GROUPS + group) * 3 + eight).store(both)


@gluon.jit
def _copy_tile(
    copies, slot, streams, row_stride, stream_stride, y, y_stride, row, num_rows, word
):  # fmt: skip
    """Words of the four streams and of y of rows, on their way to a slot of `copies`."""
    there = ((row < num_rows)[:, None]) & (word >= 0)[None, :]
    at = streams + (row * row_stride)[:, None] + word[None, :]
    for i in gl.static_range(4):
        to = copies[i].index(slot)
        async_copy.async_copy_global_to_shared(to, at + i * stream_stride, mask=there)
    at = y + (row * y_stride)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(copies[4].index(slot), at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _fma(share, x, total):
    """share [ROWS, 1] · x + total in one rounding."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [share, x, total], dtype=gl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_shares(post, comb, pre, row, num_rows):
    """comb, post and pre of the rows, each [ROWS, 1]."""
    there = row < num_rows
    shares = ()
    for i in gl.static_range(16):
        one = gl.load(comb + row * 16 + i, mask=there, other=0.0).to(gl.float32)
        shares = shares + (one[:, None],)  # noqa: RUF005
    for i in gl.static_range(4):
        one = gl.load(post + row * 4 + i, mask=there, other=0.0).to(gl.float32)
        shares = shares + (one[:, None],)  # noqa: RUF005
    for i in gl.static_range(4):
        one = gl.load(pre + row * 4 + i, mask=there, other=0.0).to(gl.float32)
        shares = shares + (one[:, None],)  # noqa: RUF005
    return shares


@gluon.jit
def _row_sums(x, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """As in kernel_pass.py, whose first neighbours are a word's: until one is left."""
    for step in gl.static_range(5):
        x = gl.sum(gl.reshape(x, [ROWS, WORDS >> (step + 1), 2]), axis=2)
    return gl.reshape(x, [ROWS])


@gluon.jit
def _rows_in_turn(
    group: gl.constexpr, coefficients, values, copies, ready,
    streams, row_stride, stream_stride, y, y_stride, post, comb, pre, fn,
    expanded, collapsed, sums, num_rows,
    WIDTH: gl.constexpr, MIXES: gl.constexpr, SUMS: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """One group of a program: every so many-th block of rows, from the first tile to the last."""
    WORDS: gl.constexpr = TILE // 2
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 4], [0, 1])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    part = gl.program_id(0) % PARTS
    step = gl.num_programs(0) // PARTS * GROUPS
    first = part * (TILES * TILE)
    _keep_coefficients(coefficients, fn, first, group, WIDTH, TILES, TILE, GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)
    _after_previous()
    mbarrier.wait(ready, 0)
    lane_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, PAIRS))
    word = first // 2 + gl.arange(0, WORDS, layout=gl.SliceLayout(0, PAIRS))
    streams, row_stride, stream_stride = _words(streams), row_stride // 2, stream_stride // 2
    y, y_stride = _words(y), y_stride // 2
    none = gl.zeros([64, ROWS], gl.float32, layout=PRODUCT)
    zeros = gl.zeros([ROWS, WORDS], gl.float32, layout=PAIRS)
    begin = gl.program_id(0) // PARTS * GROUPS + group
    row = (begin * ROWS + lane_row).to(gl.int64)
    for ahead in gl.static_range(2):
        _copy_tile(
            copies, ahead, streams, row_stride, stream_stride, y, y_stride, row, num_rows,
            word + ahead * WORDS,
        )  # fmt: skip
    slot = 0
    for block in range(begin, gl.cdiv(num_rows, ROWS), step):
        row = (block * ROWS + lane_row).to(gl.int64)
        following = ((block + step) * ROWS + lane_row).to(gl.int64)
        is_row = (row < num_rows)[:, None]
        shares = _load_shares(post, comb, pre, row, num_rows)
        expanded_at = _words(expanded) + (row * (2 * WIDTH))[:, None] + word[None, :]
        collapsed_at = _words(collapsed) + (row * (WIDTH // 2))[:, None] + word[None, :]
        total = gl.sum(none.reshape([4, 2, 8, ROWS]), axis=1)
        squares_total = _row_sums(zeros, ROWS, WORDS)
        for tile in range(TILES):
            async_copy.wait_group(1)
            now = ()
            for i in gl.static_range(5):
                now = now + (copies[i].index(slot).load(PAIRS),)  # noqa: RUF005
            made = ()
            for j in gl.static_range(4):
                low, high = shares[j] * _low(now[0]), shares[j] * _high(now[0])
                for i in gl.static_range(1, 5):
                    low = _fma(shares[4 * i + j], _low(now[i]), low)
                    high = _fma(shares[4 * i + j], _high(now[i]), high)
                both = _word(low, high)
                values[j].store(both)
                made = made + (both,)  # noqa: RUF005
            fence_async_shared()
            gl.thread_barrier()
            wraps = tile >= TILES - 2
            _copy_tile(
                copies, slot, streams, row_stride, stream_stride, y, y_stride,
                gl.where(wraps, following, row), num_rows,
                word + gl.where(wraps, tile + 2 - TILES, tile + 2) * WORDS,
            )  # fmt: skip
            slot = 1 - slot
            going = none
            for j in gl.static_range(4):
                operand = values[j]._reinterpret(gl.bfloat16, [ROWS, TILE], SHARED)
                # The last 16 of the 64 rows are the next tile's, and their products unused.
                mixes = coefficients.index((tile * 4 + j) * 3)
                going = warpgroup_mma(
                    mixes._reinterpret(gl.bfloat16, [64, TILE], SHARED),
                    operand.permute((1, 0)), going, use_acc=j > 0, is_async=True,
                )  # fmt: skip
            squares, high_squares, merged, high_merged = zeros, zeros, zeros, zeros
            for j in gl.static_range(4):
                to = expanded_at + (j * (WIDTH // 2) + tile * WORDS)
                gl.store(to, made[j], mask=is_row, cache_modifier=".cs")
                low, high = _low(made[j]), _high(made[j])
                squares = gl.fma(low, low, squares)
                high_squares = gl.fma(high, high, high_squares)
                if j == 0:
                    merged, high_merged = shares[20] * low, shares[20] * high
                else:
                    merged = _fma(shares[20 + j], low, merged)
                    high_merged = _fma(shares[20 + j], high, high_merged)
            # The next launch reads it again: the L2 cache keeps it rather than the streams.
            both = _word(merged, high_merged)
            to = collapsed_at + tile * WORDS
            gl.store(to, both, mask=is_row, eviction_policy="evict_last")
            squares_total += _row_sums(squares + high_squares, ROWS, WORDS)
            halves = warpgroup_mma_wait(0, deps=[going])
            total += gl.sum(halves.reshape([4, 2, 8, ROWS]), axis=1)
        left = gl.convert_layout(total.reshape([32, ROWS]), LEFT)
        of_squares = gl.convert_layout(squares_total, gl.SliceLayout(0, LEFT))
        place = gl.arange(0, 32, layout=gl.SliceLayout(1, LEFT))
        left_row = (block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LEFT))).to(gl.int64)
        left = gl.where((place == MIXES)[:, None], of_squares[None, :], left)
        at = sums + ((left_row * PARTS + part) * SUMS)[None, :] + place[:, None]
        gl.store(at, left, mask=(left_row < num_rows)[None, :])


@gluon.jit
def _room(ROWS: gl.constexpr, TILE: gl.constexpr):
    """A group's tile of every stream, as words: each its own, since the compiler puts a barrier
    between two stores to one."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    values = ()
    for _ in gl.static_range(4):
        one = gl.allocate_shared_memory(gl.int32, [ROWS, TILE // 2], SHARED)
        values = values + (one,)  # noqa: RUF005
    return values


@gluon.jit
def _room_of_copies(ROWS: gl.constexpr, TILE: gl.constexpr):
    """Two tiles under way to a group: words of four streams and of y."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, order=[1, 0])
    copies = ()
    for _ in gl.static_range(5):
        one = gl.allocate_shared_memory(gl.int32, [2, ROWS, TILE // 2], SHARED)
        copies = copies + (one,)  # noqa: RUF005
    return copies


@gluon.jit(do_not_specialize=["num_rows"])
def streams_hopper(
    streams, row_stride, stream_stride, y, y_stride, post, comb, pre, fn,
    expanded, collapsed, sums, num_rows,
    WIDTH: gl.constexpr, MIXES: gl.constexpr, SUMS: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """expanded [rows, 4, WIDTH], collapsed [rows, WIDTH] and `sums` [rows, PARTS, SUMS]."""
    gl.static_assert(GROUPS == 3 and MIXES == 24)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # Of a tile and stream 48 rows, and 16 that the last product reads beyond them.
    coefficients = gl.allocate_shared_memory(gl.bfloat16, [12 * TILES + 1, 16, TILE], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=GROUPS)
    ours, second, third = _room(ROWS, TILE), _room(ROWS, TILE), _room(ROWS, TILE)
    our_copies, second_copies = _room_of_copies(ROWS, TILE), _room_of_copies(ROWS, TILE)
    third_copies = _room_of_copies(ROWS, TILE)
    gl.warp_specialize(
        [
            (_rows_in_turn, (
                0, coefficients, ours, our_copies, ready,
                streams, row_stride, stream_stride, y, y_stride, post, comb, pre, fn,
                expanded, collapsed, sums, num_rows,
                WIDTH, MIXES, SUMS, PARTS, ROWS, TILE, TILES, GROUPS,
            )),
            (_rows_in_turn, (
                1, coefficients, second, second_copies, ready,
                streams, row_stride, stream_stride, y, y_stride, post, comb, pre, fn,
                expanded, collapsed, sums, num_rows,
                WIDTH, MIXES, SUMS, PARTS, ROWS, TILE, TILES, GROUPS,
            )),
            (_rows_in_turn, (
                2, coefficients, third, third_copies, ready,
                streams, row_stride, stream_stride, y, y_stride, post, comb, pre, fn,
                expanded, collapsed, sums, num_rows,
                WIDTH, MIXES, SUMS, PARTS, ROWS, TILE, TILES, GROUPS,
            )),
        ],
        [4, 4], [REGISTERS, REGISTERS],
    )  # fmt: skip


def takes(streams: torch.Tensor, y: torch.Tensor, parts: int) -> bool:
    """Whether the kernel is made for these streams and this y, and the device is a Hopper."""
    _, count, width = streams.shape
    known = count == 4 and width == parts * TILES * TILE and streams.dtype == torch.bfloat16
    strides = (*streams.stride()[:2], y.stride(0), streams.data_ptr() // 2, y.data_ptr() // 2)
    device = limits(streams.device)
    return (
        known
        and all(stride % 2 == 0 for stride in strides)
        and device.warp_groups
        and device.multiprocessors >= parts
    )


def launch(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    expanded: torch.Tensor,
    collapsed: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Fill `expanded`, `collapsed` and `sums` [rows, parts, sums of a part]."""
    rows, parts, num_sums = sums.shape
    programs = min(limits(streams.device).multiprocessors // parts, -(-rows // (GROUPS * ROWS)))
    streams_hopper[(parts * programs,)](
        streams, streams.stride(0), streams.stride(1), y, y.stride(0), post, comb, pre, fn,
        expanded, collapsed, sums, rows, streams.shape[2], fn.shape[0], num_sums, parts,
        **SIZES, num_warps=4, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip
