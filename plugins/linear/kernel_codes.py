"""E2M1 codes as the left operand of a tensor core's float16 product, in Gluon.

They become E4M3 first, whose bits 2 to 4 and 7 they are at 2^−6 of their values, and float16 by the
device's own conversion: 1.4 instructions a code. Of eight codes the four even ones come first, so
that rows which meet them are kept in that order, and products are 2^−6 of what they stand for.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from plugins.device.weights import MXFP4, NVFP4

# What makes up for the operand's unit.
E2M1_UNIT = gl.constexpr(64.0)
_TWO_A_BYTE = (MXFP4.value, NVFP4.value)
# A word of eight codes as four of two float16 each.
E2M1_HALVES = gl.constexpr("""
{
.reg .b32 sign, even, odd;
.reg .b16 e0, e1, o0, o1;
shl.b32 sign, $4, 4;
shl.b32 even, $4, 2;
shr.u32 odd, $4, 2;
and.b32 even, even, 0x1C1C1C1C;
and.b32 odd, odd, 0x1C1C1C1C;
lop3.b32 even, sign, 0x80808080, even, 0xEA;
lop3.b32 odd, $4, 0x80808080, odd, 0xEA;
mov.b32 {e0, e1}, even;
mov.b32 {o0, o1}, odd;
cvt.rn.f16x2.e4m3x2 $0, e0;
cvt.rn.f16x2.e4m3x2 $1, e1;
cvt.rn.f16x2.e4m3x2 $2, o0;
cvt.rn.f16x2.e4m3x2 $3, o1;
}
""")


@gluon.constexpr_function
def two_a_byte(stored):
    return stored in _TWO_A_BYTE


@gluon.jit
def halves(words):
    """float16 [..., 4] of words [...] of four codes each, of which a thread has every two that
    make 32 bits: of those eight codes the even ones, then the odd ones, where dims [2, 4] are
    transposed."""
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        E2M1_HALVES, "=&r,=&r,=&r,=&r,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    return gl.join(gl.join(w0, w2), gl.join(w1, w3))


@gluon.jit
def evens_first(words):
    """Words [R, W] of four bytes; of every eight bytes the even ones first."""
    R: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1]
    a, b = gl.split(words.reshape([R, W // 2, 2]))
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=&r,=&r,r,r", [a, b],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.join(even, odd).reshape([R, W]), words.type.layout)
