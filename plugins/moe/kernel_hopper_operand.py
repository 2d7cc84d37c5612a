"""Layouts of kernel_hopper.py and the left operand of its products, in the registers from which a
tensor core takes it: FP4 and MXFP8 codes as E4M3. kernel_nvfp4.py has NVFP4.

A thread loads 32 codes that lie side by side, and decodes what the tensor core takes from it: with
rows loaded in a permuted order, and columns of the right operand stored in one, nothing changes
threads.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from plugins.moe.kernel_float8 import EIGHT_CODES

# Here an operand of the assembly is one register, not four bytes with a register each.
_EIGHT_CODES = gl.constexpr(EIGHT_CODES.value.replace("$7", "$4"))
_TOP = gl.constexpr(6)  # as in kernel_float8.py
# Four E4M3 codes times a power of two, which $2 holds twice in float16.
SHIFTED = gl.constexpr("""
{
.reg .b16 low, high;
.reg .b32 first, last;
mov.b32 {low, high}, $1;
cvt.rn.f16x2.e4m3x2 first, low;
cvt.rn.f16x2.e4m3x2 last, high;
mul.f16x2 first, first, $2;
mul.f16x2 last, last, $2;
cvt.rn.satfinite.e4m3x2.f16x2 low, first;
cvt.rn.satfinite.e4m3x2.f16x2 high, last;
mov.b32 $0, {low, high};
}
""")


@gluon.constexpr_function
def words_layout(each, warps):
    """Words of codes [N, 4 · each]: eight rows a warp, of which four threads hold a group each."""
    return gl.BlockedLayout([1, each], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def groups(warps):
    """Groups [N, 4] of those rows, of which a thread holds one."""
    return gl.BlockedLayout([1, 1], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def sums(columns, warps, depth=32):
    """Of products that take so many columns at once: 32 bytes of them."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, depth])


@gluon.constexpr_function
def stored(each, columns, of_warps):
    """Where a tensor core leaves results [64 · each, columns], a thread's rows side by side."""
    registers = [[1 << i, 0] for i in range(each.bit_length() - 1)] + [[0, 1]]
    registers += [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [each, 0], [2 * each, 0], [4 * each, 0]]
    warps = [[8 * each << i, 0] for i in range(of_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8 * each * of_warps, columns])


@gluon.jit
def _scales(four, WARPS: gl.constexpr):
    """Bytes of words [N], int32 [N, 4]."""
    nth = gl.arange(0, 4, layout=gl.SliceLayout(0, groups(WARPS)))
    return ((gl.expand_dims(four, 1) >> (8 * gl.expand_dims(nth, 0))) & 0xFF).to(gl.int32)


@gluon.jit
def tables(four, top, WARPS: gl.constexpr):
    """The eight magnitudes of groups [N, 4], in two registers."""
    shift = _scales(four, WARPS) - gl.expand_dims(top, 1) + _TOP
    return shift * 0x08080800 + 0x3C383000, shift * 0x08080808 + 0x4C484440


@gluon.jit
def powers(four, top, WARPS: gl.constexpr):
    """Powers of two of groups [N, 4] relative to the largest of a row, each twice in float16."""
    # Out of range only where all codes are 0.
    exponent = _scales(four, WARPS) - gl.expand_dims(top, 1) + 15
    return gl.minimum(gl.maximum(exponent, 0), 15) * 0x04000400


@gluon.jit
def decoded(words, low, high):
    """The first and the last four of the eight codes of words [N, 4], int32."""
    return gl.inline_asm_elementwise(
        _EIGHT_CODES,
        "=&r,=&r,r,r,r",
        [words, low, high],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def shifted(words, power):
    """Four E4M3 codes of words [N, 4], int32, times powers, rounded."""
    return gl.inline_asm_elementwise(
        SHIFTED, "=r,r,r", [words, power], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def operand(first, last, SUMS: gl.constexpr, WARPS: gl.constexpr):
    """Those registers as the left operand [N, 32]."""
    N: gl.constexpr = first.shape[0]
    BYTES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 4], [8, 4, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    word = gl.convert_layout(gl.join(first, last).reshape([N, 4, 2, 1]), BYTES)
    word += gl.zeros([N, 4, 2, 4], gl.int32, BYTES)
    byte = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [word], dtype=gl.uint8, is_pure=True, pack=4
    )
    byte = byte.reshape([N // (16 * WARPS), 2, WARPS, 8, 4, 2, 4])
    byte = gl.permute(byte, (0, 2, 1, 3, 5, 4, 6)).reshape([N, 32])
    return gl.convert_layout(byte.to(gl.float8e4nv, bitcast=True), gl.DotOperandLayout(0, SUMS, 4))
