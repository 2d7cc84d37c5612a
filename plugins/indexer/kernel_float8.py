"""Index scores by E4M3 products, for FP4 keys of 128 values; docs/kernels/indexer.md says why.

Few rows of a request keep their queries and run over keys (kernel_few.py); many rows keep a tile of
keys and run over queries (kernel_many.py). A row with candidates runs over their blocks alone
(kernel_blocks.py).
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
import triton

from plugins.device.launch import INTERPRETED, limits, padded, unit_stride
from plugins.device.rows import DeviceRows
from plugins.indexer.kernel_blocks import score_blocks
from plugins.indexer.kernel_few import score_few_rows
from plugins.indexer.kernel_many import score_many_rows
from plugins.indexer.kernel_rows import pack_queries
from plugins.indexer.slots import PagedSlots

# Few rows: up to _FEW of a request keep their queries for runs of about _RUN tiles, where it is one
# row, or _RUNS. Many: up to _MANY share a tile.
_FEW, _FEW_TILE, _RUN, _RUNS = 6, 64, 48, 96
_MANY, _MANY_TILE, _STAGES = 456, 128, 4
_WARPS = 4


def _run_of_candidates(tiles: int, multiprocessors: int) -> int:
    """Tiles of one program: at most eight, fewer where a multiprocessor would have less than four
    programs."""
    return min(8, -(-tiles // (4 * multiprocessors)))


def scores_float8(
    scores: torch.Tensor,
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    stored: DeviceRows,
    slots: PagedSlots,
    request: torch.Tensor,
    num_visible: torch.Tensor,
    blocks: torch.Tensor | None = None,
    block_size: int = 0,
) -> None:
    """Write scores float32 [T, n], or [T, B · block_size] of the blocks int64 [T, B] alone.

    Neither T nor the number of columns is 0. How many rows are taken to belong to one request is
    T / R, rounded up: where it is another number, keys are decoded more often than needed.
    """
    num_rows, heads, _ = queries.shape
    padded_heads = padded(heads)
    num_columns = scores.shape[1]
    # Whole batches are read, of the last row's request too.
    there = num_rows + _FEW - 1
    codes = queries.new_empty((there, padded_heads, 128), dtype=torch.uint8)
    weights = queries.new_empty((there, padded_heads), dtype=torch.float32)
    # The next kernel may start, and load keys, before this one has ended.
    early = not INTERPRETED and limits(queries.device).early
    options: dict[str, bool | int] = {"launch_pdl": True} if early else {}
    pack_queries[(num_rows,)](
        queries, queries.stride(0), queries.stride(1), head_weights, head_weights.stride(0),
        codes, weights, heads, padded_heads, early, num_warps=_WARPS,
    )  # fmt: skip
    first = unit_stride(slots.first)
    per_page = slots.rows_per_page
    of_keys = (
        *stored.arguments(), first, first.stride(0), per_page, slots.count,
        request, num_visible,
    )  # fmt: skip
    device = limits(queries.device)
    of_row = triton.cdiv(num_columns, _FEW_TILE)
    if blocks is not None:
        run = _run_of_candidates(num_rows * of_row, device.multiprocessors)
        if device.warp_groups and run > 1:
            options["maxnreg"] = 72
        blocks = unit_stride(blocks)
        score_blocks[(triton.cdiv(of_row, run), num_rows)](
            codes, weights, *of_keys, scores, num_columns, run, blocks, blocks.stride(0),
            block_size, padded_heads, _FEW_TILE, _WARPS, INTERPRETED, early, run == 1,
            num_warps=_WARPS, **options,
        )  # fmt: skip
        return
    each = -(-num_rows // max(slots.shape[0], 1))
    if each > 2 * _FEW:
        sharing = min(_MANY, padded(each))
        score_many_rows[(triton.cdiv(num_columns, _MANY_TILE), triton.cdiv(num_rows, sharing))](
            codes, weights, *of_keys, scores, num_rows, sharing, padded(sharing), padded_heads,
            _MANY_TILE, _WARPS, _STAGES, INTERPRETED, early, num_warps=_WARPS, **options,
        )  # fmt: skip
        return
    sharing = -(-each // -(-each // _FEW))
    groups = triton.cdiv(num_rows, sharing)
    tiles = groups * of_row
    registers = 168 if sharing > 1 else 72
    if not INTERPRETED:
        options["maxnreg"] = registers
    # Whole waves of as many programs as these registers allow at once.
    at_once = 512 // registers * device.multiprocessors
    run = _RUN if sharing == 1 else _RUNS
    programs = triton.cdiv(tiles, at_once * run) * at_once
    in_page = stored.rows_per_page % per_page == 0 and per_page % (2 * _FEW_TILE) == 0
    score_few_rows[(min(tiles, programs),)](
        codes, weights, *of_keys, scores, num_columns, num_rows, groups,
        sharing, padded(sharing, 1), min(sharing, 2), padded_heads, _FEW_TILE, _WARPS, INTERPRETED,
        early, sharing == 1 and in_page and tiles >= 2 * programs, num_warps=_WARPS, **options,
    )  # fmt: skip
