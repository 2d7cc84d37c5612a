"""Rows of queries for E4M3 products: packed once, in the keys' order of columns.

Queries are E2M1 values; one power of two a head brings them into E4M3, and joins the head's weight
because it is positive.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import e4m3
from plugins.indexer.kernel_keys import exponent_scale


@triton.jit
def pack_queries(
    queries, row_stride, head_stride, head_weights, weight_stride, codes, weights,
    H: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of one row: E4M3 codes uint8 [HEADS, 128], each head's largest value brought into [128, 256),
    and float32 [HEADS], its weight times what that and the keys' 2^6 left over, halved: x + |x| is
    twice max(0, x). Zeros beyond the heads."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    part, quarters, place = tl.arange(0, 8), tl.arange(0, 4), tl.arange(0, 4)
    column = part[:, None, None] * 4 + quarters[None, :, None] * 32 + place[None, None, :]
    at = queries + row * row_stride + head[:, None, None, None] * head_stride + column[None]
    query = tl.load(at, mask=(head < H)[:, None, None, None], other=0.0).to(tl.float32)
    query = query.reshape(HEADS, 128)
    bits = query.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.minimum(tl.maximum(tl.max(bits, axis=1) >> 23, 8), 253) - 7
    query *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    code = query.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes + (row * HEADS + head[:, None]) * 128 + tl.arange(0, 128)[None, :], code)
    weight = tl.load(head_weights + row * weight_stride + head, mask=head < H, other=0.0)
    weight = weight.to(tl.float32) * exponent_scale(exponent) * 0.0078125
    tl.store(weights + row * HEADS + head, weight)


@triton.jit
def load_queries(
    codes, weights, row, BATCH: tl.constexpr, HEADS: tl.constexpr, WIDEN: tl.constexpr
):
    """Packed queries [128, BATCH · HEADS] and weights of BATCH rows; there is memory for all."""
    column, place = tl.arange(0, BATCH * HEADS), tl.arange(0, 128)
    first = tl.cast(row, tl.int64) * HEADS
    at = codes + first * 128 + column[:, None] * 128 + place[None, :]
    weight = tl.load(weights + first + column)
    if WIDEN:
        query = e4m3(tl.load(at).to(tl.int32)) * 256.0
    else:
        query = tl.load(at.to(tl.pointer_type(tl.float8e4nv), bitcast=True))
    return tl.trans(query), weight


@triton.jit
def segment(request, num_visible, row, end, num_keys, SPAN: tl.constexpr):
    """The request of a row, the first row from there on that is of another, and the most and the
    fewest entries that one in between sees."""
    owner = tl.load(request + row)
    behind = row + tl.arange(0, SPAN)
    owners = tl.load(request + behind, mask=behind < end, other=-1)
    stop = tl.min(tl.where(owners == owner, end, behind), axis=0)
    seen = tl.load(num_visible + behind, mask=behind < stop, other=0)
    most = tl.minimum(tl.max(seen, axis=0), num_keys).to(tl.int32)
    fewest = tl.min(tl.where(behind < stop, seen, num_keys), axis=0).to(tl.int32)
    return owner, stop, most, fewest
