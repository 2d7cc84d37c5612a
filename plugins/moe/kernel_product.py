"""The two grouped products of the mixture of experts; docs/kernels/moe.md has their layout.

A program makes a tile of outputs of one expert for a few of its rows. Weights are the rows of the
product and tokens its columns, so that few tokens still fill a tensor core, and a weight is decoded
in registers as it streams by.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.overlap import after_previous
from plugins.device.weights import load_weight
from plugins.moe.kernel_float8 import loaded_row, product_float8

# How an expert's matrices are stored: a number of plugins/device/weights.py, or one of these.
VALUES = tl.constexpr(8)  # in the compute dtype
FLOAT8 = tl.constexpr(9)  # released FP4 that product_float8 takes
# Programs that share a tile of a shared expert, whose weights are wider than a chosen one's.
SHARED_PARTS = tl.constexpr(4)
# Numbers of an expert in the table of addresses: codes, scales, global scale of w1, w3 and w2.
ADDRESSES = 9


@triton.jit
def _pointer(table, expert, at: tl.constexpr, kind: tl.constexpr):
    address = tl.load(table + expert * 9 + at)
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def _weight(
    table, expert, matrix: tl.constexpr, row, first, inner,
    WIDTH: tl.constexpr, INNER: tl.constexpr, STORED: tl.constexpr, WORDS: tl.constexpr,
    HARDWARE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows `row` of a matrix from column `first` on, in the type of the product."""
    EVEN: tl.constexpr = WIDTH % INNER == 0
    kind: tl.constexpr = DOT if STORED == VALUES else tl.uint8
    codes = _pointer(table, expert, 3 * matrix, kind)
    if STORED == VALUES:
        at = codes + row[:, None].to(tl.int64) * WIDTH + (first + inner)[None, :]
        there = (first + inner < WIDTH)[None, :]
        weight = tl.load(at) if EVEN else tl.load(at, mask=there, other=0.0)
    else:
        scale = _pointer(table, expert, 3 * matrix + 1, tl.uint8)
        factor = _pointer(table, expert, 3 * matrix + 2, tl.float32)
        GROUP: tl.constexpr = 16 if STORED == 3 else 32
        scale_stride: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        weight = load_weight(
            codes, scale, scale_stride, factor, STORED, WORDS, row, first, WIDTH, EVEN, INNER,
            HARDWARE,
        ).to(DOT)  # fmt: skip
    return weight


