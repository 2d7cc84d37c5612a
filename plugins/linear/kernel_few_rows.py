"""The rows of kernel_few.py, rounded to MXFP8 and kept in shared memory."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from plugins.linear.kernel_codes import E2M1_UNIT, evens_first

# Two words of two bfloat16 values each, times $3, rounded to four E4M3 codes.
_CODES = gl.constexpr("""
{
.reg .b32 low, high;
.reg .b16 c0, c1;
shl.b32 low, $1, 16;
and.b32 high, $1, 0xFFFF0000;
mul.rn.f32 low, low, $3;
mul.rn.f32 high, high, $3;
cvt.rn.satfinite.e4m3x2.f32 c0, high, low;
shl.b32 low, $2, 16;
and.b32 high, $2, 0xFFFF0000;
mul.rn.f32 low, low, $3;
mul.rn.f32 high, high, $3;
cvt.rn.satfinite.e4m3x2.f32 c1, high, low;
mov.b32 $0, {c0, c1};
}
""")


@gluon.jit
def _largest(a, b):
    """The larger magnitudes of two words' halves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; and.b32 a, $1, 0x7FFF7FFF; and.b32 b, $2, 0x7FFF7FFF; "
        "max.u16x2 $0, a, b; }",
        "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _round(words, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """E4M3 codes, in words of four, and float32 scales [ROWS, WORDS / 16] of rows in words."""
    GROUPS: gl.constexpr = WORDS // 16
    v0, v1 = gl.split(words.reshape([ROWS, GROUPS, 4, 2, 2]))
    v0, v1 = gl.split(_largest(v0, v1))
    most = _largest(v0, v1)
    most = gl.maximum(most & 0xFFFF, (most >> 16) & 0xFFFF)
    amax = gl.maximum(gl.max(most, axis=2) << 16, 0x38D1B717)
    exponent = amax >> 23
    byte = exponent - 8 + ((amax & 0x7FFFFF) > 0x600000).to(gl.int32)
    byte = gl.where(exponent == 255, 255, byte)
    inverse = ((254 - gl.minimum(byte, 253)) << 23).to(gl.float32, bitcast=True)
    scale = gl.where(byte == 255, 0x7FC00000, byte << 23).to(gl.float32, bitcast=True)
    inverse = gl.expand_dims(inverse, 2).broadcast_to([ROWS, GROUPS, 4])
    w0, w1 = gl.split(words.reshape([ROWS, WORDS // 2, 2]))
    inverse = gl.join(inverse, inverse).reshape([ROWS, WORDS // 2])
    inverse = gl.convert_layout(inverse, w0.type.layout, assert_trivial=True)
    codes = gl.inline_asm_elementwise(
        _CODES, "=r,r,r,r", [w0, w1, inverse], dtype=gl.int32, is_pure=True, pack=1
    )
    return codes, scale


@gluon.jit
def kept_rows(
    x, x_stride, first, num_rows, ROWS: gl.constexpr, SHARES: gl.constexpr, STEPS: gl.constexpr,
    FP4: gl.constexpr,
):  # fmt: skip
    """The rows from word `first` on, rounded, in shared memory: codes [4 · STEPS, SHARES, ROWS, 32]
    and the scales of 32 of them."""
    BLOCKS: gl.constexpr = 8 if FP4 else 4
    WORDS: gl.constexpr = 16 * BLOCKS * SHARES  # of a step
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LOADED: gl.constexpr = gl.BlockedLayout(
        [1, 4], [1, 32], [1, gl.num_warps()] if ROWS == 1 else [gl.num_warps(), 1], [1, 0]
    )
    kept = gl.allocate_shared_memory(gl.int32, [STEPS, BLOCKS * SHARES, ROWS, 8], PLAIN)
    kept_scales = gl.allocate_shared_memory(gl.float32, [STEPS, BLOCKS * SHARES, ROWS], LINE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    column = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LOADED))
    x_at = x.to(gl.pointer_type(gl.int32), bitcast=True) + first
    x_at = x_at + row.to(gl.int64)[:, None] * (x_stride // 2) + column[None, :]
    is_row = (row < num_rows)[:, None]
    READ: gl.constexpr = 8 if ROWS == 1 else 2  # steps whose rows are on their way at a time
    read = ()
    for i in gl.static_range(min(STEPS, READ)):
        read += (gl.load(x_at + i * WORDS, mask=is_row, other=0),)
    for i in gl.static_range(STEPS):
        if i + READ < STEPS:
            read += (gl.load(x_at + (i + READ) * WORDS, mask=is_row, other=0),)
        rounded, of_group = _round(read[i], ROWS, WORDS)
        if FP4:
            rounded = evens_first(rounded)
            of_group = of_group * E2M1_UNIT
        rounded = rounded.reshape([ROWS, SHARES, BLOCKS, 8]).permute([2, 1, 0, 3])
        kept.index(i).store(rounded.reshape([BLOCKS * SHARES, ROWS, 8]))
        of_group = of_group.reshape([ROWS, SHARES, BLOCKS]).permute([2, 1, 0])
        kept_scales.index(i).store(of_group.reshape([BLOCKS * SHARES, ROWS]))
    values = kept._reinterpret(gl.float8e4nv, [BLOCKS * STEPS, SHARES, ROWS, 32], PLAIN)
    value_scales = kept_scales._reinterpret(gl.float32, [BLOCKS * STEPS, SHARES, ROWS], LINE)
    return values, value_scales
