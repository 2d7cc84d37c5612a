"""Index scores in the Triton language; docs/kernels/indexer.md has their floor and layout.

One program scores a run of entries for a few neighbouring rows. Keys are decoded once for all rows
of one request; every row takes the same products, [keys, dk] × [dk, heads], so its bits depend
neither on the other rows nor on how many of them a program holds.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, limits, needs_reference, padded, unit_stride
from plugins.device.rows import MXFP4_WORDS, DeviceRows, device_rows, entry_slots, load_rows
from plugins.indexer.kernel_float8 import scores_float8
from plugins.indexer.kernel_keys import WIDTH as FLOAT8_WIDTH
from plugins.indexer.kernel_keys import groups_are_aligned
from plugins.indexer.kernel_queries import index_queries as index_queries
from plugins.indexer.slots import KeySlots, pages_of
from plugins.registry import OPERATORS
from plugins.topk_select.kernel import topk_select
from plugins.topk_select.kernel_blocks import named

if TYPE_CHECKING:
    from plugins.formats.rows import RowStore

_KEY_TILE = 128
# Entries of one program: the queries are loaded once for them where a program has one row.
_RUN_TILES = 4
# Rows of one request that share decoded keys, at most.
_MAX_ROWS = 4


@triton.jit
def _load_query(
    queries, head_weights, row, row_stride, head_stride, weight_stride,
    H: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Even and odd elements [HEADS, PAIRS] and the head weights [HEADS]; zeros beyond the heads."""
    head, column = tl.arange(0, HEADS), tl.arange(0, 2 * PAIRS)
    at = row * row_stride + head[:, None] * head_stride + column[None, :]
    there = (head < H)[:, None] & (column < WIDTH)[None, :]
    query = tl.load(queries + at, mask=there, other=0.0).to(tl.float32)
    even, odd = tl.split(query.reshape(HEADS, PAIRS, 2))
    even, odd = even.to(DOT), odd.to(DOT)
    if WIDEN:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
    weight = tl.load(head_weights + row * weight_stride + head, mask=head < H, other=0.0)
    return even, odd, weight.to(tl.float32)


