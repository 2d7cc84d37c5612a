"""Exact selection in the Triton language; docs/kernels/topk_select.md has its floor and layout.

One program holds up to 16,384 columns of a row in registers and finds the k-th best of them bit by
bit. Longer rows are cut into chunks: each chunk keeps its own k best, and the survivors, which lie
in the order of their columns, are cut and selected again. Nothing is approximate, and a row's
result depends on its own scores only.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, padded, unit_stride
from plugins.device.numbers import order_key
from plugins.registry import OPERATORS

_CHUNK = 16_384
# Elements of one program of the elementwise kernels.
_TILE = 1024


@triton.jit
def _select_chunk(
    scores, row_stride, columns, num_columns, kept_scores, kept_columns, out_width, k,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The k best of one chunk, in the order of their columns.

    FIRST: a column is its place in the row, otherwise `columns` names it. LAST: the columns are the
    result, otherwise they and the scores are the survivors; −1 and −inf where there are fewer.
    """
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    there = place < num_columns
    score = tl.load(scores + row * row_stride + place, mask=there, other=float("-inf"))
    score = score.to(tl.float32)
    key = order_key(score)
    # −inf marks what may not be read; its key is the least that a score can have.
    readable = tl.sum((key > -2139095041).to(tl.int32))
    wanted = tl.minimum(k, readable)
    # The largest threshold that `wanted` keys reach: the sign first, then bit by bit, until no more
    # than those reach it.
    reaching = tl.sum((key >= 0).to(tl.int32))
    threshold = tl.where(reaching >= wanted, 0, -2147483648)
    reached = tl.where(reaching >= wanted, reaching, CHUNK)
    bit = 30
    while (bit >= 0) & (reached != wanted):
        higher = threshold | (1 << bit)
        reaching = tl.sum((key >= higher).to(tl.int32))
        threshold = tl.where(reaching >= wanted, higher, threshold)
        reached = tl.where(reaching >= wanted, reaching, reached)
        bit -= 1
    above = key > threshold
    equal = (key == threshold).to(tl.int32)
    room = wanted - tl.sum(above.to(tl.int32))
    kept = above | ((equal > 0) & (tl.cumsum(equal, axis=0) <= room))
    kept = kept & (wanted > 0)
    rank = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    if FIRST:
        column = place.to(tl.int64)
    else:
        column = tl.load(columns + row * row_stride + place, mask=kept, other=0).to(tl.int64)
    out = row * out_width + chunk * k
    tl.store(kept_columns + out + rank, column, mask=kept)
    if not LAST:
        tl.store(kept_scores + out + rank, score, mask=kept)
    # The chunk's remaining places; one that is past the row has all of k to fill.
    for first in range(wanted, k, CHUNK):
        empty = first + tl.arange(0, CHUNK)
        tl.store(kept_columns + out + empty, -1, mask=empty < k)
        if not LAST:
            tl.store(kept_scores + out + empty, float("-inf"), mask=empty < k)


@triton.jit
def _block_scores(
    scores, row_stride, num_columns, num_visible, block_scores, num_blocks, largest,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each block's best score, at most `largest`; +inf for the block of the newest visible one."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    member = tl.arange(0, PADDED)
    column = block[:, None] * BLOCK + member[None, :]
    there = (column < num_columns) & (member < BLOCK)[None, :]
    score = tl.load(scores + row * row_stride + column, mask=there, other=float("-inf"))
    score = score.to(tl.float32)
    score = tl.where(score == score, score, float("-inf"))
    best = tl.minimum(tl.max(score, axis=1), largest)
    newest = tl.load(num_visible + row) - 1
    best = tl.where((newest >= 0) & (block == newest // BLOCK), float("inf"), best)
    tl.store(block_scores + row * num_blocks + block, best, mask=block < num_blocks)


@triton.jit
def _mark(blocks, num_listed, mask, num_blocks, TILE: tl.constexpr):
    """True at the listed blocks of a row whose mask is false."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.load(blocks + row * num_listed + place, mask=place < num_listed, other=-1)
    yes = tl.full((TILE,), 1, tl.uint8)
    tl.store(mask + row * num_blocks + block, yes, mask=block >= 0)


def topk_select(scores: torch.Tensor, k: int) -> torch.Tensor:
    """As the reference, which runs for float64."""
    if needs_reference(scores):
        reference: torch.Tensor = OPERATORS["topk_select"].reference(scores, k)
        return reference
    return _select(unit_stride(scores), min(k, scores.shape[1]))


def candidate_list(
    scores: torch.Tensor, num_visible: torch.Tensor, *, block_size: int, num_blocks: int
) -> torch.Tensor:
    """The blocks of candidate_blocks by name: int64 [T, min(num_blocks, blocks)], ascending, −1 at
    the end where fewer qualify. float32 or bfloat16 scores."""
    scores = unit_stride(scores)
    rows, columns = scores.shape
    blocks = triton.cdiv(columns, block_size)
    block_scores = scores.new_empty((rows, blocks), dtype=torch.float32)
    if rows and blocks:
        tile = max(1, 4096 // padded(block_size, 1))
        _block_scores[(triton.cdiv(blocks, tile), rows)](
            scores, scores.stride(0), columns, num_visible, block_scores, blocks,
            torch.finfo(scores.dtype).max, block_size, padded(block_size, 1), tile,
        )  # fmt: skip
    return _select(block_scores, min(num_blocks, blocks))


def candidate_blocks(
    scores: torch.Tensor, num_visible: torch.Tensor, *, block_size: int, num_blocks: int
) -> torch.Tensor:
    """As the reference, which runs for float64."""
    if needs_reference(scores):
        reference: torch.Tensor = OPERATORS["candidate_blocks"].reference(
            scores, num_visible, block_size=block_size, num_blocks=num_blocks
        )
        return reference
    listed = candidate_list(scores, num_visible, block_size=block_size, num_blocks=num_blocks)
    rows, blocks = scores.shape[0], triton.cdiv(scores.shape[1], block_size)
    mask = torch.zeros(rows, blocks, dtype=torch.bool, device=scores.device)
    if listed.numel():
        grid = (triton.cdiv(listed.shape[1], _TILE), rows)
        _mark[grid](listed, listed.shape[1], mask.view(torch.uint8), blocks, _TILE)
    return mask


def _select(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Columns int64 [T, k] of the k best scores of each row, ascending, −1 at the end."""
    rows, width = scores.shape
    if rows == 0 or k == 0:
        return torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    columns = scores  # a stand-in: the first round reads no names
    first = True
    while True:
        chunk = min(_CHUNK, padded(width))
        chunks = triton.cdiv(width, chunk)
        out_width = chunks * k
        # A round that keeps as many as it reads would never end.
        if chunks > 1 and out_width >= width:
            raise ValueError(
                f"expected k to be at most half of {_CHUNK}, got {k} of {width} columns; select in "
                "the reference instead"
            )
        kept = torch.empty(
            rows, out_width, dtype=torch.int64 if chunks == 1 else torch.int32, device=scores.device
        )
        kept_scores = (
            scores if chunks == 1 else scores.new_empty((rows, out_width), dtype=torch.float32)
        )
        _select_chunk[(chunks, rows)](
            scores, scores.stride(0), columns, width, kept_scores, kept, out_width, k,
            chunk, first, chunks == 1, num_warps=16 if chunk > 4096 else 4,
        )  # fmt: skip
        if chunks == 1:
            return kept
        scores, columns, width, first = kept_scores, kept, out_width, False
