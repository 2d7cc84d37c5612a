"""What the programs of kernel_few.py have in common, however their experts are stored."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def address(table, expert, at: gl.constexpr, kind: gl.constexpr):
    return gl.multiple_of(gl.load(table + expert.to(gl.int64) * 9 + at).to(kind), 16)


@gluon.jit
def apart_of(table, expert, at: gl.constexpr):
    """Bytes from w1 to w3."""
    start = table + expert.to(gl.int64) * 9 + at
    return gl.multiple_of(gl.load(start + 3) - gl.load(start), 16)


@gluon.jit
def copy_weights(codes, scales, stage, step, code_at, scale_at, PER: gl.constexpr):
    LENGTH: gl.constexpr = codes.shape[2]
    WORDS: gl.constexpr = scales.shape[2]
    for nth in gl.static_range(PER):
        part, at = stage * PER + nth, step * PER + nth
        async_copy.async_copy_global_to_shared(codes.index(part), code_at + at * LENGTH)
        async_copy.async_copy_global_to_shared(scales.index(part), scale_at + at * WORDS)


@gluon.jit
def copy_rows(rows, stage, step, x_at, there, PER: gl.constexpr):
    LENGTH: gl.constexpr = rows.shape[2]
    for nth in gl.static_range(PER):
        async_copy.async_copy_global_to_shared(
            rows.index(stage * PER + nth), x_at + (step * PER + nth) * LENGTH, mask=there
        )


@gluon.jit
def tokens_of(
    order, start, count, from_row, SIZE: gl.constexpr, TOP_K: gl.constexpr, MATRICES: gl.constexpr,
    CHOSEN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows [SIZE] of the input that an expert takes from its from_row-th on, and, of a chosen one's
    w1 and w3, where their routing weights lie. w2 reads the rows from `start` on."""
    row = gl.minimum(from_row + gl.arange(0, SIZE, layout=LAYOUT), count - 1)
    if MATRICES == 1:
        row += start
    pair = row
    if MATRICES == 2 and CHOSEN:
        pair = gl.load(order + start + row)
        row = pair // TOP_K
    return row, pair