@triton.jit
def _load_keys(
    data, slots, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    even, odd = load_rows(data, slots, page_stride, ROWS, ROW, STORED, WIDTH, PAIRS)
    even, odd = even.to(DOT), odd.to(DOT)
    if WIDEN:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
    return even, odd


@triton.jit
def _score(key_even, key_odd, even, odd, weight):
    """Σ over heads of weight · max(0, key · query), [keys]."""
    products = tl.dot(key_even, tl.trans(even), input_precision="tf32x3")
    products = tl.dot(key_odd, tl.trans(odd), products, input_precision="tf32x3")
    # Not maximum(): that would turn the NaN of a poisoned key into 0.
    return tl.sum(tl.where(products < 0.0, 0.0, products) * weight[None, :], axis=1)


@triton.jit
def _index_scores(
    queries, row_stride, head_stride, head_weights, weight_stride,
    data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    key_slots, slots_stride, PER_PAGE: tl.constexpr, num_keys, request, num_visible,
    scores, num_rows,
    H: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, SHARING: tl.constexpr,
    DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(1).to(tl.int64) * SHARING
    first_key = tl.program_id(0) * (TILE * TILES)
    for tile in range(TILES):
        column = first_key + tile * TILE + tl.arange(0, TILE)
        held = tl.load(request + first_row) * 0 - 1
        slots = tl.full((TILE,), -1, tl.int64)
        key_even = tl.zeros((TILE, PAIRS), DOT)
        key_odd = tl.zeros((TILE, PAIRS), DOT)
        if WIDEN:
            key_even, key_odd = key_even.to(tl.float32), key_odd.to(tl.float32)
        for i in tl.static_range(SHARING):
            row = tl.minimum(first_row + i, num_rows - 1)
            visible = tl.minimum(tl.load(num_visible + row), num_keys)
            score = tl.full((TILE,), float("-inf"), tl.float32)
            if first_key + tile * TILE < visible:
                owner = tl.load(request + row)
                if owner != held:
                    slots = entry_slots(
                        key_slots, owner * slots_stride, column, column < num_keys, PER_PAGE
                    )
                    key_even, key_odd = _load_keys(
                        data, slots, page_stride, ROWS, ROW, STORED, WIDTH, PAIRS, DOT, WIDEN
                    )
                    held = owner
                even, odd, weight = _load_query(
                    queries, head_weights, row, row_stride, head_stride, weight_stride,
                    H, WIDTH, HEADS, PAIRS, DOT, WIDEN,
                )  # fmt: skip
                score = _score(key_even, key_odd, even, odd, weight)
                score = tl.where((column < visible) & (slots >= 0), score, float("-inf"))
            there = (column < num_keys) & (first_row + i < num_rows)
            tl.store(scores + row * num_keys + column, score, mask=there)


@triton.jit
def _candidate_scores(
    queries, row_stride, head_stride, head_weights, weight_stride,
    data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    key_slots, slots_stride, PER_PAGE: tl.constexpr, num_keys, request, num_visible,
    scores, num_columns, blocks, blocks_stride, BLOCK: tl.constexpr,
    H: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = column < num_columns
    block = tl.load(blocks + row * blocks_stride + column // BLOCK, mask=there, other=-1)
    visible = tl.minimum(tl.load(num_visible + row), num_keys)
    entry = block * BLOCK + column % BLOCK
    readable = (block >= 0) & (entry < visible)
    owner = tl.load(request + row)
    slots = entry_slots(key_slots, owner * slots_stride, entry, readable, PER_PAGE)
    key_even, key_odd = _load_keys(
        data, slots, page_stride, ROWS, ROW, STORED, WIDTH, PAIRS, DOT, WIDEN
    )
    even, odd, weight = _load_query(
        queries, head_weights, row, row_stride, head_stride, weight_stride,
        H, WIDTH, HEADS, PAIRS, DOT, WIDEN,
    )  # fmt: skip
    score = _score(key_even, key_odd, even, odd, weight)
    score = tl.where(slots >= 0, score, float("-inf"))
    tl.store(scores + row * num_columns + column, score, mask=there)


def _takes_float8(queries: torch.Tensor, stored: DeviceRows) -> bool:
    groups = stored.stored == MXFP4_WORDS.value and groups_are_aligned(stored)
    half = queries.dtype == torch.bfloat16 and queries.shape[2] == FLOAT8_WIDTH
    return groups and half and limits(queries.device).float8


def index_scores(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: RowStore,
    key_slots: KeySlots,
    request: torch.Tensor,
    num_visible: torch.Tensor,
) -> torch.Tensor:
    """As the reference, whose arguments and result these are.

    Products take E4M3 operands for bfloat16 queries and packed keys of 128 values: queries must
    then be rounded as keys are, as the contract says. Otherwise they take bfloat16 operands for
    bfloat16 queries and three TF32 products for float32 ones. Sums are float32. With float64, a
    gradient or an unknown record the reference runs.
    """
    stored = device_rows(keys)
    if stored is None or needs_reference(queries, head_weights):
        reference: torch.Tensor = OPERATORS["index_scores"].reference(
            queries, head_weights, keys, key_slots, request, num_visible
        )
        return reference
    num_rows, heads, width = queries.shape
    slots = pages_of(key_slots)
    requests, num_keys = slots.shape
    scores = queries.new_empty((num_rows, num_keys), dtype=torch.float32)
    if num_rows == 0 or num_keys == 0:
        return scores
    queries, head_weights = unit_stride(queries), unit_stride(head_weights)
    if _takes_float8(queries, stored):
        scores_float8(scores, queries, head_weights, stored, slots, request, num_visible)
        return scores
    first = unit_stride(slots.first)
    of_keys = first, first.stride(0), slots.rows_per_page, num_keys
    sharing = min(_MAX_ROWS, padded(-(-num_rows // max(requests, 1)), 1))
    grid = (triton.cdiv(num_keys, _KEY_TILE * _RUN_TILES), triton.cdiv(num_rows, sharing))
    _index_scores[grid](
        queries, queries.stride(0), queries.stride(1), head_weights, head_weights.stride(0),
        *stored.arguments(),
        *of_keys, request, num_visible, scores, num_rows,
        heads, width, padded(heads), padded(width // 2), _KEY_TILE, _RUN_TILES, sharing,
        tl.float32 if queries.dtype == torch.float32 else tl.bfloat16, INTERPRETED, num_warps=4,
    )  # fmt: skip
    return scores


def candidate_scores(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: RowStore,
    key_slots: KeySlots,
    request: torch.Tensor,
    num_visible: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
) -> torch.Tensor:
    """Scores of the entries of each row's candidate blocks alone, float32 [T, B · block_size].

    As index_scores, but only blocks int64 [T, B] are read and scored: entry b · block_size + i of
    block b = blocks[t, j] is column j · block_size + i; −1 is no block. The work does not depend on
    the context. Any dtype but float64, any store that kernels know; ValueError otherwise.
    """
    stored = device_rows(keys)
    if stored is None or needs_reference(queries, head_weights):
        raise ValueError(
            "expected float32 or bfloat16 queries without a gradient and keys in a record that "
            f"kernels decode, got {queries.dtype} and {type(keys).__name__}; use candidate_topk, "
            "which has a reference for all others"
        )
    num_rows, heads, width = queries.shape
    num_columns = blocks.shape[1] * block_size
    scores = queries.new_empty((num_rows, num_columns), dtype=torch.float32)
    if num_rows == 0 or num_columns == 0:
        return scores
    queries, head_weights = unit_stride(queries), unit_stride(head_weights)
    slots, blocks = pages_of(key_slots), unit_stride(blocks)
    first = unit_stride(slots.first)
    of_keys = first, first.stride(0), slots.rows_per_page, slots.count
    if _takes_float8(queries, stored):
        scores_float8(
            scores, queries, head_weights, stored, slots, request, num_visible, blocks, block_size
        )
        return scores
    _candidate_scores[(triton.cdiv(num_columns, _KEY_TILE), num_rows)](
        queries, queries.stride(0), queries.stride(1), head_weights, head_weights.stride(0),
        *stored.arguments(),
        *of_keys, request, num_visible,
        scores, num_columns, blocks, blocks.stride(0), block_size,
        heads, width, padded(heads), padded(width // 2), _KEY_TILE,
        tl.float32 if queries.dtype == torch.float32 else tl.bfloat16, INTERPRETED, num_warps=4,
    )  # fmt: skip
    return scores


def candidate_topk(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: RowStore,
    key_slots: KeySlots,
    request: torch.Tensor,
    num_visible: torch.Tensor,
    blocks: torch.Tensor,
    *,
    k: int,
    block_size: int,
) -> torch.Tensor:
    """As the reference, which runs for float64, a gradient or an unknown record. Precision and what
    a row depends on are those of index_scores."""
    if device_rows(keys) is None or needs_reference(queries, head_weights):
        reference: torch.Tensor = OPERATORS["candidate_topk"].reference(
            queries, head_weights, keys, key_slots, request, num_visible, blocks,
            k=k, block_size=block_size,
        )  # fmt: skip
        return reference
    width = min(k, pages_of(key_slots).count)
    if len(queries) == 0 or width == 0:
        return request.new_empty((len(queries), width))
    blocks = unit_stride(blocks)
    scores = candidate_scores(
        queries, head_weights, keys, key_slots, request, num_visible, blocks, block_size=block_size
    )
    return named(topk_select(scores, k), blocks, block_size, width)
