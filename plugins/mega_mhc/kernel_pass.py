"""One pass over the residual streams: expand, the products and squares of the next mix, collapse.

What is asked for is done, the rest is left out; docs/kernels/mega_mhc.md has the layout. Every
multiplication that is followed by an addition is written as one fused operation: left to the
compiler, two kernels of different parts could round differently.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.overlap import after_previous


@triton.jit
def _upper(x):
    """The upper half of float32 bits, which is a bfloat16 cut off."""
    bits = x.to(tl.uint32, bitcast=True) >> 16
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _halves(x):
    """float32 as two bfloat16 values whose sum is 2^−16 of it off at most. Cut off instead of
    rounded: moving bits costs a fraction of converting."""
    high = _upper(x)
    return high, _upper(x - high.to(tl.float32))


@triton.jit
def stack(fn, stacked, LENGTH: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """TILE coefficients of one mix: its upper and lower bfloat16 half in rows 8 apart of `stacked`
    [MIX_TILE, LENGTH]."""
    after_previous(OVERLAP)
    mix = tl.program_id(0)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(fn + mix * LENGTH + k, mask=k < LENGTH, other=0.0).to(tl.float32)
    high, low = _halves(x)
    at = stacked + (mix // 8 * 16 + mix % 8) * LENGTH + k
    tl.store(at, high, mask=k < LENGTH)
    tl.store(at + 8 * LENGTH, low, mask=k < LENGTH)


@triton.jit
def _columns(base, row, WIDTH: tl.constexpr, is_row, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Each column of a contiguous [rows, WIDTH], spread over [ROWS, TILE], in float32."""
    columns = ()
    for i in tl.static_range(WIDTH):
        one = tl.load(base + row * WIDTH + i, mask=is_row, other=0.0).to(tl.float32)
        columns = columns + (tl.broadcast_to(one[:, None], (ROWS, TILE)),)  # noqa: RUF005
    return columns


