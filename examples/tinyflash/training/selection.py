"""Which entries a row attends to while training, and what teaches the indexer.

Selection runs without gradients. The indexer learns from a sample of rows: its scores over all
visible entries are pulled towards the attention that the layers sharing the selection would pay to
those entries (Kullback-Leibler, inputs detached), as the technical report describes for the sparse
stage. While `index_topk` reaches over the longest conversation, nothing is scored and every row
attends to all it may see: the dense stage, in which the indexer learns before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.config import ModelConfig

_TILE_ROWS = 64


class Span(NamedTuple):
    """The entries that rows of one ratio may see: slots first, first + 1, … first + visible − 1."""

    first: torch.Tensor  # [N]
    visible: torch.Tensor  # [N]
    longest: int  # n, entries of the longest conversation


Scores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Span], torch.Tensor]
# The equivalent of `index_scores` on a CUDA device, where one is installed.
FUSED_SCORES: list[Scores] = []


def index_scores(
    queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor, span: Span
) -> torch.Tensor:
    """Scores [N, n] of every visible entry, −inf beyond; queries [N, h, dk], keys [E, dk]."""
    entry = torch.arange(span.longest, device=keys.device)
    scores = queries.new_full((len(queries), span.longest), -torch.inf)
    for first in range(0, len(queries), _TILE_ROWS):
        tile = slice(first, first + _TILE_ROWS)
        slots = span.first[tile].unsqueeze(1) + entry
        rows = keys[slots.clamp(max=len(keys) - 1)]
        products = torch.einsum("thd,tnd->thn", queries[tile], rows).relu_()
        inside = entry < span.visible[tile].unsqueeze(1)
        summed = torch.einsum("th,thn->tn", head_weights[tile], products)
        scores[tile] = summed.masked_fill(~inside, -torch.inf)
    return scores


@torch.no_grad()
def select_entries(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    span: Span,
    positions: torch.Tensor,
    config: ModelConfig,
    layer: int,
    candidates: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots [N, K] of the selected entries, −1 padded, and the blocks [N, b] bool that later index
    sources may choose from."""
    if config.index_topk >= span.longest:
        entry = torch.arange(span.longest, device=keys.device)
        inside = entry < span.visible.unsqueeze(1)
        return torch.where(inside, span.first.unsqueeze(1) + entry, -1), None
    score = FUSED_SCORES[0] if queries.is_cuda and FUSED_SCORES else index_scores
    scores = score(queries, head_weights, keys, span)
    if layer == config.candidate_source_layer_id:
        candidates = _candidate_blocks(scores, positions, config)
    elif candidates is not None:
        allowed = candidates.repeat_interleave(config.candidate_block_size, dim=-1)
        scores = scores.masked_fill(~allowed[:, : span.longest], -torch.inf)
    best = scores.topk(config.index_topk, dim=-1)
    chosen = span.first.unsqueeze(1) + best.indices
    return chosen.masked_fill(best.values == -torch.inf, -1), candidates


def _candidate_blocks(
    scores: torch.Tensor, position: torch.Tensor, config: ModelConfig
) -> torch.Tensor:
    size = config.candidate_block_size
    entries = scores.shape[-1]
    blocks = -(-entries // size)
    padded = torch.nn.functional.pad(scores, (0, blocks * size - entries), value=-torch.inf)
    best = padded.view(len(scores), blocks, size).amax(-1)
    newest = torch.arange(blocks, device=scores.device) == (position // size).unsqueeze(1)
    best = best.masked_fill(newest, torch.inf)
    chosen = best.topk(min(config.candidate_topk_blocks, blocks), dim=-1)
    mask = torch.zeros_like(best, dtype=torch.bool)
    return mask.scatter_(-1, chosen.indices, chosen.values > -torch.inf)


class Sample(NamedTuple):
    """Rows on which the indexer is taught."""

    rows: torch.Tensor  # [S] index into the segment's rows
    start: torch.Tensor  # [S] first batch row of the row's conversation
    positions: torch.Tensor  # [S]

    def visible(self, ratio: int, num_entries: int) -> torch.Tensor:
        """Which of the batch's entries [S, E] each row may see."""
        entry = torch.arange(num_entries, device=self.rows.device)
        first = (self.start // ratio).unsqueeze(1)
        behind = first + ((self.positions + 1) // ratio).unsqueeze(1)
        return (entry >= first) & (entry < behind)


def attention_to_entries(
    q: torch.Tensor,
    main: torch.Tensor,
    sample: Sample,
    ratio: int,
    window_logits: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention mass [S, E] that sampled rows would pay to every entry, summed over heads.

    q [S, H, d] rotated; main [E, d]; window_logits [S, H, W] of the same rows, −inf where masked.
    All entries of the batch meet all rows: one product costs less than gathering each row's own.
    """
    visible = sample.visible(ratio, len(main))
    logits = torch.einsum("shd,ed->she", q.bfloat16(), main.bfloat16()).float() * scale
    logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
    total = torch.logaddexp(window_logits.logsumexp(-1), sink)
    total = torch.logaddexp(total, logits.logsumexp(-1))
    return torch.exp(logits - total.unsqueeze(-1)).sum(1)


def indexer_loss(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    target: torch.Tensor,
    sample: Sample,
    ratio: int,
) -> torch.Tensor:
    """Mean over rows of KL(target ‖ softmax of the index scores), weighted by the target's mass.

    queries [S, h, dk], head_weights [S, h], keys [E, dk], target [S, E].
    """
    visible = sample.visible(ratio, len(keys))
    products = torch.einsum("shd,ed->she", queries, keys).relu()
    scores = torch.einsum("sh,she->se", head_weights, products)
    log_share = scores.masked_fill(~visible, -1e30).log_softmax(-1)
    share = target / (target.sum(-1, keepdim=True) + 1e-9)
    log_target = torch.log(share.clamp(min=1e-9))
    divergence = (share * (log_target - log_share)).masked_fill(~visible, 0.0).sum(-1)
    return divergence.mean()
