"""A row rounded to MXFP8 in registers, in Gluon."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def power(byte):
    """2^(byte − 127) in float32; NaN for byte 255."""
    bits = gl.maximum(byte << 23, 0x00400000)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def rounded(value):
    """value [..., 32] as E4M3 codes, and the bytes [...] of their scales, for `power`."""
    LAST: gl.constexpr = len(value.shape) - 1
    bits = value.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    amax = gl.maximum(gl.max(bits, axis=LAST), 0x38D1B717)
    exponent = amax >> 23
    byte = exponent - 8 + ((amax & 0x7FFFFF) > 0x600000).to(gl.int32)
    byte = gl.where(exponent == 255, 255, byte)
    inverse = ((254 - gl.minimum(byte, 253)) << 23).to(gl.float32, bitcast=True)
    return (value * gl.expand_dims(inverse, LAST)).to(gl.float8e4nv), byte
