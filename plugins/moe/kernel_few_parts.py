"""What the programs of chosen and of shared experts in kernel_few.py have in common."""

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
    for nth in gl.static_range(PER):
        async_copy.async_copy_global_to_shared(
            rows.index(stage * PER + nth), x_at + (step * PER + nth) * 128, mask=there
        )
