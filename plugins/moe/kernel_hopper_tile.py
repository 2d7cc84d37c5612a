"""What a tile of kernel_hopper.py and of kernel_few.py needs beside its steps: which rows it loads
in which order, and where its results go."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from plugins.device.weights import NVFP4
from plugins.moe.kernel_hopper_operand import stored
from plugins.moe.kernel_nvfp4 import UNIT

_ALL = gl.constexpr(PropagateNan.ALL)
_TOP = gl.constexpr(6)  # as in kernel_float8.py
FLOAT8 = gl.constexpr(9)  # of device_weights.py


@gluon.constexpr_function
def line(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def output_of(place, N: gl.constexpr, MATRICES: gl.constexpr, WARPS: gl.constexpr):
    """Of rows in the order in which they are loaded, matrix by matrix, the output: so that a thread
    holds outputs that lie side by side, and both matrices' sums of each."""
    ROUND: gl.constexpr = 8 * WARPS
    return place % ROUND * (N // (ROUND * MATRICES)) + place % (N // MATRICES) // ROUND


@gluon.jit
def segment_of(segments, item, end, TILES: gl.constexpr):
    """Expert, first place and number of rows of an item, or of the last one."""
    at = segments + gl.minimum(item, end - 1) // TILES * 3
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def width_of(count, ROWS: gl.constexpr, MORE: gl.constexpr, LEVELS: gl.constexpr):
    """Rows of the product that takes so many: of ROWS + MORE, or ROWS, or a half or a quarter of
    them as LEVELS is 1 or 2."""
    width = gl.where(count <= ROWS, ROWS, ROWS + MORE)
    if LEVELS >= 1:
        width = gl.where(count <= ROWS // 2, ROWS // 2, width)
    if LEVELS >= 2:
        width = gl.where(count <= ROWS // 4, ROWS // 4, width)
    return width


@gluon.jit
def rows_of(order, start, count, FROM: gl.constexpr, SIZE: gl.constexpr, MATRICES: gl.constexpr,
             LAYOUT: gl.constexpr):  # fmt: skip
    """Pairs [SIZE] of a segment, or their places."""
    row = start + gl.minimum(FROM + gl.arange(0, SIZE, layout=LAYOUT), count - 1)
    if MATRICES == 2:
        row = gl.load(order + row)
    return row


@gluon.jit
def largest_of(
    exponents, expert, item, end, N: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    TILES: gl.constexpr, LAYOUT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The largest scale byte [N] of each loaded row of an item."""
    place = gl.arange(0, N, layout=LAYOUT)
    output = gl.minimum(item, end - 1) % TILES * (N // MATRICES) + output_of(
        place, N, MATRICES, WARPS
    )
    matrix = place // (N // MATRICES)
    at = (expert * MATRICES + matrix) * OUTPUTS + gl.minimum(output, OUTPUTS - 1)
    return gl.load(exponents + at)


@gluon.jit
def _scaled(total, exponent, power, STORED: gl.constexpr):
    """Sums [N, ROWS] times 2^(exponent − 127 − TOP) of their rows, in two factors that are normal
    numbers, and the powers of their columns. FP4 was decoded to negatives."""
    TOP: gl.constexpr = _TOP if STORED == FLOAT8 else 0
    half = exponent >> 1
    factor = (half << 23).to(gl.float32, bitcast=True)
    factor = -factor if STORED == FLOAT8 else factor
    rest = ((exponent - half - TOP + 127) << 23).to(gl.float32, bitcast=True)
    return total * gl.expand_dims(factor, 1) * (gl.expand_dims(rest, 1) * gl.expand_dims(power, 0))


@gluon.jit
def _global_scale(table, expert, matrix: gl.constexpr):
    address = gl.load(table + expert.to(gl.int64) * 9 + 3 * matrix + 2)
    return gl.load(address.to(gl.pointer_type(gl.float32)))


@gluon.jit
def activated(gate, linear, limit):
    """silu(min(gate, limit)) · clamp(linear, ±limit)."""
    gate = gl.minimum(gate, limit, propagate_nan=_ALL)
    linear = gl.minimum(linear, limit, propagate_nan=_ALL)
    linear = gl.maximum(linear, -limit, propagate_nan=_ALL)
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + gl.exp(-gate)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gate * inverse * linear


@gluon.jit
def arranged(total, MATRICES: gl.constexpr, WARPS: gl.constexpr):
    """Sums [N, ROWS] in the order of outputs, of each its matrices' side by side."""
    N: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    EACH: gl.constexpr = N // (8 * WARPS * MATRICES)
    total = gl.permute(total.reshape([N // (16 * WARPS), WARPS, 2, 8, ROWS]), (1, 3, 0, 2, 4))
    total = gl.permute(total.reshape([8 * WARPS, MATRICES, EACH, ROWS]), (0, 2, 1, 3))
    return total.reshape([N, ROWS])


@gluon.jit
def store(
    total, power, weight, from_row, start, count, first, expert, table, exponents, result, limit,
    OUTPUTS: gl.constexpr, MATRICES: gl.constexpr, STORED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Results of `total` [N, ROWS], of outputs `first` on, for rows from_row on of a segment."""
    total = arranged(total, MATRICES, WARPS)
    place = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, total.type.layout))
    power = gl.convert_layout(power, gl.SliceLayout(0, total.type.layout))
    if STORED == NVFP4:
        factor = _global_scale(table, expert, 0 if MATRICES == 2 else 2)
        other = _global_scale(table, expert, 1) if MATRICES == 2 else factor
        factor = gl.where(place % MATRICES == 0, factor, other) * UNIT
        value = total * (gl.expand_dims(factor, 1) * gl.expand_dims(power, 0))
    else:
        output = gl.minimum(first + place // MATRICES, OUTPUTS - 1)
        largest = exponents + (expert * MATRICES + place % MATRICES) * OUTPUTS + output
        value = _scaled(total, gl.load(largest).to(gl.int32), power, STORED)
    store_values(
        value, weight, from_row, start, count, first, result, limit, OUTPUTS, MATRICES, WARPS
    )


@gluon.jit
def store_values(
    value, weight, from_row, start, count, first, result, limit,
    OUTPUTS: gl.constexpr, MATRICES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The same of arranged products."""
    N: gl.constexpr = value.shape[0]
    ROWS: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = stored(N // (8 * WARPS * MATRICES), ROWS, WARPS)
    if MATRICES == 2:
        gate, linear = gl.split(gl.permute(value.reshape([N // 2, 2, ROWS]), (0, 2, 1)))
        value = gl.convert_layout(activated(gate, linear, limit), LAYOUT)
        value *= gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(0, LAYOUT)), 0)
    else:
        value = gl.convert_layout(value, LAYOUT)
    row = from_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    output = first + gl.arange(0, N // MATRICES, layout=gl.SliceLayout(1, LAYOUT))
    at = gl.expand_dims((start + row).to(gl.int64) * OUTPUTS, 0) + gl.expand_dims(output, 1)
    there = gl.expand_dims(row < count, 0) & gl.expand_dims(output < OUTPUTS, 1)
    gl.store(result + at, value.to(result.dtype.element_ty), mask=there)
