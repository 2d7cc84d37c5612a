"""Scores of a tile of keys from their products with queries; docs/kernels/indexer.md.

A product's heads lie in four threads of a row. Each adds up its own, of all keys and rows that it
has; then each hands half of its sums to a neighbour and keeps the other half, twice, so that every
thread ends with other keys or rows: a butterfly leaves all of them with the same.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import e4m3
from plugins.indexer.kernel_keys import exponent_scale, places, quarter

# Over four threads, $3 the number of each: of $1 in the first two of them, of $2 in the last two.
OF_TWO = tl.constexpr("""
{
.reg .b32 keep, give;
.reg .pred late;
setp.ge.s32 late, $3, 2;
selp.b32 keep, $2, $1, late;
selp.b32 give, $1, $2, late;
shfl.sync.bfly.b32 give, give, 2, 0x1f, -1;
add.f32 keep, keep, give;
shfl.sync.bfly.b32 give, keep, 1, 0x1f, -1;
add.f32 $0, keep, give;
}
""")
# Thread $5 of four has the sum of the ($5 + 1)-th operand.
OF_FOUR = tl.constexpr("""
{
.reg .b32 keep, give, keep2, give2;
.reg .pred late, odd;
setp.ge.s32 late, $5, 2;
and.b32 give, $5, 1;
setp.ne.s32 odd, give, 0;
selp.b32 keep, $3, $1, late;
selp.b32 give, $1, $3, late;
selp.b32 keep2, $4, $2, late;
selp.b32 give2, $2, $4, late;
shfl.sync.bfly.b32 give, give, 2, 0x1f, -1;
shfl.sync.bfly.b32 give2, give2, 2, 0x1f, -1;
add.f32 keep, keep, give;
add.f32 keep2, keep2, give2;
selp.b32 give, keep, keep2, odd;
selp.b32 keep, keep2, keep, odd;
shfl.sync.bfly.b32 give, give, 1, 0x1f, -1;
add.f32 $0, keep, give;
}
""")


@triton.jit
def _whole(sums, WIDEN: tl.constexpr):
    """In the interpreter every thread has the sums of all four: no shuffle will bring them."""
    if WIDEN:
        sums = tl.broadcast_to(tl.sum(sums, axis=0, keep_dims=True), sums.shape)
    return sums


@triton.jit
def _weighed(keys, query, weight, WIDEN: tl.constexpr):
    """weight · (x + |x|) of the products x [TILE, rows · HEADS]."""
    if WIDEN:
        x = tl.dot(e4m3(keys.to(tl.int32)) * 256.0, query)
    else:
        x = tl.dot(keys.to(tl.float8e4nv, bitcast=True), query)
    return (x + tl.abs(x)) * weight[None, :]


@triton.jit
def _of_two(s0, s1, WIDEN: tl.constexpr):
    """Over a row's threads, s0 in the first two and s1 in the last two."""
    thread = tl.broadcast_to(quarter(), s0.shape)
    if WIDEN:
        score = tl.where(thread < 2, s0, s1)
    else:
        score = tl.inline_asm_elementwise(
            OF_TWO, "=&r,r,r,r", [s0, s1, thread], dtype=tl.float32, is_pure=True, pack=1
        )
    return score


@triton.jit
def _of_four(s0, s1, s2, s3, WIDEN: tl.constexpr):
    """Over a row's threads, one of them in each."""
    thread = tl.broadcast_to(quarter(), s0.shape)
    if WIDEN:
        low, high = tl.where(thread == 0, s0, s1), tl.where(thread == 2, s2, s3)
        score = tl.where(thread < 2, low, high)
    else:
        score = tl.inline_asm_elementwise(
            OF_FOUR, "=&r,r,r,r,r,r", [s0, s1, s2, s3, thread], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return score


@triton.jit
def _scaled(score, exponent):
    scale = exponent_scale(exponent)
    # A poisoned key's scale is inf, and inf − inf is NaN.
    return score * scale + (scale - scale)


@triton.jit
def own_key(of_keys, BATCH: tl.constexpr, WARPS: tl.constexpr):
    """Of [4, 8, WARPS, 2, RUNS], or [1, …], what belongs to the key of each thread in few_scores:
    [4, 8, WARPS, 1, RUNS]."""
    first, second = tl.split(of_keys.permute(0, 1, 2, 4, 3))
    mine = quarter() // 2 if BATCH == 1 else quarter() % 2
    return tl.where(mine == 0, first[:, :, :, None, :], second[:, :, :, None, :])


@triton.jit
def own_places(TILE: tl.constexpr, WARPS: tl.constexpr, BATCH: tl.constexpr):
    """int32 [4, 8, WARPS, 1, RUNS]: the row of a tile that each thread has of few_scores."""
    mine = quarter() // 2 if BATCH == 1 else quarter() % 2
    return places(TILE, WARPS, 1) + 8 * mine


@triton.jit
def few_scores(
    keys, largest, query, weight, TILE: tl.constexpr, WARPS: tl.constexpr, BATCH: tl.constexpr,
    HEADS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores of one or two rows, float32 [4, 8, WARPS, 1, RUNS]. Of one: threads 0 and 1 have the
    first of a row's two keys, 2 and 3 the second; of two: thread j has row j // 2 and the key
    j % 2."""
    RUNS: tl.constexpr = TILE // (16 * WARPS)
    x = _weighed(keys, query, weight, WIDEN)
    x = x.reshape(RUNS, WARPS, 2, 8, BATCH, HEADS // 8, 4, 2).permute(6, 3, 1, 0, 4, 2, 5, 7)
    x = tl.sum(x.reshape(4, 8, WARPS, RUNS, BATCH, 2, HEADS // 4), axis=6)
    first, second = tl.split(_whole(x, WIDEN))
    if BATCH == 1:
        first = first.reshape(4, 8, WARPS, 1, RUNS)
        score = _of_two(first, second.reshape(4, 8, WARPS, 1, RUNS), WIDEN)
    else:
        s0, s2 = tl.split(first)
        s1, s3 = tl.split(second)
        score = _of_four(
            s0[:, :, :, None, :], s1[:, :, :, None, :], s2[:, :, :, None, :], s3[:, :, :, None, :],
            WIDEN,
        )  # fmt: skip
    return _scaled(score, own_key(largest, BATCH, WARPS))


@triton.jit
def four_rows_scores(
    keys, largest, query, weight, TILE: tl.constexpr, WARPS: tl.constexpr, HEADS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores of four rows, float32 [4, 8, WARPS, 2, RUNS]: a key's thread j holds row j's."""
    RUNS: tl.constexpr = TILE // (16 * WARPS)
    x = _weighed(keys, query, weight, WIDEN)
    x = x.reshape(RUNS, WARPS, 2, 8, 4, HEADS // 8, 4, 2).permute(6, 3, 1, 2, 0, 4, 5, 7)
    x = _whole(tl.sum(x.reshape(4, 8, WARPS, 2, RUNS, 4, HEADS // 4), axis=6), WIDEN)
    even, odd = tl.split(x.reshape(4, 8, WARPS, 2, RUNS, 2, 2))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return _scaled(_of_four(s0, s1, s2, s3, WIDEN), largest)
