"""The small float formats on a device, decoded and encoded by integer arithmetic.

No kernel needs a float8 type, so the same code runs from compute capability 8.0 on and in the
Triton language's interpreter. Values and codes are those of plugins/formats/rounding.py, bit for
bit: decoding goes through float16, whose own subnormals hold those of E2M1 and E4M3 exactly.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

# What e2m1_pair and e4m3 leave to the scale. A scale above 2^113 overflows with it.
E2M1_UNIT = tl.constexpr(16384.0)
E4M3_UNIT = tl.constexpr(256.0)


@triton.jit
def _half(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_pair(byte):
    """Low and high nibble of int32 bytes as float32 values, 2^−14 of what they stand for: the
    caller's scale makes up for it."""
    low = _half(((byte & 0x07) << 9) | ((byte & 0x08) << 12))
    high = _half(((byte & 0x70) << 5) | ((byte & 0x80) << 8))
    return low, high


@triton.jit
def _half_pair(bits):
    low = (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def e2m1_word(word):
    """The eight codes of uint32 words, first to last, as e2m1_pair gives them. Two codes of a word
    are moved at a time, which halves the work of single bytes."""
    e0, e4 = _half_pair(((word << 9) & 0x0E000E00) | ((word << 12) & 0x80008000))
    e1, e5 = _half_pair(((word << 5) & 0x0E000E00) | ((word << 8) & 0x80008000))
    e2, e6 = _half_pair(((word << 1) & 0x0E000E00) | ((word << 4) & 0x80008000))
    e3, e7 = _half_pair(((word >> 3) & 0x0E000E00) | (word & 0x80008000))
    return e0, e1, e2, e3, e4, e5, e6, e7


@triton.jit
def _fourth_bits(signs):
    """Bits 0, 8, 16 and 24 of words that have no others, in bits 3, 7, 11 and 15."""
    signs = (signs | (signs >> 4)) & 0x00110011
    return ((signs | (signs >> 8)) & 0x1111) << 3


@triton.jit
def signs_joined(word):
    """uint32 words of index keys with every sign in its code's nibble; where it is kept otherwise
    says plugins/formats/index_keys.py."""
    first = _fourth_bits((word >> 7) & 0x01010101)
    last = _fourth_bits((word >> 3) & 0x01010101) << 16
    return (word & 0x77777777) | first | last


@triton.jit
def e4m3(byte):
    """float32 values of int32 codes, 2^−8 of what they stand for. The two NaN codes read as ±480:
    in a record they occur only in groups whose scale is NaN."""
    return _half(((byte & 0x7F) << 7) | ((byte & 0x80) << 8))


@triton.jit
def e4m3_scale(byte):
    """float32 values of int32 codes, NaN codes included."""
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), e4m3(byte) * 256.0)


@triton.jit
def e8m0_scale(byte):
    """2^(byte − 127) in float32; NaN for byte 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _snap(magnitude, largest: tl.constexpr, min_exponent: tl.constexpr, mantissa: tl.constexpr):
    """The nearest representable magnitude, ties to even, saturating."""
    clipped = tl.minimum(magnitude, largest)
    exponent = tl.maximum(clipped.to(tl.int32, bitcast=True) >> 23, 127 + min_exponent)
    step = ((exponent - mantissa) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 + mantissa - exponent) << 23).to(tl.float32, bitcast=True)
    # Adding 1.5 · 2^23 leaves no room for a fraction: the sum is rounded to nearest even.
    return (clipped * inverse + 12582912.0 - 12582912.0) * step


@triton.jit
def e4m3_code(magnitude):
    """int32 code of a float32 magnitude; of NaN, any."""
    value = _snap(magnitude, 448.0, -6, 3)
    normal = (value.to(tl.int32, bitcast=True) >> 20) - 960
    return tl.maximum(normal, tl.minimum((value * 512.0).to(tl.int32), 8))


@triton.jit
def e2m1_code(magnitude):
    """int32 code of a float32 magnitude; of NaN, any."""
    value = _snap(magnitude, 6.0, 0, 1)
    normal = (value.to(tl.int32, bitcast=True) >> 22) - 252
    return tl.maximum(normal, tl.minimum((value * 2.0).to(tl.int32), 1))


@triton.jit
def ceil_scale_byte(amax_bits, limit_bits: tl.constexpr):
    """E8M0 byte of the smallest power of two s with limit · s ≥ amax, both as float32 bits; 255
    for a non-finite amax."""
    exponent = amax_bits >> 23
    above = ((amax_bits & 0x7FFFFF) > (limit_bits & 0x7FFFFF)).to(tl.int32)
    byte = exponent - (limit_bits >> 23) + above + 127
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    return tl.where(exponent == 255, 255, byte)


@triton.jit
def e8m0_inverse(byte):
    """2^(127 − byte), exact for the bytes that finite float32 groups get."""
    return ((254 - tl.minimum(byte, 253)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def mxfp8_quotient(values, FLOAT8: tl.constexpr):
    """float32 groups [..., 32] in steps of their scale, rounded to E4M3 values in float32, and
    int32 scale bytes [..., 1], with the activation's amax floor: the numbers of
    plugins/formats/mxfp8.py, but −0 may become +0. FLOAT8: by the device's own conversion."""
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.maximum(tl.max(magnitude, axis=len(values.shape) - 1, keep_dims=True), 0x38D1B717)
    byte = ceil_scale_byte(amax, 0x43E00000)  # above: 1e-4, here: 448
    quotient = values * e8m0_inverse(byte)
    if FLOAT8:
        rounded = quotient.to(tl.float8e4nv).to(tl.float32)
    else:
        exponent = quotient.to(tl.int32, bitcast=True) & 0x7F800000
        # Adding 1.5 · 2^20 times a value's power of two leaves it three bits after the first.
        anchor = tl.maximum(exponent, 121 << 23) + 0x0A400000
        anchor = anchor.to(tl.float32, bitcast=True)
        rounded = quotient + anchor - anchor
    return rounded, byte


@triton.jit
def mxfp8_round(values, FLOAT8: tl.constexpr):
    """mxfp8_quotient times its scale: NaN throughout a group that is not finite."""
    quotient, byte = mxfp8_quotient(values, FLOAT8)
    return quotient * e8m0_scale(byte)


@triton.jit
def order_key(values):
    """int32 keys in the order of float32 values; −0 and +0 are equal, NaN counts as −inf. The least
    int32 is no value's key."""
    values = tl.where(values == values, values, float("-inf"))
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_value(keys):
    """The float32 values of order_key."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
