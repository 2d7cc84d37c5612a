"""The product of a tile of kernel_hopper.py, by the warps that multiply."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.device.weights import MXFP8, NVFP4
from plugins.moe.kernel_hopper_operand import (
    decoded,
    groups,
    operand,
    powers,
    shifted,
    sums,
    tables,
    words_layout,
)
from plugins.moe.kernel_nvfp4 import eight_values, operand_of_word, two_scales


@gluon.jit
def _four(words, WARPS: gl.constexpr):
    """Of words [N, 16] the four of each thread, [N, 4]."""
    even, odd = gl.split(words.reshape([words.shape[0], 4, 2, 2]))
    word_0, word_2 = gl.split(even)
    word_1, word_3 = gl.split(odd)
    ONE: gl.constexpr = words_layout(1, WARPS)
    return (
        gl.convert_layout(word_0, ONE),
        gl.convert_layout(word_1, ONE),
        gl.convert_layout(word_2, ONE),
        gl.convert_layout(word_3, ONE),
    )


@gluon.jit
def _columns(rows, stage, part: gl.constexpr, ROWS: gl.constexpr):
    """The right operand [32, ROWS] of a quarter of a step."""
    if rows.dtype == gl.float16:
        x = rows.index(stage * 2 + part // 2).slice(part % 2 * 32, 32, dim=1)
    else:
        x = rows.index(stage).slice(part * 32, 32, dim=1)
    if rows.shape[1] != ROWS:
        x = x.slice(0, ROWS)
    return x.permute((1, 0))


@gluon.jit
def multiply(
    codes, scales, rows, more_rows, full, empty, top, done,
    ROWS: gl.constexpr, MORE: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    WIDE: gl.constexpr, STORED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Weight rows [N] times the first ROWS rows of a tile and MORE others, in steps of 128 columns;
    `done` steps came before."""
    N: gl.constexpr = top.shape[0]
    PAIRS: gl.constexpr = scales.shape[0]
    DEPTH: gl.constexpr = 16 if STORED == NVFP4 else 32
    SCALES: gl.constexpr = gl.SliceLayout(1, groups(WARPS))
    ONE: gl.constexpr = words_layout(1, WARPS)
    SUMS: gl.constexpr = sums(ROWS, WARPS, DEPTH)
    OTHER_SUMS: gl.constexpr = sums(MORE if MORE > 0 else ROWS, WARPS, DEPTH)
    OTHER_WEIGHT: gl.constexpr = gl.DotOperandLayout(0, OTHER_SUMS, DEPTH // 8)
    total = gl.zeros([N, ROWS], gl.float32, SUMS)
    other = total
    if MORE > 0:
        other = gl.zeros([N, MORE], gl.float32, OTHER_SUMS)
    # What the product under way reads: held until it ends, so that nothing is decoded over it.
    first = gl.zeros([N, 4], gl.int32, ONE)
    if STORED == NVFP4:
        first = gl.join(first, first)
    last = first
    for pair in range(STEPS // 2):
        for nth in gl.static_range(2):
            at = done + pair * 2 + nth
            stage = at % STAGES
            mbarrier.wait(full.index(stage), (at // STAGES) & 1)
            fence_async_shared()
            if nth == 0:
                if WIDE:
                    every = codes.index(at // 2 % PAIRS).load(words_layout(4, WARPS))
                    words, next_words = gl.split(gl.permute(every.reshape([N, 2, 16]), (0, 2, 1)))
                if STORED != NVFP4:
                    both = scales.index(at // 2 % PAIRS).load(words_layout(2, WARPS))
                    four, next_four = gl.split(both)
            else:
                if WIDE:
                    words = next_words
                if STORED != NVFP4:
                    four = next_four
            if STORED == MXFP8:
                every = codes.index(stage).load(words_layout(8, WARPS))
                words, odd = gl.split(every.reshape([N, 16, 2]))
                odd_words = _four(odd, WARPS)
            elif not WIDE:
                words = codes.index(stage).load(words_layout(4, WARPS))
            words_of = _four(words, WARPS)
            if STORED == NVFP4:
                two = scales.index(at // 2 % PAIRS).slice(nth * 4, 4, dim=1).load(groups(WARPS))
                low, high = two_scales(two.to(gl.int32))
            elif STORED == MXFP8:
                low = powers(gl.convert_layout(four, SCALES), top, WARPS)
                high = low
            else:
                low, high = tables(gl.convert_layout(four, SCALES), top, WARPS)
            low = gl.convert_layout(low, ONE)
            high = gl.convert_layout(high, ONE)
            # Eight codes of a thread at a time: 32 columns of the right operand as they are stored.
            for part in gl.static_range(4):
                if STORED == NVFP4:
                    four = eight_values(words_of[part], low if part < 2 else high)
                    new_first, new_last = gl.join(four[0], four[1]), gl.join(four[2], four[3])
                    weight = operand_of_word(new_first, new_last, SUMS, WARPS)
                else:
                    if STORED == MXFP8:
                        new_first = shifted(words_of[part], low)
                        new_last = shifted(odd_words[part], low)
                    else:
                        new_first, new_last = decoded(words_of[part], low, high)
                    weight = operand(new_first, new_last, SUMS, WARPS)
                x = _columns(rows, stage, part, ROWS)
                product = warpgroup_mma(weight, x, total, is_async=True)
                if MORE > 0:
                    weight = gl.convert_layout(weight, OTHER_WEIGHT)
                    x = _columns(more_rows, stage, part, MORE)
                    more = warpgroup_mma(weight, x, other, is_async=True)
                    total, other, _, _, first, last = warpgroup_mma_wait(
                        2, deps=[product, more, first, last, new_first, new_last]
                    )
                else:
                    total, _, _, first, last = warpgroup_mma_wait(
                        1, deps=[product, first, last, new_first, new_last]
                    )
                if part == 0:
                    # Nothing reads the stage before any more.
                    gl.thread_barrier()
                    before = (at + STAGES - 1) % STAGES
                    mbarrier.arrive(empty.index(before), count=1, pred=at > done)
    if MORE > 0:
        total, other, _, _ = warpgroup_mma_wait(0, deps=[total, other, first, last])
    else:
        total, _, _ = warpgroup_mma_wait(0, deps=[total, first, last])
        other = total
    gl.thread_barrier()
    mbarrier.arrive(empty.index((done + STEPS - 1) % STAGES), count=1)
    return total, other
