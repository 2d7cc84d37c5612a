"""Index scores by E4M3 products, for FP4 keys of 128 values; docs/kernels/indexer.md says why.

An E2M1 code becomes the E4M3 code of 2^−6 of its value by moving bits, four codes at a time.
Queries are E2M1 values too; one power of two a head brings them into E4M3, and joins the head's
weight because it is positive. The scale of a group of 32 keys multiplies the group's sum.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import e4m3, e8m0_scale
from plugins.device.rows import entry_slots, row_offsets

GROUPS = 4  # of 32 values; the kernel is written out for them
WIDTH = 32 * GROUPS
# _codes on four bytes at a time: no bit leaves its byte.
FOUR_CODES = tl.constexpr("""
{
.reg .b32 magnitude, sign;
and.b32 magnitude, $2, 0x07070707;
shl.b32 magnitude, magnitude, 2;
and.b32 sign, $2, 0x08080808;
shl.b32 sign, sign, 4;
or.b32 $0, magnitude, sign;
shr.u32 magnitude, $2, 2;
and.b32 magnitude, magnitude, 0x1C1C1C1C;
and.b32 sign, $2, 0x80808080;
or.b32 $1, magnitude, sign;
}
""")


@triton.jit
def _query_scale(
    queries, row_at, head_stride, H: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """The exponent bits, as int32 [HEADS], that bring each head's largest value into [128, 256)."""
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    at = row_at + head[:, None] * head_stride + column[None, :]
    query = tl.load(queries + at, mask=(head < H)[:, None], other=0.0).to(tl.float32)
    bits = query.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(tl.maximum(tl.max(bits, axis=1) >> 23, 8), 253) - 7


@triton.jit
def _query_group(
    queries, row_at, head_stride, exponent, GROUP: tl.constexpr,
    H: tl.constexpr, HEADS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One group of all heads in E4M3, [32, HEADS]: its even elements, then its odd ones."""
    head, place = tl.arange(0, HEADS), tl.arange(0, 32)
    column = GROUP * 32 + 2 * (place % 16) + place // 16
    at = row_at + head[:, None] * head_stride + column[None, :]
    query = tl.load(queries + at, mask=(head < H)[:, None], other=0.0).to(tl.float32)
    query *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    if not WIDEN:
        query = query.to(tl.float8e4nv)
    return tl.trans(query)


@triton.jit
def _codes(byte, WIDEN: tl.constexpr):
    """E4M3 codes of the low and of the high nibbles of bytes."""
    if WIDEN:
        low = ((byte & 0x07) << 2) | ((byte & 0x08) << 4)
        high = ((byte >> 2) & 0x1C) | (byte & 0x80)
    else:
        low, high = tl.inline_asm_elementwise(
            FOUR_CODES,
            "=&r,=r,r",
            [byte],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _add_group(products, row, there, query, GROUP: tl.constexpr, WIDEN: tl.constexpr):
    """Add one group's share to products [N, HEADS] of the keys at addresses `row` [N]."""
    place = GROUP * 16 + tl.arange(0, 16)
    byte = tl.load(row[:, None] + place[None, :], mask=there[:, None], other=0)
    low, high = _codes(byte, WIDEN)
    codes = tl.join(low, high).permute(0, 2, 1).reshape(row.shape[0], 32)
    scale_byte = tl.load(row + 64 + GROUP, mask=there, other=127).to(tl.int32)
    scale = e8m0_scale(scale_byte) * 64.0
    if WIDEN:
        share = tl.dot(e4m3(codes.to(tl.int32)) * 256.0, query)
    else:
        share = tl.dot(codes.to(tl.float8e4nv, bitcast=True), query)
    return products + share * scale[:, None]


@triton.jit
def index_scores_float8(
    queries, row_stride, head_stride, head_weights, weight_stride,
    data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    key_slots, slots_stride, PER_PAGE: tl.constexpr, num_keys, request, num_visible,
    scores, num_columns, blocks, blocks_stride, BLOCK: tl.constexpr,
    H: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """TILES · TILE columns of one row. Column j is entry j, or, with BLOCK, entry j % BLOCK of the
    block that `blocks` names at j // BLOCK."""
    row = tl.program_id(1).to(tl.int64)
    visible = tl.minimum(tl.load(num_visible + row), num_keys)
    owner = tl.load(request + row)
    row_at = row * row_stride
    exponent = _query_scale(queries, row_at, head_stride, H, HEADS, 128)
    q0 = _query_group(queries, row_at, head_stride, exponent, 0, H, HEADS, WIDEN)
    q1 = _query_group(queries, row_at, head_stride, exponent, 1, H, HEADS, WIDEN)
    q2 = _query_group(queries, row_at, head_stride, exponent, 2, H, HEADS, WIDEN)
    q3 = _query_group(queries, row_at, head_stride, exponent, 3, H, HEADS, WIDEN)
    head = tl.arange(0, HEADS)
    weight = tl.load(head_weights + row * weight_stride + head, mask=head < H, other=0.0)
    weight = weight.to(tl.float32) * (exponent << 23).to(tl.float32, bitcast=True)
    for tile in range(TILES):
        column = (tl.program_id(0) * TILES + tile) * TILE + tl.arange(0, TILE)
        if BLOCK > 0:
            block_at = blocks + row * blocks_stride + column // BLOCK
            block = tl.load(block_at, mask=column < num_columns, other=-1)
            entry = block * BLOCK + column % BLOCK
            readable = (block >= 0) & (entry < visible)
        else:
            entry = column
            readable = column < visible
        slots = entry_slots(key_slots, owner * slots_stride, entry, readable, PER_PAGE)
        there = slots >= 0
        at = data + row_offsets(tl.maximum(slots, 0), page_stride, ROWS, ROW)
        products = tl.zeros((TILE, HEADS), tl.float32)
        products = _add_group(products, at, there, q0, 0, WIDEN)
        products = _add_group(products, at, there, q1, 1, WIDEN)
        products = _add_group(products, at, there, q2, 2, WIDEN)
        products = _add_group(products, at, there, q3, 3, WIDEN)
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score = tl.sum(products * weight[None, :], axis=1)
        score = tl.where(there, score, float("-inf"))
        tl.store(scores + row * num_columns + column, score, mask=column < num_columns)
