"""Products of FP4 expert weights by E4M3 rows on E4M3 tensor cores; docs/kernels/moe.md says why.

Within a row of a weight, a group's E2M1 codes times its power of two are E4M3 values of one power
of two for the whole row, as long as the groups' powers lie within 2^11: the eight magnitudes of a
group are a table of eight bytes that a byte permutation looks up, four codes at a time. Rows come
as codes with one power of two each (kernel_route.round_rows).
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import E2M1_UNIT, E4M3_UNIT, e2m1_pair, e4m3

# The largest magnitude 6 of the group with the largest power becomes 6 · 2^6 = 384, and 0.5 of the
# smallest one 2^−6, the smallest normal number.
TOP = tl.constexpr(6)
SPREAD = 11
# Eight codes of a word, first to last, as the negatives of their values: a nibble's sign bit makes
# the byte permutation repeat the sign of 0x40, which is 0, so it marks what is positive.
EIGHT_CODES = tl.constexpr("""
{
.reg .b32 magnitude, upper, rest, byte, mark, forty;
mov.b32 forty, 0x40404040;
and.b32 magnitude, $2, 0x77777777;
shr.u32 upper, $2, 16;
shr.u32 rest, magnitude, 16;
prmt.b32 byte, $3, $7, magnitude;
prmt.b32 mark, forty, forty, $2;
mad.lo.u32 $0, mark, 2, byte;
prmt.b32 byte, $3, $7, rest;
prmt.b32 mark, forty, forty, upper;
mad.lo.u32 $1, mark, 2, byte;
}
""")


@triton.jit
def permuted(codes):
    """Codes [N / 32, 32] of a row in the order of the row's memory [N]: within 128 columns, that in
    which a tensor core takes them from threads that hold a group of 32 weights each."""
    N: tl.constexpr = codes.shape[0] * 32
    return codes.reshape(N // 128, 4, 4, 2, 4).permute(0, 2, 3, 1, 4).reshape(N)


@triton.jit
def permuted_halves(values):
    """The same of rows in float16, for weights in NVFP4: kernel_nvfp4.py has their places."""
    N: tl.constexpr = values.shape[0] * 32
    return values.reshape(N // 128, 4, 4, 2, 2, 2).permute(0, 2, 5, 3, 1, 4).reshape(N)


@triton.jit
def loaded_row(N: tl.constexpr, WARPS: tl.constexpr):
    """Rows of the product [N] in the order in which they are loaded: so that a warp that loads
    eight rows at a time loads the sixteen that its tensor core takes from it."""
    place = tl.arange(0, N)
    lane, rest = place % 8, place // 8
    return (rest // WARPS // 2 * WARPS + rest % WARPS) * 16 + rest // WARPS % 2 * 8 + lane


@triton.jit
def _decode(byte, shift, WARPS: tl.constexpr, WIDEN: tl.constexpr):
    """The negatives of the codes in bytes [N, 64] of loaded rows as an operand [N, 128] of permuted
    columns, for exponent shifts int32 [N, 4] of their groups."""
    N: tl.constexpr = byte.shape[0]
    BLOCKS: tl.constexpr = N // (16 * WARPS)
    if WIDEN:
        even, odd = e2m1_pair(byte.to(tl.int32).reshape(N, 4, 16))
        shift = tl.minimum(tl.maximum(shift, TOP - 11), TOP)
        power = ((shift + 127) << 23).to(tl.float32, bitcast=True) * -E2M1_UNIT
        values = tl.join(even * power[:, :, None], odd * power[:, :, None])
        values = values.reshape(BLOCKS, 2, WARPS, 8, 4, 4, 2, 4)
        operand = values.permute(0, 2, 1, 3, 5, 6, 4, 7)
    else:
        low = shift * 0x08080800 + 0x3C383000
        high = shift * 0x08080808 + 0x4C484440
        low = tl.broadcast_to(low[:, :, None], (N, 4, 16)).reshape(N, 64)
        high = tl.broadcast_to(high[:, :, None], (N, 4, 16)).reshape(N, 64)
        first, last = tl.inline_asm_elementwise(
            EIGHT_CODES,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [byte, low, high],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
        values = tl.join(first, last).reshape(BLOCKS, 2, WARPS, 8, 4, 4, 4, 2)
        operand = values.permute(0, 2, 1, 3, 5, 7, 4, 6).to(tl.float8e4nv, bitcast=True)
    return operand.reshape(N, 128)


@triton.jit
def product_float8(
    codes, scales, row, codes_apart, scales_apart, top, exponent, x_codes, x_powers, x_row,
    WIDTH: tl.constexpr, WARPS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Weight rows times rows, float32 [N, ROWS].

    row int64 [N]: loaded rows of the matrix whose bytes start at codes and scales, or so many bytes
    apart [N]; top int32 [N]: the largest scale byte of each; exponent int32 [N]: the same in the
    order of the product; x_row int64 [ROWS]: rows of x_codes and x_powers.
    """
    N: tl.constexpr = exponent.shape[0]
    ROWS: tl.constexpr = x_row.shape[0]
    # Sums inside the tensor core keep 14 bits or so: no more than 256 products of them.
    PARTS: tl.constexpr = 2 if WIDTH % 256 == 0 else 1
    byte_at = codes + (codes_apart + row * (WIDTH // 2))[:, None] + tl.arange(0, 64)[None, :]
    words = scales.to(tl.pointer_type(tl.uint32), bitcast=True)
    word_at = words + scales_apart // 4 + row * (WIDTH // 128)
    x_at = x_codes + x_row[:, None] * WIDTH + tl.arange(0, 128)[None, :]
    total = tl.zeros((N, ROWS), tl.float32)
    for step in range(WIDTH // 128 // PARTS):
        part = tl.zeros((N, ROWS), tl.float32)
        for nth in tl.static_range(PARTS):
            at = step * PARTS + nth
            byte = tl.load(byte_at + at * 64)
            four = tl.load(word_at + at)
            scale = ((four[:, None] >> 8 * tl.arange(0, 4)[None, :]) & 0xFF).to(tl.int32)
            # Out of range only where all codes are 0, which is the first byte of any table.
            weight = _decode(byte, scale - top[:, None] + TOP, WARPS, WIDEN)
            x = tl.load(x_at + at * 128)
            if WIDEN:
                x = e4m3(x.to(tl.int32)) * E4M3_UNIT
            part = tl.dot(weight, tl.trans(x), part)
        total += part
    # Of 2^(exponent − 127 − TOP) in two factors, either of which is a normal number.
    half = exponent >> 1
    factor = (half << 23).to(tl.float32, bitcast=True)
    rest = ((exponent - half - TOP + 127) << 23).to(tl.float32, bitcast=True)
    return total * (-factor[:, None]) * (rest[:, None] * tl.load(x_powers + x_row)[None, :])
