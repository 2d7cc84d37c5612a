"""The k-th best of what a program holds, found by counting.

Scores stay float32: −0 equals +0, and NaN reaches no bound. Bounds are uint32 keys in the order of
the scores.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import order_key, ordered_value

# The key of the least finite float32.
LEAST_KEY = tl.constexpr(0x00800000)


@triton.jit
def bound_key(scores):
    """uint32 keys in the order of float32 scores; NaN counts as −inf."""
    return order_key(scores).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def bound(key):
    """The float32 score of a bound_key."""
    return ordered_value((key ^ 0x80000000).to(tl.int32, bitcast=True))


@triton.jit
def _join(least, most, count, other_least, other_most, other_count):
    return tl.minimum(least, other_least), tl.maximum(most, other_most), count + other_count


@triton.jit
def extent(scores):
    """Of float32 scores [N] without NaN: the least above −inf, the greatest, how many are above
    −inf."""
    there = scores > float("-inf")
    least = tl.where(there, scores, float("inf"))
    return tl.reduce((least, scores, there.to(tl.int32)), 0, _join)


@triton.jit
def threshold(scores, wanted, enough, low, high, reached):
    """Where the `wanted` best of float32 scores [N] end, N at most 32,768.

    low, high: keys; `reached` scores, at least `wanted`, reach low and none reaches high. Returns
    them closer, and how many reach high: until no more than `enough`, itself at least `wanted`,
    reach low, or low and high are neighbours and all between them are equal.
    """
    above, step = 0, 0
    goal = (wanted + enough).to(tl.float32) * 0.5
    while (reached > enough) & (high - low > 1):
        span = high - low
        if step < 2:
            # Where it would be if the scores lay evenly, a sixteenth to either side.
            part = (reached.to(tl.float32) - goal) / (reached - above).to(tl.float32)
            near = low + (tl.maximum(part - 0.0625, 0.0) * span.to(tl.float32)).to(tl.uint32)
            far = low + (tl.minimum(part + 0.0625, 1.0) * span.to(tl.float32)).to(tl.uint32)
            step += 1
        else:
            # Every third time thirds, for scores that lie otherwise.
            third = tl.umulhi(span, 0x55555555)
            near, far = low + third, high - third
            step = 0
        near = tl.minimum(tl.maximum(near, low + 1), high - 1)
        far = tl.minimum(tl.maximum(far, low + 1), high - 1)
        reach_near = (scores >= bound(near)).to(tl.int32)
        reach_far = (scores >= bound(far)).to(tl.int32)
        # One sum for both counts.
        both = tl.sum(reach_near + (reach_far << 16))
        many, few = both & 0xFFFF, both >> 16
        if few >= wanted:
            low, reached = far, few
        elif many >= wanted:
            low, reached, high, above = near, many, far, few
        else:
            high, above = near, many
    return low, high, reached, above


@triton.jit
def best(scores, wanted, low, high, reached, above):
    """Which of scores [N] are the `wanted` best, after `threshold` with enough = wanted; of equal
    ones the first."""
    kept = scores >= bound(low)
    if reached > wanted:
        # Not `<`: above the key of +inf bounds are NaN.
        equal = (kept & ((scores >= bound(high)) == 0)).to(tl.int32)
        kept = kept & ((equal == 0) | (tl.cumsum(equal, axis=0) <= wanted - above))
    return kept
