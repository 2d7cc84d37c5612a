"""What makes index queries of projections: rotation, rounding, and the weights' scale."""

from __future__ import annotations

import torch

from plugins.formats.records import RecordLayout
from plugins.indexer.reference import round_queries
from plugins.registry import runs_kernels
from plugins.rope import apply_rope


def index_queries(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    layout: RecordLayout | None,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first operands of index_scores: queries [T, h, dk] rotated by positions [T] and rounded
    as keys of `layout` are (None: not at all), and head_weights [T, h] times `scale`. inv_freq as
    in apply_rope."""
    run = query_pieces
    if runs_kernels(queries) and not torch.compiler.is_exporting():
        from plugins.indexer import kernel_queries

        run = kernel_queries.index_queries
    return run(queries, head_weights, positions, inv_freq, layout, scale=scale)


def query_pieces(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    layout: RecordLayout | None,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """index_queries, operator by operator."""
    queries = apply_rope(queries, positions, inv_freq)
    if layout is not None:
        queries = round_queries(queries, layout)
    return queries, head_weights * scale
