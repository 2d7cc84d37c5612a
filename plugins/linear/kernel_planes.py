"""Packed weights times bfloat16 rows; docs/kernels/linear.md says why in this way.

A word of a weight holds codes of neighbouring columns. Taken apart in registers they make two
bfloat16 operands: of the even and the odd columns (E4M3), or of the first and the last two of four
(E2M1). So the input rows are kept as such planes too, and a product over a row is the sum of
theirs.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import E2M1_UNIT, E4M3_UNIT, e2m1_pair, e4m3, e4m3_scale, mxfp8_round
from plugins.device.overlap import after_previous
from plugins.device.weights import FP8_BLOCKS, NVFP4
from plugins.linear.kernel_codes import two_a_byte

# The two codes of both halves of a word, as bfloat16 times their scale. A code's bits at the right
# place are 2^−120 of its value, subnormals included; one product makes up for that, a second one
# scales: together they could overflow.
E4M3_PLANES = tl.constexpr("""
{
.reg .b32 low, high, sign, unit, none;
mov.b32 unit, 0x7B807B80;
mov.b32 none, 0x80008000;
shl.b32 low, $2, 4;
and.b32 low, low, 0x07F007F0;
shl.b32 sign, $2, 8;
lop3.b32 low, sign, none, low, 0xEA;
shr.u32 high, $2, 4;
and.b32 high, high, 0x07F007F0;
lop3.b32 high, $2, none, high, 0xEA;
fma.rn.bf16x2 low, low, unit, none;
fma.rn.bf16x2 $0, low, $3, none;
fma.rn.bf16x2 high, high, unit, none;
fma.rn.bf16x2 $1, high, $3, none;
}
""")
# The same for four codes each, whose bits are 2^−126 of their values.
E2M1_PLANES = tl.constexpr("""
{
.reg .b32 code, sign, unit, none;
mov.b32 unit, 0x7E807E80;
mov.b32 none, 0x80008000;
shl.b32 code, $4, 6;
and.b32 code, code, 0x01C001C0;
shl.b32 sign, $4, 12;
lop3.b32 code, sign, none, code, 0xEA;
fma.rn.bf16x2 code, code, unit, none;
fma.rn.bf16x2 $0, code, $5, none;
shl.b32 code, $4, 2;
and.b32 code, code, 0x01C001C0;
shl.b32 sign, $4, 8;
lop3.b32 code, sign, none, code, 0xEA;
fma.rn.bf16x2 code, code, unit, none;
fma.rn.bf16x2 $1, code, $5, none;
shr.u32 code, $4, 2;
and.b32 code, code, 0x01C001C0;
shl.b32 sign, $4, 4;
lop3.b32 code, sign, none, code, 0xEA;
fma.rn.bf16x2 code, code, unit, none;
fma.rn.bf16x2 $2, code, $5, none;
shr.u32 code, $4, 6;
and.b32 code, code, 0x01C001C0;
lop3.b32 code, $4, none, code, 0xEA;
fma.rn.bf16x2 code, code, unit, none;
fma.rn.bf16x2 $3, code, $5, none;
}
""")


@triton.jit
def spread_rows(
    x, row_stride, planes, plane_stride, K, TILE: tl.constexpr, FP4: tl.constexpr,
    ROUND: tl.constexpr, FLOAT8: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Planes [2, T, K / 2] of x [T, K]: its even and its odd columns, or with FP4, of every four
    columns two; eight of the one and eight of the other of these two in turn, as `_beside` has
    them. ROUND: rounded to MXFP8 first."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    column = first + tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + row * row_stride + column, mask=column < K, other=0.0)
    if ROUND:
        value = mxfp8_round(value.to(tl.float32), FLOAT8).to(planes.dtype.element_ty)
    WIDTH: tl.constexpr = TILE // 2
    place = first // 2 + tl.arange(0, WIDTH)
    at, there = planes + row * (K // 2) + place, place < K // 2
    if FP4:
        value = value.reshape(TILE // 32, 8, 2, 2).permute(0, 3, 1, 2)
    one, other = tl.split(value.reshape(WIDTH, 2))
    tl.store(at, one, mask=there)
    tl.store(at + plane_stride, other, mask=there)


@triton.jit
def _steps(words, first, STORED: tl.constexpr, GROUPS: tl.constexpr):
    """bfloat16 scales [N, GROUPS] from int32 words [N, max(GROUPS / 4, 1)] that hold them; of half
    a word those from byte `first` on."""
    if GROUPS == 2:
        byte = tl.join((words >> (8 * first)) & 0xFF, (words >> (8 * first + 8)) & 0xFF)
    else:
        b0, b1 = words & 0xFF, (words >> 8) & 0xFF
        b2, b3 = (words >> 16) & 0xFF, (words >> 24) & 0xFF
        byte = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    byte = byte.reshape(words.shape[0], GROUPS)
    if STORED == NVFP4:
        return e4m3_scale(byte).to(tl.bfloat16)
    bits = tl.maximum(byte << 7, 0x40) | (((byte + 1) >> 2) & 0x40)  # 2^−127 and NaN
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _plane(word, PLANE: tl.constexpr, FP4: tl.constexpr):
    """float32 values of one code of every int32 word: what the assembly does, where none runs."""
    if FP4:
        value, _ = e2m1_pair((word >> (4 * PLANE)) & 0xFF)
        value *= E2M1_UNIT
    else:
        value = e4m3((word >> (8 * PLANE)) & 0xFF) * E4M3_UNIT
    return value


@triton.jit
def _beside(a, b):
    """[N, 2 W] of two [N, W], eight columns of either in turn: no value changes its thread."""
    N: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    return tl.join(a, b).reshape(N, W // 8, 8, 2).permute(0, 1, 3, 2).reshape(N, 2 * W)


@triton.jit
def _rows(at, there):
    return tl.load(at, mask=there, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "groups"])
def product_planes(
    x, plane_stride, row_stride,
    codes, scale, scale_stride, global_scale, STORED: tl.constexpr,
    y, num_rows, N, K, chunk, groups, SPLIT: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As _product of kernel.py, on the planes of spread_rows; K and `chunk` are multiples of INNER.
    A global scale multiplies the sums."""
    FP4: tl.constexpr = two_a_byte(STORED)
    PER: tl.constexpr = 4 if FP4 else 2  # columns of a word of 16 bits
    WIDTH: tl.constexpr = INNER // PER  # words of 16 bits a step
    GROUP: tl.constexpr = 16 if STORED == NVFP4 else 32
    SCALES: tl.constexpr = INNER // GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    per_group = tl.cdiv(N, OUTPUTS)
    group, part = tl.program_id(1) // per_group, tl.program_id(2)
    output = tl.program_id(1) % per_group * OUTPUTS + tl.arange(0, OUTPUTS)
    # Outputs beyond the last one repeat it and are not stored. Rows are not even read: if many
    # programs copied the same one again and again, all would wait for a few lines of the cache.
    weight_row = group * N + tl.minimum(output, N - 1)
    inner = tl.arange(0, WIDTH)
    half = tl.arange(0, INNER // 2)
    is_row = (row < num_rows)[:, None]
    x_at = x + group * (K // 2) + row[:, None].to(tl.int64) * row_stride + half[None, :]
    weight_at = codes.to(tl.pointer_type(tl.uint16), bitcast=True)
    weight_at += weight_row[:, None].to(tl.int64) * (K // PER) + inner[None, :]
    scale_row = weight_row // 32 if STORED == FP8_BLOCKS else weight_row
    words_at = scale.to(tl.pointer_type(tl.int32), bitcast=True)
    words_at += scale_row[:, None].to(tl.int64) * (scale_stride // 4)
    words_at += tl.arange(0, max(SCALES // 4, 1))[None, :]
    start, steps = 0, K // INNER
    if SPLIT:
        start = part * chunk
        steps = tl.minimum(chunk, K - start) // INNER
    # Products of a loop that may be skipped are not started ahead of each other.
    tl.assume(steps > 0)
    products = tl.zeros((OUTPUTS, ROWS), tl.float32)
    after_previous(OVERLAP)
    for i in range(steps):
        first = start + i * INNER
        word = tl.load(weight_at + first // PER)
        words = tl.load(words_at + first // (4 * GROUP))
        step = _steps(words, first // GROUP % 4, STORED, SCALES)
        step = tl.broadcast_to(step[:, :, None], (OUTPUTS, SCALES, GROUP // PER))
        step = step.reshape(OUTPUTS, WIDTH)
        now = x_at + first // 2
        if WIDEN:
            for plane in tl.static_range(2):
                if FP4:
                    weight = _beside(
                        _plane(word.to(tl.int32), 2 * plane, FP4) * step.to(tl.float32),
                        _plane(word.to(tl.int32), 2 * plane + 1, FP4) * step.to(tl.float32),
                    )
                else:
                    weight = _plane(word.to(tl.int32), plane, FP4) * step.to(tl.float32)
                value = _rows(now + plane * plane_stride, is_row).to(tl.float32)
                products = tl.dot(weight, tl.trans(value), products)
        elif FP4:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                E2M1_PLANES,
                "=&r,=&r,=&r,=&r,r,r",
                [word, step],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
            first_two, last_two = _beside(w0, w1), _beside(w2, w3)
            products = tl.dot(first_two, tl.trans(_rows(now, is_row)), products)
            products = tl.dot(last_two, tl.trans(_rows(now + plane_stride, is_row)), products)
        else:
            even, odd = tl.inline_asm_elementwise(
                E4M3_PLANES,
                "=&r,=&r,r,r",
                [word, step],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
            products = tl.dot(even, tl.trans(_rows(now, is_row)), products)
            products = tl.dot(odd, tl.trans(_rows(now + plane_stride, is_row)), products)
    if STORED == NVFP4:
        products *= tl.load(global_scale)
    at = row[:, None].to(tl.int64) * (groups * N) + group * N + output[None, :]
    if SPLIT:
        at += part.to(tl.int64) * num_rows * (groups * N)
    tl.store(y + at, tl.trans(products).to(y.dtype.element_ty), mask=is_row & (output < N)[None, :])
