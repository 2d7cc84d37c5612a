"""Index scores of training in the Triton language: no keys gathered, heads summed on the way.

A tile of rows meets the keys from its first row's first entry to its last row's last one; each
score lands in its row's own column. Rows must come in the order of their entries.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.tinyflash.training.selection import Span

_ROWS, _KEYS, _KEYS_PER_PROGRAM = 16, 64, 512


@triton.jit
def _index_scores(
    queries, head_weights, keys, first, visible, out, num_rows, num_keys, longest,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * ROWS
    row = tile + tl.arange(0, ROWS)
    exists = row < num_rows
    begin = tl.load(first + row, mask=exists, other=1 << 40)
    count = tl.load(visible + row, mask=exists, other=0)
    lowest = tl.min(begin, axis=0)
    end = tl.max(tl.where(exists, begin + count, 0), axis=0)
    chunk = lowest + tl.program_id(1) * CHUNK
    if chunk < end:
        flat = tile * H + tl.arange(0, ROWS * H)
        d = tl.arange(0, D)
        inside = flat < num_rows * H
        q = tl.load(queries + flat[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        w = tl.load(head_weights + flat, mask=inside, other=0.0).to(tl.float32)
        for step in range(0, CHUNK, KEYS):
            key = chunk + step + tl.arange(0, KEYS)
            k = tl.load(
                keys + key[:, None] * D + d[None, :], mask=(key < num_keys)[:, None], other=0.0
            )
            products = tl.maximum(tl.dot(q, tl.trans(k)), 0.0) * w[:, None]
            scores = tl.sum(tl.reshape(products, (ROWS, H, KEYS)), axis=1)
            column = key[None, :] - begin[:, None]
            seen = (column >= 0) & (column < count[:, None])
            tl.store(out + row[:, None] * longest + column, scores, mask=seen)


def index_scores(
    queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor, span: Span
) -> torch.Tensor:
    """`selection.index_scores` with bfloat16 products on a device, float32 sums."""
    if queries.is_cuda:
        # Rounded queries and keys are exact in bfloat16.
        queries, keys = queries.bfloat16(), keys.bfloat16()
    rows, heads, width = queries.shape
    out = torch.full((rows, span.longest), -torch.inf, dtype=torch.float32, device=queries.device)
    # A tile meets two conversations at most, each with at most `longest` entries.
    chunks = triton.cdiv(2 * span.longest + _ROWS, _KEYS_PER_PROGRAM)
    _index_scores[(triton.cdiv(rows, _ROWS), chunks)](
        queries.contiguous(), head_weights.contiguous(), keys.contiguous(),
        span.first.contiguous(), span.visible.contiguous(), out, rows, len(keys), span.longest,
        heads, width, _ROWS, _KEYS, _KEYS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out
