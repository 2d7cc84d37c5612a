"""The pass over many rows of bfloat16 streams on Hopper, in Gluon; docs/kernels/mega_mhc.md.

A program keeps one part's coefficients in shared memory for good and takes blocks of rows in turn,
two tiles ahead in registers. Its bits are those of kernel_pass.py, tile by tile.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.device.launch import limits

# Rows of a block, channels of a tile, tiles of a part, and tiles under way.
ROWS, TILE, TILES, AHEAD = 32, 64, 5, 2
WARPS = 8
# Leaves a place for a program of `finish` beside the pass.
REGISTERS = 208
SIZES = {"ROWS": ROWS, "TILE": TILE, "TILES": TILES, "AHEAD": AHEAD}


@gluon.jit
def _after_previous():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _zero():
    """A zero that the compiler does not know, so that it makes no constants of what it is added to:
    it would keep a hundred of them outside of the loop, in local memory."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _upper(x):
    bits = x.to(gl.uint32, bitcast=True) >> 16
    return bits.to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _rounded(x):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _keep_coefficients(
    coefficients, fn, first, WIDTH: gl.constexpr, MIXES: gl.constexpr, TILES: gl.constexpr,
    TILE: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """A part's columns of fn, its upper and lower bfloat16 halves 8 rows apart, for each tile and
    stream [64, TILE]. All loads are under way at once."""
    mix = gl.arange(0, 32, layout=gl.SliceLayout(1, LINES))
    column = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, LINES))
    at = fn + mix[:, None] * (4 * WIDTH) + column[None, :]
    there = (mix < MIXES)[:, None]
    loaded = ()
    for i in gl.static_range(4 * TILES):
        one = gl.load(at + (i % 4 * WIDTH + i // 4 * TILE), mask=there, other=0.0)
        loaded = loaded + (one,)  # noqa: RUF005 (kernels know no unpacking)
    for i in gl.static_range(4 * TILES):
        x = loaded[i].to(gl.float32)
        high = _upper(x)
        both = gl.join(high, _upper(x - high.to(gl.float32)))
        both = both.reshape([4, 8, TILE, 2]).permute([0, 3, 1, 2]).reshape([64, TILE])
        coefficients.index(i).store(both)


@gluon.jit
def _places(streams, row_stride, y, y_stride, row, column):
    """Where the first tile of the rows' first stream and of y lies."""
    at = streams + (row * row_stride)[:, None] + column[None, :]
    of_y = y + (row * y_stride)[:, None] + column[None, :]
    return at, of_y


@gluon.jit
def _load_tile(places, stream_stride, tile: gl.constexpr, is_row, TILE: gl.constexpr):
    loaded = ()
    for i in gl.static_range(4):
        at = places[0] + i * stream_stride + tile * TILE
        loaded = loaded + (gl.load(at, mask=is_row, other=0.0),)  # noqa: RUF005
    return loaded + (gl.load(places[1] + tile * TILE, mask=is_row, other=0.0),)  # noqa: RUF005


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
def _row_sums(x, ROWS: gl.constexpr, TILE: gl.constexpr):
    """As in kernel_pass.py: neighbours are added until one is left."""
    for step in gl.static_range(6):
        x = gl.sum(gl.reshape(x, [ROWS, TILE >> (step + 1), 2]), axis=2)
    return gl.reshape(x, [ROWS])


@gluon.jit(do_not_specialize=["num_rows"])
def streams_hopper(
    streams, row_stride, stream_stride, y, y_stride, post, comb, pre, fn,
    expanded, collapsed, sums, arrivals, num_rows,
    WIDTH: gl.constexpr, MIXES: gl.constexpr, SUMS: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """expanded [rows, 4, WIDTH], collapsed [rows, WIDTH] and `sums` [rows, PARTS, SUMS]. A part of
    a block of rows that is done is counted in `arrivals`."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 16, 16])
    LEFT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 8], [0, 1])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    coefficients = gl.allocate_shared_memory(gl.bfloat16, [4 * TILES, 64, TILE], SHARED)
    # Two of each stream, and each its own: between two stores to one the compiler puts a barrier.
    values = ()
    for _ in gl.static_range(8):
        one = gl.allocate_shared_memory(gl.bfloat16, [ROWS, TILE], SHARED)
        values = values + (one,)  # noqa: RUF005
    part = gl.program_id(0) % PARTS
    group = gl.program_id(0) // PARTS
    groups = gl.num_programs(0) // PARTS
    first = part * (TILES * TILE)
    _keep_coefficients(coefficients, fn, first, WIDTH, MIXES, TILES, TILE, LINES)
    _after_previous()
    blocks = gl.cdiv(num_rows, ROWS)
    lane_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    lane_column = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, LINES))
    none = gl.zeros([64, ROWS], gl.float32, layout=PRODUCT)
    row = (group * ROWS + lane_row).to(gl.int64)
    is_row = (row < num_rows)[:, None]
    shares = _load_shares(post, comb, pre, row, num_rows)
    places = _places(streams, row_stride, y, y_stride, row, lane_column)
    loaded = ()
    for tile in gl.static_range(AHEAD):
        loaded = loaded + (_load_tile(places, stream_stride, tile, is_row, TILE),)  # noqa: RUF005
    for block in range(group, blocks, groups):
        expanded_at = expanded + (row * (4 * WIDTH))[:, None] + lane_column[None, :]
        collapsed_at = collapsed + (row * WIDTH)[:, None] + lane_column[None, :]
        total = gl.sum(none.reshape([4, 2, 8, ROWS]), axis=1)
        squares_total = _row_sums(gl.zeros([ROWS, TILE], gl.float32, layout=LINES), ROWS, TILE)
        for tile in gl.static_range(TILES):
            unknown = _zero()
            if tile + AHEAD < TILES:
                then = _load_tile(places, stream_stride, tile + AHEAD, is_row, TILE)
            else:
                if tile + AHEAD == TILES:
                    following = ((block + groups) * ROWS + lane_row).to(gl.int64)
                    follows = (following < num_rows)[:, None]
                    coming = _load_shares(post, comb, pre, following, num_rows)
                    next_places = _places(
                        streams, row_stride, y, y_stride, following, lane_column
                    )  # fmt: skip
                then = _load_tile(
                    next_places, stream_stride, tile + AHEAD - TILES, follows, TILE
                )  # fmt: skip
            loaded = loaded + (then,)  # noqa: RUF005
            now = loaded[tile]
            x0, x1 = now[0].to(gl.float32), now[1].to(gl.float32)
            x2, x3 = now[2].to(gl.float32), now[3].to(gl.float32)
            sublayer = now[4].to(gl.float32)
            made = ()
            for j in gl.static_range(4):
                value = shares[j] * x0
                value = _fma(shares[4 + j], x1, value)
                value = _fma(shares[8 + j], x2, value)
                value = _fma(shares[12 + j], x3, value)
                value = _rounded(_fma(shares[16 + j], sublayer, value))
                values[2 * j + tile % 2].store(value)
                made = made + (value,)  # noqa: RUF005
            fence_async_shared()
            gl.thread_barrier()
            going = warpgroup_mma(
                coefficients.index(unknown + tile * 4), values[tile % 2].permute((1, 0)),
                none, use_acc=False, is_async=True,
            )  # fmt: skip
            for j in gl.static_range(1, 4):
                going = warpgroup_mma(
                    coefficients.index(unknown + (tile * 4 + j)),
                    values[2 * j + tile % 2].permute((1, 0)), going, is_async=True,
                )  # fmt: skip
            squares = gl.zeros([ROWS, TILE], gl.float32, layout=LINES)
            merged = squares
            for j in gl.static_range(4):
                at = expanded_at + (j * WIDTH + tile * TILE)
                gl.store(at, made[j], mask=is_row)
                value = made[j].to(gl.float32)
                squares = gl.fma(value, value, squares)
                merged = shares[20] * value if j == 0 else _fma(shares[20 + j], value, merged)
            gl.store(collapsed_at + tile * TILE, _rounded(merged), mask=is_row)
            squares_total += _row_sums(squares, ROWS, TILE)
            halves = warpgroup_mma_wait(0, deps=[going])
            total += gl.sum(halves.reshape([4, 2, 8, ROWS]), axis=1)
        rest = ()
        for i in gl.static_range(AHEAD):
            rest = rest + (loaded[TILES + i],)  # noqa: RUF005
        loaded = rest
        left = gl.convert_layout(total.reshape([32, ROWS]), LEFT)
        of_squares = gl.convert_layout(squares_total, gl.SliceLayout(0, LEFT))
        place = gl.arange(0, 32, layout=gl.SliceLayout(1, LEFT))
        left_row = (block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LEFT))).to(gl.int64)
        left = gl.where((place == MIXES)[:, None], of_squares[None, :], left)
        at = sums + ((left_row * PARTS + part) * SUMS)[None, :] + place[:, None]
        gl.store(at, left, mask=(left_row < num_rows)[None, :])
        gl.thread_barrier()
        gl.atomic_add(arrivals + block, 1, sem="release")
        shares, places, row, is_row = coming, next_places, following, follows


def takes(streams: torch.Tensor, parts: int) -> bool:
    """Whether the kernel is made for these streams, and the device is a Hopper."""
    _, count, width = streams.shape
    known = count == 4 and width == parts * TILES * TILE and streams.dtype == torch.bfloat16
    device = limits(streams.device)
    return known and device.warp_groups and device.multiprocessors >= parts


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
    arrivals: torch.Tensor,
) -> None:
    """Fill `expanded`, `collapsed` and `sums` [rows, parts, sums of a part]; `arrivals`, a zero for
    each block of rows, counts its parts as they are done."""
    rows, parts, num_sums = sums.shape
    groups = min(limits(streams.device).multiprocessors // parts, -(-rows // ROWS))
    streams_hopper[(parts * groups,)](
        streams, streams.stride(0), streams.stride(1), y, y.stride(0), post, comb, pre, fn,
        expanded, collapsed, sums, arrivals, rows, streams.shape[2], fn.shape[0], num_sums, parts,
        **SIZES, num_warps=WARPS, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip
