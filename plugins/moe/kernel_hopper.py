"""Released FP4 experts of many rows on compute capability 9.0, in Gluon; docs/kernels/moe.md says
why.

As product_float8, but a step's codes are decoded while the tensor core still multiplies those of
the step before: a thread holds both in registers, which the compiler of the Triton language does
not keep apart. Sums stay in the tensor core from the first column to the last.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import PropagateNan

from plugins.moe.kernel_float8 import EIGHT_CODES

# Here an operand of the assembly is one register, not four bytes with a register each.
_EIGHT_CODES = gl.constexpr(EIGHT_CODES.value.replace("$7", "$4"))
_ALL = gl.constexpr(PropagateNan.ALL)
_TOP = gl.constexpr(6)  # as in kernel_float8.py


@gluon.constexpr_function
def _words(warps, each):
    """Words of codes [N, 4 · each]: eight rows a warp, of which four threads hold a group each."""
    return gl.BlockedLayout([1, each], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def _groups(warps, each):
    return gl.BlockedLayout([1, 1, each], [8, 4, 1], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _copied(warps):
    """How rows of tokens' codes [ROWS, 128] are copied."""
    return gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _sums(warps, columns):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 32])


@gluon.jit
def _loaded_row(place, WARPS: gl.constexpr):
    """As kernel_float8.loaded_row."""
    rest = place // 8
    row = (rest // WARPS // 2 * WARPS + rest % WARPS) * 16 + rest // WARPS % 2 * 8
    return row + place % 8


@gluon.jit
def _tables(four, top, LAYOUT: gl.constexpr):
    """The eight magnitudes of groups [N, 4], in two registers."""
    nth = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    scale = ((gl.expand_dims(four, 1) >> (8 * gl.expand_dims(nth, 0))) & 0xFF).to(gl.int32)
    shift = scale - gl.expand_dims(top, 1) + _TOP
    return shift * 0x08080800 + 0x3C383000, shift * 0x08080808 + 0x4C484440


@gluon.jit
def _of_words(table, EACH: gl.constexpr, WARPS: gl.constexpr):
    N: gl.constexpr = table.shape[0]
    none = gl.zeros([N, 4, EACH], gl.int32, _groups(WARPS, EACH))
    every = (gl.expand_dims(table, 2) + none).reshape([N, 4 * EACH])
    return gl.convert_layout(every, _words(WARPS, EACH))


@gluon.jit
def _decode(words, low, high, EACH: gl.constexpr, WARPS: gl.constexpr):
    """The first and the last four of every eight codes, int32."""
    return gl.inline_asm_elementwise(
        _EIGHT_CODES,
        "=&r,=&r,r,r,r",
        [words, _of_words(low, EACH, WARPS), _of_words(high, EACH, WARPS)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _operand(first, last, EACH: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr):
    """Those registers as the left operand [N, 32 · EACH]."""
    N: gl.constexpr = first.shape[0]
    BYTES: gl.constexpr = gl.BlockedLayout(
        [1, EACH, 2, 4], [8, 4, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    word = gl.convert_layout(gl.join(first, last).reshape([N, 4 * EACH, 2, 1]), BYTES)
    word += gl.zeros([N, 4 * EACH, 2, 4], gl.int32, BYTES)
    byte = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [word], dtype=gl.uint8, is_pure=True, pack=4
    )
    byte = byte.reshape([N // (16 * WARPS), 2, WARPS, 8, 4, EACH, 2, 4])
    byte = gl.permute(byte, (0, 2, 1, 3, 5, 6, 4, 7)).reshape([N, 32 * EACH])
    return gl.convert_layout(byte.to(gl.float8e4nv, bitcast=True), gl.DotOperandLayout(0, SUMS, 4))


@gluon.jit
def _copy(
    step, steps, stage, codes, scales, rows, more_rows, codes_at, scales_at, rows_at, more_at,
    MORE: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step, of which there may be none; a group either way."""
    if step < steps:
        async_copy.async_copy_global_to_shared(codes.index(stage), codes_at + step * 16)
        async_copy.async_copy_global_to_shared(scales.index(stage), scales_at + step)
        async_copy.async_copy_global_to_shared(rows.index(stage), rows_at + step * 128)
        if MORE > 0:
            async_copy.async_copy_global_to_shared(more_rows.index(stage), more_at + step * 128)
    async_copy.commit_group()


@gluon.jit
def _product(
    codes_at, scales_at, top, rows_at, more_at,
    STEPS: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """Weight rows [N] times ROWS rows and MORE others, in steps of 128 columns, of which SLICES are
    decoded one after the other. STEPS is even."""
    N: gl.constexpr = codes_at.shape[0]
    EACH: gl.constexpr = 4 // SLICES
    OTHER: gl.constexpr = MORE if MORE > 0 else 8
    SCALES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _groups(WARPS, EACH)))
    SUMS: gl.constexpr = _sums(WARPS, ROWS)
    OTHER_SUMS: gl.constexpr = _sums(WARPS, OTHER)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    codes = gl.allocate_shared_memory(gl.uint32, [STAGES, N, 16], FLAT)
    scales = gl.allocate_shared_memory(
        gl.uint32, [STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], SWIZZLED)
    more_rows = rows
    if MORE > 0:
        more_rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, OTHER, 128], SWIZZLED)
    for ahead in gl.static_range(STAGES - 2):
        _copy(
            ahead, STEPS, ahead, codes, scales, rows, more_rows,
            codes_at, scales_at, rows_at, more_at, MORE,
        )  # fmt: skip
    top = gl.convert_layout(top, SCALES)
    total = gl.zeros([N, ROWS], gl.float32, SUMS)
    other = gl.zeros([N, OTHER], gl.float32, OTHER_SUMS)
    # What the product under way reads: held until it ends, so that nothing is decoded over it.
    first = gl.zeros([N, 4 * EACH], gl.int32, _words(WARPS, EACH))
    last = first
    for pair in range(STEPS // 2):
        for nth in gl.static_range(2):  # so that the two sets of registers change places
            step = pair * 2 + nth
            async_copy.wait_group(STAGES - 3)
            gl.thread_barrier()
            fence_async_shared()
            stage = step % STAGES
            words = codes.index(stage).load(_words(WARPS, 4))
            low, high = _tables(scales.index(stage).load(SCALES), top, _groups(WARPS, EACH))
            if SLICES == 2:
                halves = gl.permute(words.reshape([N, 4, 2, 2]), (0, 1, 3, 2))
                half, other_half = gl.split(halves)
            for part in gl.static_range(SLICES):
                if SLICES == 2:
                    words = half if part == 0 else other_half
                    words = gl.convert_layout(words.reshape([N, 8]), _words(WARPS, 2))
                new_first, new_last = _decode(words, low, high, EACH, WARPS)
                weight = _operand(new_first, new_last, EACH, WARPS, SUMS)
                x = rows.index(stage).slice(part * 32 * EACH, 32 * EACH, dim=1)
                product = warpgroup_mma(weight, x.permute((1, 0)), total, is_async=True)
                if MORE > 0:
                    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, OTHER_SUMS, 4))
                    x = more_rows.index(stage).slice(part * 32 * EACH, 32 * EACH, dim=1)
                    more = warpgroup_mma(weight, x.permute((1, 0)), other, is_async=True)
                    total, other, _, _, first, last = warpgroup_mma_wait(
                        2, deps=[product, more, first, last, new_first, new_last]
                    )
                else:
                    total, _, _, first, last = warpgroup_mma_wait(
                        1, deps=[product, first, last, new_first, new_last]
                    )
            # Into the stage that every warp has left since the last barrier.
            _copy(
                step + STAGES - 2, STEPS, (step + STAGES - 2) % STAGES, codes, scales, rows,
                more_rows, codes_at, scales_at, rows_at, more_at, MORE,
            )  # fmt: skip
    total, other, _, _ = warpgroup_mma_wait(0, deps=[total, other, first, last])
    async_copy.wait_group(0)
    gl.thread_barrier()
    return total, other


@gluon.jit
def _scaled(total, exponent, power):
    """Sums [N, ROWS] times 2^(exponent − 127 − TOP) of their rows, in two factors that are normal
    numbers, and the powers of their columns."""
    half = exponent >> 1
    factor = (half << 23).to(gl.float32, bitcast=True)
    rest = ((exponent - half - _TOP + 127) << 23).to(gl.float32, bitcast=True)
    return total * gl.expand_dims(-factor, 1) * (gl.expand_dims(rest, 1) * gl.expand_dims(power, 0))


@gluon.jit
def _store_activation(
    total, from_row, first, start, count, expert,
    order, weights, powers, exponents, activation, limit,
    INTER: gl.constexpr, TOP_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    TILE: gl.constexpr = N // 2
    SUMS: gl.constexpr = total.type.layout
    place = gl.arange(0, N, layout=gl.SliceLayout(1, SUMS))
    output = gl.minimum(first + place // 16 * 8 + place % 8, INTER - 1)
    largest = exponents + expert * 2 * INTER + place // 8 % 2 * INTER + output
    row = gl.minimum(from_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS)), count - 1)
    power = gl.load(powers + gl.load(order + start + row) // TOP_K)
    both = _scaled(total, gl.load(largest).to(gl.int32), power)
    both = gl.permute(both.reshape([TILE // 8, 2, 8, ROWS]), (0, 2, 3, 1))
    gate, linear = gl.split(both.reshape([TILE, ROWS, 2]))
    gate = gl.minimum(gate, limit, propagate_nan=_ALL)
    linear = gl.maximum(gl.minimum(linear, limit, propagate_nan=_ALL), -limit, propagate_nan=_ALL)
    value = gate / (1.0 + gl.exp(-gate)) * linear
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [TILE // 8, 256 // TILE], [1, WARPS], [0, 1])
    value = gl.convert_layout(value, STORED)
    row = from_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    pair = gl.load(order + start + gl.minimum(row, count - 1))
    value *= gl.expand_dims(gl.load(weights + pair).to(gl.float32), 0)
    output = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, STORED))
    at = gl.expand_dims((start + row).to(gl.int64) * INTER, 0) + gl.expand_dims(output, 1)
    there = gl.expand_dims(row < count, 0) & gl.expand_dims(output < INTER, 1)
    gl.store(activation + at, value.to(gl.bfloat16), mask=there)


@gluon.jit
def _pairs_at(codes, order, start, first_row, count, ROWS: gl.constexpr, WIDTH: gl.constexpr,
              TOP_K: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Addresses [ROWS, 128] of the first columns of pairs' tokens."""
    COPIED: gl.constexpr = _copied(WARPS)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPIED))
    token = gl.load(order + start + gl.minimum(row, count - 1)) // TOP_K
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, COPIED))
    return codes + gl.expand_dims(token.to(gl.int64) * WIDTH, 1) + gl.expand_dims(column, 0)


@gluon.jit
def _places_at(codes, start, first_row, count, ROWS: gl.constexpr, INTER: gl.constexpr,
               WARPS: gl.constexpr):  # fmt: skip
    COPIED: gl.constexpr = _copied(WARPS)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPIED))
    place = (start + gl.minimum(row, count - 1)).to(gl.int64)
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, COPIED))
    return codes + gl.expand_dims(place * INTER, 1) + gl.expand_dims(column, 0)


@gluon.jit
def gate_up_hopper(
    codes, powers, segments, order, weights, table, exponents, activation, limit,
    TOP_K: gl.constexpr, WIDTH: gl.constexpr, INTER: gl.constexpr, N: gl.constexpr,
    ROWS: gl.constexpr, MORE: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    SLICES: gl.constexpr,
):  # fmt: skip
    """As kernel_product.gate_up, for chosen experts: N / 2 outputs for ROWS + MORE rows.

    Grid [row blocks, output tiles, chosen experts].
    """
    WORDS: gl.constexpr = _words(WARPS, 4)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    first = gl.program_id(1) * (N // 2)
    segment = segments + gl.program_id(2) * 3
    expert = gl.load(segment).to(gl.int64)
    start, count = gl.load(segment + 1), gl.load(segment + 2)
    address = table + expert * 9
    base = gl.multiple_of(gl.load(address).to(gl.pointer_type(gl.uint32)), 16)
    scale = gl.multiple_of(gl.load(address + 1).to(gl.pointer_type(gl.uint32)), 16)
    apart = gl.multiple_of(gl.load(address + 3) - gl.load(address), 16)
    scales_apart = gl.multiple_of(gl.load(address + 4) - gl.load(address + 1), 16)
    place = _loaded_row(gl.arange(0, N, layout=gl.SliceLayout(1, WORDS)), WARPS)
    row = gl.minimum(first + place // 16 * 8 + place % 8, INTER - 1).to(gl.int64)
    at = (place // 8 % 2).to(gl.int64) * (apart // 4) + row * (WIDTH // 8)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))
    codes_at = base + gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
    place = _loaded_row(gl.arange(0, N, layout=LINE), WARPS)
    row = gl.minimum(first + place // 16 * 8 + place % 8, INTER - 1)
    is_linear = (place // 8 % 2).to(gl.int64)
    scales_at = scale + is_linear * (scales_apart // 4) + row.to(gl.int64) * (WIDTH // 128)
    top = gl.load(exponents + (expert * 2 + is_linear) * INTER + row).to(gl.int32)
    for block in range(gl.program_id(0), gl.cdiv(count, ROWS + MORE), gl.num_programs(0)):
        from_row = block * (ROWS + MORE)
        rows_at = _pairs_at(codes, order, start, from_row, count, ROWS, WIDTH, TOP_K, WARPS)
        OTHER: gl.constexpr = MORE if MORE > 0 else 8
        more_at = _pairs_at(codes, order, start, from_row + ROWS, count, OTHER, WIDTH, TOP_K, WARPS)
        total, other = _product(
            codes_at, scales_at, top, rows_at, more_at,
            WIDTH // 128, ROWS, MORE, WARPS, STAGES, SLICES,
        )  # fmt: skip
        _store_activation(
            total, from_row, first, start, count, expert,
            order, weights, powers, exponents, activation, limit, INTER, TOP_K, WARPS,
        )  # fmt: skip
        if MORE > 0:
            _store_activation(
                other, from_row + ROWS, first, start, count, expert,
                order, weights, powers, exponents, activation, limit, INTER, TOP_K, WARPS,
            )  # fmt: skip


@gluon.jit
def _store_sums(
    total, from_row, first, start, count, expert, powers, exponents, y,
    WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    SUMS: gl.constexpr = total.type.layout
    output = gl.minimum(first + gl.arange(0, N, layout=gl.SliceLayout(1, SUMS)), WIDTH - 1)
    row = gl.minimum(from_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS)), count - 1)
    exponent = gl.load(exponents + expert * WIDTH + output).to(gl.int32)
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, WARPS], [0, 1])
    result = gl.convert_layout(_scaled(total, exponent, gl.load(powers + start + row)), STORED)
    output = first + gl.arange(0, N, layout=gl.SliceLayout(1, STORED))
    row = from_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    at = gl.expand_dims((start + row).to(gl.int64) * WIDTH, 0) + gl.expand_dims(output, 1)
    there = gl.expand_dims(row < count, 0) & gl.expand_dims(output < WIDTH, 1)
    gl.store(y + at, result, mask=there)


@gluon.jit
def down_hopper(
    codes, powers, segments, table, exponents, y,
    WIDTH: gl.constexpr, INTER: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr,
    MORE: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """As kernel_product.down, for chosen experts; N outputs, grid as in gate_up_hopper."""
    WORDS: gl.constexpr = _words(WARPS, 4)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    first = gl.program_id(1) * N
    segment = segments + gl.program_id(2) * 3
    expert = gl.load(segment).to(gl.int64)
    start, count = gl.load(segment + 1), gl.load(segment + 2)
    address = table + expert * 9
    base = gl.multiple_of(gl.load(address + 6).to(gl.pointer_type(gl.uint32)), 16)
    scale = gl.multiple_of(gl.load(address + 7).to(gl.pointer_type(gl.uint32)), 16)
    place = first + _loaded_row(gl.arange(0, N, layout=gl.SliceLayout(1, WORDS)), WARPS)
    row = gl.minimum(place, WIDTH - 1).to(gl.int64)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))
    codes_at = base + gl.expand_dims(row * (INTER // 8), 1) + gl.expand_dims(column, 0)
    place = first + _loaded_row(gl.arange(0, N, layout=LINE), WARPS)
    row = gl.minimum(place, WIDTH - 1).to(gl.int64)
    scales_at = scale + row * (INTER // 128)
    top = gl.load(exponents + expert * WIDTH + row).to(gl.int32)
    for block in range(gl.program_id(0), gl.cdiv(count, ROWS + MORE), gl.num_programs(0)):
        from_row = block * (ROWS + MORE)
        rows_at = _places_at(codes, start, from_row, count, ROWS, INTER, WARPS)
        OTHER: gl.constexpr = MORE if MORE > 0 else 8
        more_at = _places_at(codes, start, from_row + ROWS, count, OTHER, INTER, WARPS)
        total, other = _product(
            codes_at, scales_at, top, rows_at, more_at,
            INTER // 128, ROWS, MORE, WARPS, STAGES, SLICES,
        )  # fmt: skip
        _store_sums(
            total, from_row, first, start, count, expert, powers, exponents, y, WIDTH, WARPS
        )
        if MORE > 0:
            _store_sums(
                other, from_row + ROWS, first, start, count, expert, powers, exponents, y, WIDTH,
                WARPS,
            )  # fmt: skip