@triton.jit
def _coefficients(
    fn, tile, WIDTH: tl.constexpr, S: tl.constexpr, MIXES: tl.constexpr, MIX_TILE: tl.constexpr,
    TILE: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """[MIX_TILE, S · TILE], a stream's channels side by side, in rows as `stack` makes them.
    float32 needs no lower half: its rows are zero."""
    place = tl.arange(0, MIX_TILE)[:, None]
    mix = place // 16 * 8 + place % 8
    k = tl.arange(0, S * TILE)[None, :]
    column = tile * TILE + k % TILE
    there = (mix < MIXES) & (column < WIDTH)
    if STACKED:
        return tl.load(fn + (place * S + k // TILE) * WIDTH + column, mask=there, other=0.0)
    one = tl.load(fn + (mix * S + k // TILE) * WIDTH + column, mask=there, other=0.0)
    one, is_low = one.to(tl.float32), place % 16 >= 8
    if tl.float32 == DOT:
        return tl.where(is_low, 0.0, one)
    high, low = _halves(one)
    one = tl.where(is_low, low, high)
    return one.to(tl.float32) if WIDEN else one


@triton.jit
def _side_by_side(x, S: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """S times [ROWS, TILE] as [S · TILE, ROWS]."""
    one = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])) if S == 4 else tl.join(x[0], x[1])
    one = tl.permute(tl.reshape(one, (ROWS, TILE, S)), (0, 2, 1))
    return tl.trans(tl.reshape(one, (ROWS, S * TILE)))


@triton.jit
def _row_sums(x, ROWS: tl.constexpr, TILE: tl.constexpr):
    """[ROWS] from [ROWS, TILE]: neighbours are added until one is left. The order of one reduction
    would depend on how the compiler spreads x over threads."""
    tl.static_assert(TILE <= 64)
    for step in tl.static_range(6):
        if TILE >> step > 1:
            x = tl.sum(tl.reshape(x, (ROWS, TILE >> (step + 1), 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def _rounded(x, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """PAIRS: to bfloat16, two at a time. One at a time, as the compiler does where a value is used
    once more, takes a unit that is an eighth as fast."""
    if PAIRS:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return x.to(dtype)


@triton.jit
def _tile(
    tile, streams, row_stride, stream_stride, y, y_stride, gains, shares, merges, coefficients,
    expanded, collapsed, row, is_row,
    WIDTH: tl.constexpr, S: tl.constexpr, MIX_TILE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, EXPAND: tl.constexpr, MIX: tl.constexpr,
    COLLAPSE: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """TILE channels of ROWS rows: their part of the products [MIX_TILE / 16, 8, ROWS] and of the
    squares [ROWS]."""
    column = tile * TILE + tl.arange(0, TILE)
    there = is_row[:, None] & (column < WIDTH)[None, :]
    x = ()
    for s in tl.static_range(S):
        at = streams + (row * row_stride + s * stream_stride)[:, None] + column[None, :]
        x = x + (tl.load(at, mask=there, other=0.0).to(tl.float32),)  # noqa: RUF005
    if EXPAND:
        at = y + (row * y_stride)[:, None] + column[None, :]
        sublayer = tl.load(at, mask=there, other=0.0).to(tl.float32)
    squares = tl.zeros((ROWS, TILE), tl.float32)
    merged = tl.zeros((ROWS, TILE), tl.float32)
    operands = ()
    for j in tl.static_range(S):
        value = x[j]
        if EXPAND:
            value = shares[j] * x[0]
            for source in tl.static_range(1, S):
                value = tl.fma(shares[source * S + j], x[source], value)
            value = tl.fma(gains[j], sublayer, value)
            value = _rounded(value, expanded.dtype.element_ty, not WIDEN)
            at = (row * S + j)[:, None] * WIDTH + column[None, :]
            tl.store(expanded + at, value, mask=there)
            value = value.to(tl.float32)
        if MIX:
            squares = tl.fma(value, value, squares)
            operands = operands + ((value if WIDEN else value.to(DOT)),)  # noqa: RUF005
        if COLLAPSE:
            merged = merges[j] * value if j == 0 else tl.fma(merges[j], value, merged)
    if COLLAPSE:
        at = collapsed + row[:, None] * WIDTH + column[None, :]
        merged = _rounded(merged, collapsed.dtype.element_ty, not WIDEN)
        tl.store(at, merged, mask=there)
    products = tl.zeros((MIX_TILE // 16, 8, ROWS), tl.float32)
    if MIX:
        # Mixes are the rows of the product and streams its columns: the other way round, the
        # compiler would compute the streams once for every layout that a product wants.
        operand = _side_by_side(operands, S, ROWS, TILE)
        if WIDEN:
            halves = tl.dot(coefficients, operand, input_precision="tf32x3")
        else:
            halves = tl.dot(coefficients, operand)
        products = tl.sum(tl.reshape(halves, (MIX_TILE // 16, 2, 8, ROWS)), axis=1)
    return products, _row_sums(squares, ROWS, TILE)


@triton.jit
def _leave(
    sums, part, products, squares, row, is_row,
    PARTS: tl.constexpr, MIXES: tl.constexpr, SUMS: tl.constexpr, MIX_TILE: tl.constexpr,
):  # fmt: skip
    at = sums + (row * PARTS + part) * SUMS
    mix = tl.arange(0, MIX_TILE // 16)[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
    mask = is_row[None, None, :] & (mix < MIXES)
    tl.store(at[None, None, :] + mix, products, mask=mask)
    tl.store(at + MIXES, squares, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def streams_pass(
    streams, row_stride, stream_stride, y, y_stride, post, comb, pre, fn,
    expanded, collapsed, sums, num_rows, num_tiles,
    WIDTH: tl.constexpr, S: tl.constexpr, MIXES: tl.constexpr, SUMS: tl.constexpr,
    MIX_TILE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, EXPAND: tl.constexpr, MIX: tl.constexpr,
    COLLAPSE: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr, STACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """TILES tiles of ROWS rows. `sums` [rows, PARTS, SUMS] takes the products, and behind them the
    squares, of each tile if TILES is 1, of each PART tiles else."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row < num_rows
    first = tl.program_id(1) * TILES
    coefficients = fn
    if MIX and TILES == 1:
        # Weights, which no launch before this one writes: under way before it has ended.
        coefficients = _coefficients(
            fn, first, WIDTH, S, MIXES, MIX_TILE, TILE, DOT, WIDEN, STACKED
        )  # fmt: skip
    after_previous(OVERLAP)
    gains, shares, merges = (), (), ()
    if EXPAND:
        gains = _columns(post, row, S, is_row, ROWS, TILE)
        shares = _columns(comb, row, S * S, is_row, ROWS, TILE)
    if COLLAPSE:
        merges = _columns(pre, row, S, is_row, ROWS, TILE)
    if TILES == 1:
        products, squares = _tile(
            first, streams, row_stride, stream_stride, y, y_stride, gains, shares, merges,
            coefficients, expanded, collapsed, row, is_row, WIDTH, S, MIX_TILE, ROWS, TILE,
            EXPAND, MIX, COLLAPSE, DOT, WIDEN,
        )  # fmt: skip
        if MIX:
            _leave(sums, first, products, squares, row, is_row, PARTS, MIXES, SUMS, MIX_TILE)
    else:
        products = tl.zeros((MIX_TILE // 16, 8, ROWS), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for tile in range(first, tl.minimum(first + TILES, num_tiles)):
            of_tile = fn
            if MIX:
                # Ahead of the stores, which no load may be moved across.
                of_tile = _coefficients(
                    fn, tile, WIDTH, S, MIXES, MIX_TILE, TILE, DOT, WIDEN, STACKED
                )  # fmt: skip
            more, more_squares = _tile(
                tile, streams, row_stride, stream_stride, y, y_stride, gains, shares, merges,
                of_tile, expanded, collapsed, row, is_row, WIDTH, S, MIX_TILE, ROWS, TILE,
                EXPAND, MIX, COLLAPSE, DOT, WIDEN,
            )  # fmt: skip
            products += more
            squares += more_squares
            if MIX and ((tile % PART == PART - 1) | (tile == num_tiles - 1)):
                part = tile // PART
                _leave(
                    sums, part, products, squares, row, is_row, PARTS, MIXES, SUMS, MIX_TILE
                )  # fmt: skip
                products = tl.zeros((MIX_TILE // 16, 8, ROWS), tl.float32)
                squares = tl.zeros((ROWS,), tl.float32)
