"""The draft segment: DSpark stages that propose a block of tokens from one anchor.

The stages keep only confirmed tokens in their windows: context rows made from the target's
features. A block attends to that context and to itself, in both directions, and leaves no trace,
so a rejected draft needs no roll-back here. (Technical report, section on DSpark.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.batch import DraftBatch
from engine.cache_view import CacheView
from engine.config import ModelConfig
from engine.network.attention import latent_and_window, output, queries, write_window
from engine.network.block import (
    Residual,
    SublayerOutput,
    after_attention,
    attention_input,
    embed,
    written,
)
from engine.network.rope import RopeTables
from engine.network.rows import window_keys
from engine.network.weights import AttentionWeights, DraftWeights, NetworkWeights
from plugins.elementwise import sigmoid
from plugins.formats.rows import ValueRows
from plugins.linear import linear, wide_linear
from plugins.markov import markov_choice
from plugins.mega_attention import mega_attention
from plugins.mega_mhc import hc_collapse
from plugins.norm import rms_norm


class DraftOutput(NamedTuple):
    tokens: torch.Tensor  # [R, block] greedy drafts for anchor position + 1 …
    confidence: torch.Tensor  # [R, block] P(draft k accepted | all before it accepted)


class BlockRows(NamedTuple):
    """The rows of all blocks, B per anchor, laid end to end."""

    positions: torch.Tensor  # [R·B]
    context_keys: torch.Tensor  # [R·B, W] slots of the stored context, equal within a block
    block_write: torch.Tensor  # [R·B] the row's place among the rows of all blocks
    block_keys: torch.Tensor  # [R·B, B] the places of its block's rows


class Draft:
    """The stages, numbered from num_hidden_layers on, sharing the target's embedding and head."""

    def __init__(
        self,
        config: ModelConfig,
        weights: NetworkWeights,
        draft: DraftWeights,
        rope: RopeTables,
    ) -> None:
        self._config = config
        self._embed = weights.embed
        self._head = weights.head
        self._weights = draft
        self._rope = rope

    def store_context(
        self,
        features: torch.Tensor,
        request: torch.Tensor,
        positions: torch.Tensor,
        cache: CacheView,
    ) -> None:
        """Write the stages' window rows of confirmed tokens.

        features [n, targets·D], the decoder's draft features; request, positions [n]. Tokens that
        may still be rejected must not come here.
        """
        config, weights = self._config, self._weights
        eps = config.rms_norm_eps
        g = rms_norm(linear(features, weights.main_proj), weights.main_norm, eps)
        slots = cache.window_slots(request, positions)
        for layer, stage in enumerate(weights.stages, config.num_hidden_layers):
            inv_freq, window = self._rope.of(layer), cache.window(layer)
            write_window(g, stage.attention, positions, inv_freq, window, slots, eps)

    def run(self, batch: DraftBatch, cache: CacheView) -> DraftOutput:
        """One greedy draft block per anchor; the context up to the anchor must be stored."""
        return self._decide(batch.anchors, self.hidden(batch, cache))

    def hidden(self, batch: DraftBatch, cache: CacheView) -> torch.Tensor:
        """The collapsed streams after the last stage, before the norm, [R·B, D]. Differentiable."""
        config = self._config
        block = config.dspark_block_size
        rows = self._block_rows(batch, cache)
        anchors = batch.anchors.unsqueeze(1)
        noise = torch.full_like(anchors, config.dspark_noise_token_id).expand(-1, block - 1)
        tokens = torch.cat([anchors, noise], dim=1)
        state: Residual | SublayerOutput = embed(tokens.flatten(), self._embed, config)
        for layer, stage in enumerate(self._weights.stages, config.num_hidden_layers):
            x = attention_input(state, stage, config)
            state = after_attention(
                x,
                self._attention(x.u, layer, stage.attention, rows, cache),
                stage,
                config,
                top_k=config.dspark_num_experts_per_tok,
                is_image=None,
            )
        residual = written(state)
        return hc_collapse(residual.streams, residual.pre)

    def _attention(
        self,
        u: torch.Tensor,
        layer: int,
        weights: AttentionWeights,
        rows: BlockRows,
        cache: CacheView,
    ) -> torch.Tensor:
        config, inv_freq = self._config, self._rope.of(layer)
        eps = config.rms_norm_eps
        # The block's rows take the place that compressed entries have in a backbone layer.
        nothing = torch.zeros_like(u[:, :1].expand(-1, config.head_dim))
        block = ValueRows(nothing, cache.window_layout)
        latent = latent_and_window(
            u, weights, rows.positions, inv_freq, block, rows.block_write, eps
        )
        o = mega_attention(
            queries(latent, weights, config),
            rows.positions,
            inv_freq,
            cache.window(layer),
            rows.context_keys,
            block,
            rows.block_keys,
            weights.sink,
            scale=config.softmax_scale,
        )
        return output(o, weights, config)

    def _block_rows(self, batch: DraftBatch, cache: CacheView) -> BlockRows:
        block, window = self._config.dspark_block_size, self._config.sliding_window
        device = batch.anchors.device
        offset = torch.arange(block, device=device)
        places = torch.arange(batch.anchors.shape[0] * block, device=device)
        context = window_keys(batch.positions - 1, batch.request, batch.floor, cache, window)
        return BlockRows(
            positions=(batch.positions.unsqueeze(1) + offset).flatten(),
            context_keys=context.repeat_interleave(block, dim=0),
            block_write=places,
            block_keys=places.view(-1, block).repeat_interleave(block, dim=0),
        )

    def _decide(self, anchors: torch.Tensor, hidden: torch.Tensor) -> DraftOutput:
        """Token by token: each base logit row is corrected by the token before it (Markov)."""
        weights, eps = self._weights, self._config.rms_norm_eps
        block = self._config.dspark_block_size
        base = wide_linear(rms_norm(hidden, weights.norm, eps), self._head)
        base = torch.unflatten(base, 0, (-1, block))
        markov = weights.markov_embed[anchors]
        tokens, before = [], []
        for k in range(block):
            before.append(markov)
            correction = wide_linear(markov, weights.markov_head)
            token, markov = markov_choice(base[:, k], correction, weights.markov_embed)
            tokens.append(token)
        both = torch.cat([hidden, torch.stack(before, dim=1).flatten(0, 1)], dim=-1)
        confidence = sigmoid(wide_linear(both, weights.confidence))
        return DraftOutput(torch.stack(tokens, dim=1), confidence.view(-1, block))
