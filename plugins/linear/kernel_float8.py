"""Few rows times a released FP8 weight by E4M3 products; docs/kernels/linear.md says why.

The weight's bytes go to the matrix units as they are, the inputs as codes and a power of two per
group of 32. Each group's sum is multiplied by both scales.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import e4m3_code, e4m3_scale, e8m0_scale, mxfp8_quotient
from plugins.device.weights import FP8_BLOCKS

INNER = 128  # columns a step: the scales of four groups are one word


@triton.jit
def pack_rows(
    x, row_stride, codes, words, K, TILE: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """E4M3 codes [T, K] of x [T, K], and the E8M0 scales of four groups of 32 a word [T, K/128].
    All codes of a group that is not finite are NaN."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (TILE // 32) + tl.arange(0, TILE // 32)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + row * row_stride + column, mask=column < K, other=0.0).to(tl.float32)
    quotient, byte = mxfp8_quotient(value, FLOAT8)
    if FLOAT8:
        code = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        sign = (quotient.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = (e4m3_code(tl.abs(quotient)) | sign).to(tl.uint8)
    code = tl.where(byte == 255, 0x7F, code)
    tl.store(codes + row * K + column, code, mask=column < K)
    WORDS: tl.constexpr = TILE // 128
    shifted = byte.reshape(WORDS, 4) << (8 * tl.arange(0, 4))[None, :]
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    tl.store(words + row * (K // 128) + word, tl.sum(shifted, axis=1), mask=word < K // 128)


@triton.jit
def _step(words, GROUP: tl.constexpr):
    """The float32 power of two of one of the four scales of int32 words."""
    byte = (words >> (8 * GROUP)) & 0xFF
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def _add_group(
    sums, x_at, weight_at, x_words, words, first, GROUP: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Add the products of 32 columns to sums [OUTPUTS, ROWS]."""
    place = first + GROUP * 32 + tl.arange(0, 32)
    x_code = tl.load(x_at[:, None] + place[None, :])
    code = tl.load(weight_at[:, None] + place[None, :])
    if FLOAT8:
        share = tl.dot(code, tl.trans(x_code))
    else:
        value = tl.trans(e4m3_scale(x_code.to(tl.int32)))
        share = tl.dot(e4m3_scale(code.to(tl.int32)), value)
    # A weight's scale may be any byte.
    step = e8m0_scale((words >> (8 * GROUP)) & 0xFF)
    return sums + share * step[:, None] * _step(x_words, GROUP)[None, :]


@triton.jit
def product_float8(
    x, x_words, codes, scale, scale_stride, STORED: tl.constexpr,
    y, num_rows, N, K, chunk, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """As _product of kernel.py, on the codes and words of pack_rows; K is a multiple of 128."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    per_group = tl.cdiv(N, OUTPUTS)
    group, part = tl.program_id(1) // per_group, tl.program_id(2)
    output = tl.program_id(1) % per_group * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_row = group * N + tl.minimum(output, N - 1)
    input_row = tl.minimum(row, num_rows - 1).to(tl.int64) * GROUPS + group
    x_at, x_words_at = x + input_row * K, x_words + input_row * (K // 128)
    weight_at = codes + weight_row.to(tl.int64) * K
    if FLOAT8:
        # Bytes that are cast once loaded would pass through registers.
        x_at = x_at.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        weight_at = weight_at.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    scale_row = weight_row // 32 if STORED == FP8_BLOCKS else weight_row
    words_at = scale.to(tl.pointer_type(tl.int32), bitcast=True)
    words_at += scale_row.to(tl.int64) * (scale_stride // 4)
    start, stop = 0, K
    if SPLIT:
        start, stop = part * chunk, tl.minimum(part * chunk + chunk, K)
    # Scales do not feed a product, so the compiler does not fetch them ahead.
    words, x_word = tl.load(words_at + start // 128), tl.load(x_words_at + start // 128)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(start, stop, 128):
        ahead = tl.minimum(first + 128, K - 128) // 128
        next_words, next_x_word = tl.load(words_at + ahead), tl.load(x_words_at + ahead)
        sums = _add_group(sums, x_at, weight_at, x_word, words, first, 0, FLOAT8)
        sums = _add_group(sums, x_at, weight_at, x_word, words, first, 1, FLOAT8)
        sums = _add_group(sums, x_at, weight_at, x_word, words, first, 2, FLOAT8)
        sums = _add_group(sums, x_at, weight_at, x_word, words, first, 3, FLOAT8)
        words, x_word = next_words, next_x_word
    at = row[:, None].to(tl.int64) * (GROUPS * N) + group * N + output[None, :]
    if SPLIT:
        at += part.to(tl.int64) * num_rows * (GROUPS * N)
    there = (row < num_rows)[:, None] & (output < N)[None, :]
    tl.store(y + at, tl.trans(sums).to(y.dtype.element_ty), mask=there)