@triton.jit
def _product(
    table, expert, matrix: tl.constexpr, row, x, x_row,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, STORED: tl.constexpr,
    WORDS: tl.constexpr, HARDWARE: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Rows `row` of a matrix [OUTPUTS, WIDTH] times rows of x, float32 [N, ROWS]."""
    EVEN: tl.constexpr = WIDTH % INNER == 0
    inner = tl.arange(0, INNER)
    x_at = x + x_row[:, None] * WIDTH + inner[None, :]
    total = tl.zeros((row.shape[0], x_row.shape[0]), tl.float32)
    for first in range(0, WIDTH, INNER):
        weight = _weight(
            table, expert, matrix, row, first, inner,
            WIDTH, INNER, STORED, WORDS, HARDWARE, DOT,
        )  # fmt: skip
        there = (first + inner < WIDTH)[None, :]
        value = tl.load(x_at + first) if EVEN else tl.load(x_at + first, mask=there, other=0.0)
        if WIDEN:
            weight, value = weight.to(tl.float32), value.to(tl.float32)
        total = tl.dot(weight, tl.trans(value), total, input_precision="tf32x3")
    return total


@triton.jit
def _two_products(
    table, expert, row, x, x_row,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, STORED: tl.constexpr,
    WORDS: tl.constexpr, HARDWARE: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Rows of w1 and of w3, as _product, in one loop: twice as many bytes are under way."""
    EVEN: tl.constexpr = WIDTH % INNER == 0
    inner = tl.arange(0, INNER)
    x_at = x + x_row[:, None] * WIDTH + inner[None, :]
    gate = tl.zeros((row.shape[0], x_row.shape[0]), tl.float32)
    linear = tl.zeros((row.shape[0], x_row.shape[0]), tl.float32)
    for first in range(0, WIDTH, INNER):
        w1 = _weight(
            table, expert, 0, row, first, inner,
            WIDTH, INNER, STORED, WORDS, HARDWARE, DOT,
        )  # fmt: skip
        w3 = _weight(
            table, expert, 1, row, first, inner,
            WIDTH, INNER, STORED, WORDS, HARDWARE, DOT,
        )  # fmt: skip
        there = (first + inner < WIDTH)[None, :]
        value = tl.load(x_at + first) if EVEN else tl.load(x_at + first, mask=there, other=0.0)
        if WIDEN:
            w1, w3, value = w1.to(tl.float32), w3.to(tl.float32), value.to(tl.float32)
        gate = tl.dot(w1, tl.trans(value), gate, input_precision="tf32x3")
        linear = tl.dot(w3, tl.trans(value), linear, input_precision="tf32x3")
    return gate, linear


@triton.jit
def swiglu(gate, linear, limit):
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    linear = tl.minimum(linear, limit, propagate_nan=tl.PropagateNan.ALL)
    linear = tl.maximum(linear, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * linear


@triton.jit
def _gate_up_tile(
    table, exponents, expert, first, x, codes, powers, x_row, limit,
    WIDTH: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
    STORED: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
    DOT: tl.constexpr, WARPS: tl.constexpr,
    WIDEN: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The activation [ROWS, TILE] of outputs `first` on. TOGETHER: both matrices in one loop."""
    ROWS: tl.constexpr = x_row.shape[0]
    if STORED == FLOAT8:
        # Both matrices in one product: eight rows of w1, eight of w3, and so on, so that a thread
        # has a gate and its linear value.
        base, scale = _pointer(table, expert, 0, tl.uint8), _pointer(table, expert, 1, tl.uint8)
        apart = tl.load(table + expert * 9 + 3) - tl.load(table + expert * 9)
        scales_apart = tl.load(table + expert * 9 + 4) - tl.load(table + expert * 9 + 1)
        place = loaded_row(2 * TILE, WARPS)
        is_linear = (place // 8 % 2).to(tl.int64)
        row = tl.minimum(first + place // 16 * 8 + place % 8, INTER - 1).to(tl.int64)
        largest = exponents + expert * 2 * INTER
        top = tl.load(largest + is_linear * INTER + row)
        place = tl.arange(0, 2 * TILE)
        output = tl.minimum(first + place // 16 * 8 + place % 8, INTER - 1)
        exponent = tl.load(largest + place // 8 % 2 * INTER + output)
        both = product_float8(
            base, scale, row, is_linear * tl.multiple_of(apart, 16),
            is_linear * tl.multiple_of(scales_apart, 16),
            top.to(tl.int32), exponent.to(tl.int32), codes, powers, x_row, WIDTH, WARPS, WIDEN,
        )  # fmt: skip
        both = both.reshape(TILE // 8, 2, 8, ROWS).permute(0, 2, 3, 1).reshape(TILE, ROWS, 2)
        gate, linear = tl.split(both)
    elif TOGETHER:
        row = tl.minimum(first + tl.arange(0, TILE), INTER - 1)
        gate, linear = _two_products(
            table, expert, row, x, x_row,
            INTER, WIDTH, INNER, STORED, WORDS, HARDWARE, DOT, WIDEN,
        )  # fmt: skip
    else:
        row = tl.minimum(first + tl.arange(0, TILE), INTER - 1)
        gate = _product(
            table, expert, 0, row, x, x_row,
            INTER, WIDTH, INNER, STORED, WORDS, HARDWARE, DOT, WIDEN,
        )  # fmt: skip
        linear = _product(
            table, expert, 1, row, x, x_row,
            INTER, WIDTH, INNER, STORED, WORDS, HARDWARE, DOT, WIDEN,
        )  # fmt: skip
    return tl.trans(swiglu(gate, linear, limit))


@triton.jit
def gate_up(
    x, shared_x, codes, powers, segments, order, weights, table, exponents, shared_table,
    activation, num_rows, num_pairs, limit,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, INTER: tl.constexpr, TOP_K: tl.constexpr,
    STORED: tl.constexpr, WORDS: tl.constexpr, SHARED_STORED: tl.constexpr,
    SHARED_WORDS: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, SHARED_INNER: tl.constexpr, HARDWARE: tl.constexpr,
    DOT: tl.constexpr, WARPS: tl.constexpr,
    WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of w1 and w3: silu(min(g, limit)) · clamp(l, ±limit) · routing weight.

    Grid [row blocks, output tiles, parts of tiles of shared experts, then chosen ones]. Pairs'
    activations lie at their places, the shared experts' behind them.
    """
    after_previous(OVERLAP)
    first = tl.program_id(1) * TILE
    # The first condition is the compiler's: what is not compiled takes no shared memory.
    if SHARED > 0:  # noqa: SIM102
        if tl.program_id(2) < SHARED * SHARED_PARTS:
            PART: tl.constexpr = TILE // SHARED_PARTS
            expert = (tl.program_id(2) // SHARED_PARTS).to(tl.int64)
            first += tl.program_id(2) % SHARED_PARTS * PART
            output = first + tl.arange(0, PART)
            num_blocks = tl.cdiv(num_rows, SHARED_ROWS)
            for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
                row = block * SHARED_ROWS + tl.arange(0, SHARED_ROWS)
                token = tl.minimum(row, num_rows - 1).to(tl.int64)
                a = _gate_up_tile(
                    shared_table, exponents, expert, first, shared_x, codes, powers, token, limit,
                    WIDTH, INTER, PART, SHARED_INNER, SHARED_STORED, SHARED_WORDS, HARDWARE, DOT,
                    WARPS, WIDEN, True,
                )  # fmt: skip
                at = (num_pairs + expert * num_rows + token) * INTER
                there = (row < num_rows)[:, None] & (output < INTER)[None, :]
                a = a.to(activation.dtype.element_ty)
                tl.store(activation + at[:, None] + output[None, :], a, mask=there)
    if tl.program_id(2) >= SHARED * SHARED_PARTS:
        output = first + tl.arange(0, TILE)
        segment = segments + (tl.program_id(2) - SHARED * SHARED_PARTS) * 3
        expert = tl.load(segment).to(tl.int64)
        start, count = tl.load(segment + 1), tl.load(segment + 2)
        for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
            row = block * ROWS + tl.arange(0, ROWS)
            place = start + tl.minimum(row, count - 1)
            pair = tl.load(order + place)
            a = _gate_up_tile(
                table, exponents, expert, first, x, codes, powers, (pair // TOP_K).to(tl.int64),
                limit, WIDTH, INTER, TILE, INNER, STORED, WORDS, HARDWARE, DOT, WARPS, WIDEN, False,
            )  # fmt: skip
            a *= tl.load(weights + pair).to(tl.float32)[:, None]
            there = (row < count)[:, None] & (output < INTER)[None, :]
            a = a.to(activation.dtype.element_ty)
            at = place[:, None].to(tl.int64) * INTER + output[None, :]
            tl.store(activation + at, a, mask=there)


@triton.jit
def _down_tile(
    table, exponents, expert, first, x, codes, powers, x_row,
    WIDTH: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
    STORED: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
    DOT: tl.constexpr, WARPS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.minimum(first + tl.arange(0, TILE), WIDTH - 1)
    if STORED == FLOAT8:
        base, scale = _pointer(table, expert, 6, tl.uint8), _pointer(table, expert, 7, tl.uint8)
        place = tl.minimum(first + loaded_row(TILE, WARPS), WIDTH - 1)
        none = tl.zeros((TILE,), tl.int64)
        largest = exponents + expert * WIDTH
        y = product_float8(
            base, scale, place.to(tl.int64), none, none,
            tl.load(largest + place).to(tl.int32), tl.load(largest + row).to(tl.int32),
            codes, powers, x_row, INTER, WARPS, WIDEN,
        )  # fmt: skip
    else:
        y = _product(
            table, expert, 2, row, x, x_row,
            WIDTH, INTER, INNER, STORED, WORDS, HARDWARE, DOT, WIDEN,
        )  # fmt: skip
    return tl.trans(y)


@triton.jit
def down(
    activation, shared_activation, codes, powers, segments, table, exponents, shared_table, y,
    num_rows, num_pairs,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, INTER: tl.constexpr,
    STORED: tl.constexpr, WORDS: tl.constexpr, SHARED_STORED: tl.constexpr,
    SHARED_WORDS: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, SHARED_INNER: tl.constexpr, HARDWARE: tl.constexpr,
    DOT: tl.constexpr, WARPS: tl.constexpr,
    WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of w2 times activations, float32 at the activations' places; grid as in gate_up."""
    after_previous(OVERLAP)
    first = tl.program_id(1) * TILE
    # The first condition is the compiler's: what is not compiled takes no shared memory.
    if SHARED > 0:  # noqa: SIM102
        if tl.program_id(2) < SHARED * SHARED_PARTS:
            PART: tl.constexpr = TILE // SHARED_PARTS
            expert = (tl.program_id(2) // SHARED_PARTS).to(tl.int64)
            first += tl.program_id(2) % SHARED_PARTS * PART
            output = first + tl.arange(0, PART)
            num_blocks = tl.cdiv(num_rows, SHARED_ROWS)
            for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
                row = block * SHARED_ROWS + tl.arange(0, SHARED_ROWS)
                token = tl.minimum(row, num_rows - 1).to(tl.int64)
                place = num_pairs + expert * num_rows + token
                result = _down_tile(
                    shared_table, exponents, expert, first, shared_activation, codes, powers, place,
                    WIDTH, INTER, PART, SHARED_INNER, SHARED_STORED, SHARED_WORDS, HARDWARE, DOT,
                    WARPS, WIDEN,
                )  # fmt: skip
                there = (row < num_rows)[:, None] & (output < WIDTH)[None, :]
                tl.store(y + place[:, None] * WIDTH + output[None, :], result, mask=there)
    if tl.program_id(2) >= SHARED * SHARED_PARTS:
        output = first + tl.arange(0, TILE)
        segment = segments + (tl.program_id(2) - SHARED * SHARED_PARTS) * 3
        expert = tl.load(segment).to(tl.int64)
        start, count = tl.load(segment + 1), tl.load(segment + 2)
        for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
            row = block * ROWS + tl.arange(0, ROWS)
            place = (start + tl.minimum(row, count - 1)).to(tl.int64)
            result = _down_tile(
                table, exponents, expert, first, activation, codes, powers, place,
                WIDTH, INTER, TILE, INNER, STORED, WORDS, HARDWARE, DOT, WARPS, WIDEN,
            )  # fmt: skip
            there = (row < count)[:, None] & (output < WIDTH)[None, :]
            tl.store(y + place[:, None] * WIDTH + output[None, :], result, mask=there)
