"""Which entries a row attends to while training, and what teaches the indexer.

Selection runs without gradients, on a device in bfloat16, on groups of conversations of similar
length. The indexer learns from a sample of rows: its scores over all visible entries are pulled
towards the attention that the layers sharing the selection would pay to those entries
(Kullback-Leibler, inputs detached), as the technical report describes for the sparse stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Int32Array
from engine.config import ModelConfig

# Score elements [rows, heads, entries] held at once, 2 bytes each.
_SCORE_ELEMENTS = 1 << 30
_MAX_MEMBERS = 320
_ALIGNMENT = 8  # of the number of entries, for the matrix units


class LengthGroup(NamedTuple):
    """Conversations of similar length as a rectangle. G conversations, L their longest length."""

    rows: torch.Tensor  # [G, L] batch row, the last one repeated past the end
    inside: torch.Tensor  # [G, L] bool
    start: torch.Tensor  # [G] first batch row
    length: int


def length_groups(query_start: Int32Array, device: str) -> list[LengthGroup]:
    """Group conversations by the power of two above their length."""
    lengths = np.diff(query_start)
    bucket = np.maximum(np.ceil(np.log2(lengths)), 9).astype(int)
    groups = []
    for members in (
        bucketed[first : first + _MAX_MEMBERS]
        for bucketed in (np.flatnonzero(bucket == key) for key in np.unique(bucket))
        for first in range(0, len(bucketed), _MAX_MEMBERS)
    ):
        longest = int(lengths[members].max())
        offset = np.arange(longest)
        inside = offset < lengths[members][:, None]
        rows = query_start[:-1][members][:, None] + np.minimum(
            offset, lengths[members][:, None] - 1
        )
        groups.append(
            LengthGroup(
                torch.from_numpy(rows.astype(np.int64)).to(device),
                torch.from_numpy(inside).to(device),
                torch.from_numpy(query_start[:-1][members].astype(np.int64)).to(device),
                longest,
            )
        )
    return groups


class Candidates(NamedTuple):
    """Per length group, the blocks [G, L, blocks] that later index sources may choose from."""

    blocks: list[torch.Tensor]


@torch.no_grad()
def select_entries(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    groups: list[LengthGroup],
    config: ModelConfig,
    layer: int,
    candidates: Candidates | None,
) -> tuple[torch.Tensor, Candidates | None]:
    """Slots [T, K] of the selected entries, −1 padded; queries [T, h, dk], keys [E, dk]."""
    ratio, topk = config.ratio(layer), config.index_topk
    # The last row takes what rows past the end of a conversation select.
    num_rows = queries.shape[0]
    selected = torch.full((num_rows + 1, topk), -1, dtype=torch.int64, device=queries.device)
    publishes = layer == config.candidate_source_layer_id
    published: list[torch.Tensor] = []
    if queries.is_cuda:
        queries, head_weights = queries.bfloat16(), head_weights.bfloat16()
        keys = keys.bfloat16()
    for number, group in enumerate(groups):
        entries = -(-max(group.length // ratio, 1) // _ALIGNMENT) * _ALIGNMENT
        entry = torch.arange(entries, device=keys.device)
        slots = (group.start // ratio).unsqueeze(1) + entry
        group_keys = keys[slots.clamp(max=len(keys) - 1)]
        members, length = group.rows.shape
        tile = max(1, _SCORE_ELEMENTS // (members * config.index_n_heads * entries))
        blocks: list[torch.Tensor] = []
        for first in range(0, length, tile):
            rows = group.rows[:, first : first + tile]
            position = torch.arange(first, first + rows.shape[1], device=keys.device)
            visible = entry < ((position + 1) // ratio).unsqueeze(1)
            scores = _scores(queries[rows], head_weights[rows], group_keys)
            scores = scores.masked_fill(~visible, -torch.inf)
            if publishes:
                blocks.append(_candidate_blocks(scores, position, config))
            elif candidates is not None:
                allowed = candidates.blocks[number][:, first : first + tile]
                allowed = allowed.repeat_interleave(config.candidate_block_size, dim=-1)
                scores = scores.masked_fill(~allowed[..., :entries], -torch.inf)
            best = scores.topk(min(topk, entries), dim=-1)
            chosen = slots.unsqueeze(1).expand(-1, rows.shape[1], -1).gather(2, best.indices)
            chosen = chosen.masked_fill(best.values == -torch.inf, -1)
            target = torch.where(group.inside[:, first : first + tile], rows, num_rows)
            selected[target.flatten(), : chosen.shape[-1]] = chosen.flatten(0, 1)
        if publishes:
            published.append(torch.cat(blocks, dim=1))
    return selected[:-1], Candidates(published) if publishes else candidates


def _scores(queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [G, L, h, dk], head_weights [G, L, h], keys [G, n, dk] → [G, L, n]."""
    members, length, heads, _ = queries.shape
    products = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2)).relu_()
    products = products.view(members, length, heads, -1)
    return torch.matmul(head_weights.unsqueeze(2), products).squeeze(2)


