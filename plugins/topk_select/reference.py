"""Selection of compressed entries: exact top-k and the two-level candidate blocks.

−inf marks an entry that may not be read; NaN counts as −inf.
"""

from __future__ import annotations

import torch

from plugins.registry import operator
from plugins.topk_select.schema import CANDIDATE_BLOCKS, TOPK_OF_BLOCKS, TOPK_SELECT

# Of the int64 running counts of a row tile.
_COUNT_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}


@operator(TOPK_SELECT)
def topk_select(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending indices of the k best entries above −inf of each row of `scores` [T, n].

    Returns int64 [T, min(k, n)], padded with −1 at the end where fewer than k entries qualify.
    """
    return _selected(scores, k)


@operator(TOPK_OF_BLOCKS)
def topk_of_blocks(
    scores: torch.Tensor, blocks: torch.Tensor, *, k: int, block_size: int
) -> torch.Tensor:
    """Level two: as topk_select, of the columns in each row's blocks alone.

    blocks int64 [T, B], ascending, −1 at the end, as candidate_blocks lists them. Where these are
    more than k, the result is that of topk_select: the k best columns lie in the k best blocks.
    """
    outside = ~within_blocks(blocks, scores.shape[1], block_size)
    return _selected(scores.masked_fill(outside, -torch.inf), k)


def within_blocks(blocks: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """Which of `count` columns lie in blocks int64 [T, B], where −1 is none: bool [T, count]."""
    num_blocks = -(-count // block_size)
    # One block more, which −1 names.
    named = torch.zeros(len(blocks), num_blocks + 1, dtype=torch.bool, device=blocks.device)
    named.scatter_(1, blocks.where(blocks >= 0, num_blocks), True)
    return named.repeat_interleave(block_size, dim=1)[:, :count]


@operator(CANDIDATE_BLOCKS)
def candidate_blocks(
    scores: torch.Tensor, num_visible: torch.Tensor, *, block_size: int, num_blocks: int
) -> torch.Tensor:
    """Level one: the `num_blocks` best blocks of `block_size` columns, ascending.

    A block's score is its best entry's. The block of the newest visible entry (num_visible [T],
    entries visible to the row) is always in; blocks with nothing above −inf never are. Returns
    int64 [T, min(num_blocks, ceil(n / block_size))], −1 at the end as in topk_select.
    """
    columns = scores.shape[1]
    blocks = -(-columns // block_size)
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    padded = torch.nn.functional.pad(scores, (0, blocks * block_size - columns), value=-torch.inf)
    block_scores = padded.view(scores.shape[0], blocks, block_size).amax(-1)
    # Nothing may tie with the newest block's +inf.
    block_scores = block_scores.clamp(max=torch.finfo(scores.dtype).max)
    newest = torch.div(num_visible - 1, block_size, rounding_mode="floor")
    is_newest = torch.arange(blocks, device=scores.device) == newest.unsqueeze(1)
    return _selected(block_scores.masked_fill(is_newest, torch.inf), num_blocks)


def _selected(scores: torch.Tensor, k: int) -> torch.Tensor:
    width = min(k, scores.shape[1])
    selected = torch.full((scores.shape[0], width), -1, dtype=torch.int64, device=scores.device)
    row_tile = max(1, _COUNT_BYTES[scores.device.type] // (8 * max(1, scores.shape[1])))
    for start in range(0, scores.shape[0], row_tile):
        best = _best(scores[start : start + row_tile], width)
        rows, columns = best.nonzero(as_tuple=True)
        selected[start + rows, (best.cumsum(1) - 1)[rows, columns]] = columns
    return selected


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Mask [T, n] of the k best entries above −inf; of equal entries the leftmost."""
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    # The k-th value is unique whatever order topk gives to equal entries.
    threshold = scores.topk(k, dim=1).values[:, -1:]
    above = scores > threshold
    equal = (scores == threshold) & (scores > -torch.inf)
    room = k - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= room))
