"""Rotary angles in a kernel."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def frequencies(inv_freq, WIDTH: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr):
    """float64 [PAIRS] of the pairs of a row of WIDTH elements whose last ROTATED ones turn; 0 for
    the others."""
    pair = tl.arange(0, PAIRS) - (WIDTH - ROTATED) // 2
    turns_in = (pair >= 0) & (pair < ROTATED // 2)
    return tl.load(inv_freq + pair, mask=turns_in, other=0.0)


@triton.jit
def cos_sin_of(position, frequency):
    """cos and sin in float32 of float64 frequencies.

    The product and the whole turns are float64, what remains is within ±π: at position 10⁶ a
    float32 angle is off by 0.06 rad.
    """
    turns = position.to(tl.float64) * frequency * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def cos_sin(position, inv_freq, WIDTH: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr):
    """cos and sin [PAIRS] in float32 of a row's pairs, 1 and 0 for those that do not turn."""
    return cos_sin_of(position, frequencies(inv_freq, WIDTH, ROTATED, PAIRS))


@triton.jit
def turned(
    value, cos, sin, column, WIDTH: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """value [N, 2·PAIRS] turned by cos and sin [PAIRS], in its own dtype: the same bits in every
    kernel.

    A sum of two products rounds one of them first. Left to the compiler, which one depends on the
    order in which a kernel loads its operands, so it is said here.
    """
    even, odd = tl.split(value.to(tl.float32).reshape(value.shape[0], PAIRS, 2))
    cos, sin = cos[None, :], sin[None, :]
    first, second = tl.fma(even, cos, -(odd * sin)), tl.fma(odd, cos, even * sin)
    both = tl.join(first, second).reshape(value.shape)
    # Elements that do not turn are copied: an infinity must not reach its neighbour as 0 · inf.
    return tl.where((column >= WIDTH - ROTATED)[None, :], both.to(value.dtype), value)