def _candidate_blocks(
    scores: torch.Tensor, position: torch.Tensor, config: ModelConfig
) -> torch.Tensor:
    size = config.candidate_block_size
    entries = scores.shape[-1]
    blocks = -(-entries // size)
    padded = torch.nn.functional.pad(scores, (0, blocks * size - entries), value=-torch.inf)
    best = padded.view(*scores.shape[:-1], blocks, size).amax(-1)
    newest = torch.arange(blocks, device=scores.device) == (position // size).unsqueeze(1)
    best = best.masked_fill(newest, torch.inf)
    kept = min(config.candidate_topk_blocks, blocks)
    chosen = best.topk(kept, dim=-1)
    mask = torch.zeros_like(best, dtype=torch.bool)
    return mask.scatter_(-1, chosen.indices, chosen.values > -torch.inf)


class Sample(NamedTuple):
    """Rows on which the indexer is taught. n entries of the longest conversation, ratio 1."""

    rows: torch.Tensor  # [S] index into the segment's rows
    start: torch.Tensor  # [S] first batch row of the row's conversation
    positions: torch.Tensor  # [S]
    max_context: int

    def entries(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [S, n] of all entries of each row's conversation and which are visible."""
        entry = torch.arange(max(self.max_context // ratio, 1), device=self.rows.device)
        visible = entry < ((self.positions + 1) // ratio).unsqueeze(1)
        slots = (self.start // ratio).unsqueeze(1) + entry
        return torch.where(visible, slots, 0), visible


def attention_to_entries(
    q: torch.Tensor,
    main: torch.Tensor,
    sample: Sample,
    ratio: int,
    window_logits: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention mass [S, n] that sampled rows would pay to every entry, summed over heads.

    q [S, H, d] rotated; main [E, d]; window_logits [S, H, W] of the same rows, −inf where masked.
    """
    slots, visible = sample.entries(ratio)
    logits = torch.einsum("shd,snd->shn", q.bfloat16(), main.bfloat16()[slots]).float() * scale
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
    """Mean over rows of KL(target ‖ softmax of the index scores), weighted by the target's mass."""
    slots, visible = sample.entries(ratio)
    rows = keys.index_select(0, slots.flatten()).view(*slots.shape, -1)
    products = torch.einsum("shd,snd->shn", queries, rows).relu()
    scores = torch.einsum("sh,shn->sn", head_weights, products)
    log_share = scores.masked_fill(~visible, -1e30).log_softmax(-1)
    mass = target.sum(-1, keepdim=True)
    share = target / (mass + 1e-9)
    log_target = torch.log(share.clamp(min=1e-9))
    divergence = (share * (log_target - log_share)).masked_fill(~visible, 0.0).sum(-1)
    return divergence.mean()
