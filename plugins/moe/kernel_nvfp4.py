"""NVFP4 codes as float16 in the registers from which a tensor core takes its left operand.

A code times the scale of its sixteen has six bits at most and is a multiple of 2^-10, no more than
2688: float16 holds it exactly. Threads hold 32 columns each, as in kernel_hopper_operand.py, and
rows come in the order of kernel_float8.permuted_halves.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# E4M3 with the bits of a code in the places of its own stands for 2^-6 of it.
UNIT = gl.constexpr(64.0)
# The scales of two groups, each twice in a register. NaN stays NaN.
TWO_SCALES = gl.constexpr("""
{
.reg .b16 codes;
.reg .b32 both;
cvt.u16.u32 codes, $2;
cvt.rn.f16x2.e4m3x2 both, codes;
prmt.b32 $0, both, both, 0x1010;
prmt.b32 $1, both, both, 0x3232;
}
""")
# Codes 0 and 2, 4 and 6, 1 and 3, 5 and 7 of a word in a register, times their scale.
EIGHT_VALUES = gl.constexpr("""
{
.reg .b32 sign, code;
.reg .b16 low, high;
shl.b32 sign, $4, 4;
shl.b32 code, $4, 2;
and.b32 sign, sign, 0x80808080;
lop3.b32 code, code, 0x1C1C1C1C, sign, 0xEA;
mov.b32 {low, high}, code;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
mul.f16x2 $0, $0, $5;
mul.f16x2 $1, $1, $5;
shr.u32 code, $4, 2;
and.b32 sign, $4, 0x80808080;
lop3.b32 code, code, 0x1C1C1C1C, sign, 0xEA;
mov.b32 {low, high}, code;
cvt.rn.f16x2.e4m3x2 $2, low;
cvt.rn.f16x2.e4m3x2 $3, high;
mul.f16x2 $2, $2, $5;
mul.f16x2 $3, $3, $5;
}
""")


@gluon.jit
def two_scales(codes):
    """Scales of two groups in codes [N, 4], int32: registers for eight_values."""
    return gl.inline_asm_elementwise(
        TWO_SCALES, "=r,=r,r", [codes], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def eight_values(words, scale):
    """The codes of words [N, 4], int32, times their group's scale, in four registers."""
    return gl.inline_asm_elementwise(
        EIGHT_VALUES, "=&r,=&r,=&r,=&r,r,r", [words, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def operand(a, b, SUMS: gl.constexpr, WARPS: gl.constexpr):
    """Registers of two words [N, 4] as the left operand [N, 64]: four steps of the tensor core."""
    N: gl.constexpr = a[0].shape[0]
    VALUES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 2, 2, 2], [8, 4, 1, 1, 1, 1], [WARPS, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    one = gl.join(gl.join(a[0], a[1]), gl.join(a[2], a[3]))
    two = gl.join(gl.join(b[0], b[1]), gl.join(b[2], b[3]))
    pair = gl.convert_layout(gl.join(one, two).reshape([N, 4, 2, 2, 2, 1]), VALUES)
    pair += gl.zeros([N, 4, 2, 2, 2, 2], gl.int32, VALUES)
    value = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [pair], dtype=gl.float16, is_pure=True, pack=2
    )
    value = value.reshape([N // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2, 2])
    value = gl.permute(value, (0, 2, 1, 3, 7, 6, 5, 4, 8)).reshape([N, 64])
    return gl.convert_layout(value, gl.DotOperandLayout(0, SUMS, 2))


@gluon.jit
def operand_of_word(first, last, SUMS: gl.constexpr, WARPS: gl.constexpr):
    """Registers of a word in pairs [N, 4, 2] as the left operand [N, 32]: two steps of it."""
    N: gl.constexpr = first.shape[0]
    HALVES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 2, 2], [8, 4, 1, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    pair = gl.convert_layout(gl.join(first, last).reshape([N, 4, 2, 2, 1]), HALVES)
    pair += gl.zeros([N, 4, 2, 2, 2], gl.int32, HALVES)
    half = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [pair], dtype=gl.uint16, is_pure=True, pack=2
    )
    half = half.reshape([N // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2])
    half = gl.permute(half, (0, 2, 1, 3, 6, 5, 4, 7)).reshape([N, 32])
    return gl.convert_layout(half.to(gl.float16, bitcast=True), gl.DotOperandLayout(0, SUMS, 2))
