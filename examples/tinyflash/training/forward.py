"""The backbone over whole conversations, with what training needs on the way.

The same operators and building blocks as `engine.network`, in the same order; three things differ.
Entries are made for all pairs at once, because every conversation starts at position 0 and has even
length. Selection is done per length group without gradients. Router counts, the indexer's loss and
the drafter's features are collected as they pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from engine.config import ModelConfig
from engine.network.attention import output, queries
from engine.network.block import Residual, collapse, embed
from engine.network.engram import inject
from engine.network.rope import RopeTables
from engine.network.rows import SegmentRows
from engine.network.weights import (
    AttentionWeights,
    CompressorWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    NetworkWeights,
)
from examples.tinyflash.tokenizer import PAD_ID
from examples.tinyflash.training.batch import TrainingBatch
from examples.tinyflash.training.rows import TrainingCache, round_rows
from examples.tinyflash.training.selection import (
    Sample,
    Span,
    attention_to_entries,
    indexer_loss,
    select_entries,
)
from plugins.compressor import pool_pairs
from plugins.engram import engram_lookup
from plugins.linear import linear
from plugins.mega_attention import mega_attention
from plugins.mega_gate import mega_gate
from plugins.mega_mhc import HcMix, hc_expand, hc_mix
from plugins.moe import moe
from plugins.norm import rms_norm
from plugins.rope import apply_rope


class Scored(NamedTuple):
    """The sampled rows' index inputs of one source, kept until its layers' attention is summed."""

    layer: int
    queries: torch.Tensor  # [S, h, dk]
    head_weights: torch.Tensor  # [S, h]


class Selected(NamedTuple):
    """The selection that the layers above an index source reuse."""

    slots: torch.Tensor | None  # [T, K]
    candidates: torch.Tensor | None  # [T, blocks] bool


@dataclass
class Collected:
    """What one forward leaves besides the hidden rows."""

    expert_counts: dict[int, torch.Tensor] = field(default_factory=dict)  # layer → [E]
    indexer_losses: list[torch.Tensor] = field(default_factory=list)
    draft_features: list[torch.Tensor] = field(default_factory=list)


class BackboneForward:
    """One forward of a ragged batch of whole conversations, each of even length."""

    def __init__(
        self,
        config: ModelConfig,
        weights: NetworkWeights,
        rope: RopeTables,
        data: TrainingBatch,
        *,
        draft_features: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.rope = rope
        self.batch = data.ragged
        self.collected = Collected()
        self.cache = TrainingCache(config, data.ragged, weights.embed.dtype)
        self._data = data
        self._wants_features = draft_features
        self._scored: Scored | None = None
        self._target: torch.Tensor | None = None
        self._candidate: tuple[Scored, torch.Tensor] | None = None

    def run(self) -> torch.Tensor:
        """Hidden rows [Td, D] of the decoder rows, before the head."""
        config, batch = self.config, self.batch
        rows = self._replayed(SegmentRows.of_encoder(batch, self.cache, config))
        residual = embed(batch.tokens, self.weights.embed, config)
        kept = torch.arange(batch.num_rows, device=batch.tokens.device)
        residual = self._segment(
            range(config.decoder_start), residual, rows, kept, self._data.encoder_sample
        )
        layer = config.decoder_start
        self._compress(layer, collapse(residual, self.weights.layers[layer].attn_norm, config))
        rows = self._replayed(SegmentRows.of_decoder(batch, self.cache, config))
        kept = batch.decoder_rows
        residual = Residual(
            residual.streams.index_select(0, kept), residual.pre.index_select(0, kept)
        )
        residual = self._segment(
            range(layer, config.num_hidden_layers), residual, rows, kept, self._data.decoder_sample
        )
        return collapse(residual, self.weights.norm, config)

    def _replayed(self, rows: SegmentRows) -> SegmentRows:
        """No window of a row behind its conversation's replay start reaches before it."""
        start = self._data.replay_start[rows.request]
        first = self.batch.query_start[rows.request] + start
        floor = torch.where(rows.positions >= start, first, 0).unsqueeze(1)
        keys = torch.where(rows.window_keys >= floor, rows.window_keys, -1)
        return replace(rows, window_keys=keys)

    def _segment(
        self,
        layers: range,
        residual: Residual,
        rows: SegmentRows,
        kept: torch.Tensor,
        sampled: torch.Tensor,
    ) -> Residual:
        config = self.config
        sample = Sample(
            sampled,
            self.batch.query_start[rows.request[sampled]],
            rows.positions[sampled],
        )
        counted = self.batch.tokens[kept] != PAD_ID
        selection = Selected(None, None)
        for layer in layers:
            weights = self.weights.layers[layer]
            if self._wants_features and layer in config.dspark_target_layer_ids:
                self.collected.draft_features.append(residual.streams.mean(1).detach())
            if weights.engram is not None:
                engram, eps = weights.engram, config.rms_norm_eps
                memory = engram_lookup(
                    engram.table, self._data.engram_rows[layer], residual.streams.dtype
                )
                streams = inject(residual.streams, memory, engram, None, eps)
                residual = Residual(streams, residual.pre)
            u = collapse(residual, weights.attn_norm, config)
            if weights.attention.compressor is not None and layer < config.decoder_start:
                self._compress(layer, u)
            wq_a, q_norm = weights.attention.wq_a, weights.attention.q_norm
            latent = rms_norm(linear(u, wq_a), q_norm, config.rms_norm_eps)
            if weights.attention.indexer is not None:
                self._teach(sample)
                selection = self._select(
                    layer, u.detach(), latent.detach(), weights.attention.indexer,
                    rows, sample, selection.candidates,
                )  # fmt: skip
            y = self._attention(layer, u, latent, weights.attention, rows, sample, selection.slots)
            residual = self._after_attention(layer, residual, y, weights, counted)
        self._teach(sample)
        if self._candidate is not None:
            self._add_loss(*self._candidate, sample)
            self._candidate = None
        return residual

    def _compress(self, layer: int, u: torch.Tensor) -> None:
        """All entries of a source at once; the index keys learn from the indexer's loss alone."""
        weights = self.weights.layers[layer].attention.compressor
        assert weights is not None, "only KV sources compress"
        ratio, inv_freq = self.config.ratio(layer), self.rope.of(layer)
        eps = self.config.rms_norm_eps
        latent = rms_norm(_latent(u, weights), weights.norm, eps)
        positions = self.batch.positions[::ratio]
        every = torch.arange(len(latent), device=u.device)
        self.cache.main(layer).write(every, apply_rope(latent, positions, inv_freq))
        keys = rms_norm(linear(latent.detach(), weights.index_wk), weights.index_norm, eps)
        self.cache.index(layer).write(every, apply_rope(keys, positions, inv_freq))

    def _select(
        self,
        layer: int,
        u: torch.Tensor,
        latent: torch.Tensor,
        weights: IndexerWeights,
        rows: SegmentRows,
        sample: Sample,
        candidates: torch.Tensor | None,
    ) -> Selected:
        """The selection of an index source; its sampled rows wait for their target."""
        picked = sample.rows
        self._scored = Scored(
            layer,
            *self._index_queries(u[picked], latent[picked], sample.positions, layer, weights),
        )
        with torch.no_grad():
            queries, head_weights = self._index_queries(u, latent, rows.positions, layer, weights)
        ratio = self.config.ratio(layer)
        span = Span(
            self.batch.query_start[rows.request] // ratio,
            ((rows.positions + 1) // ratio).clamp(max=self.batch.max_context // ratio),
            max(self.batch.max_context // ratio, 1),
        )
        keys = self.cache.index(self._source(layer)).values
        slots, candidates = select_entries(
            queries, head_weights, keys, span, rows.positions, self.config, layer, candidates
        )
        return Selected(slots, candidates)

    def _source(self, layer: int) -> int:
        source = self.config.kv_source(layer)
        assert source is not None, "a layer that selects has a KV source"
        return source

    def _index_queries(
        self,
        u: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        layer: int,
        weights: IndexerWeights,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        q = torch.unflatten(linear(latent, weights.wq_b), -1, (heads, width))
        q = apply_rope(q, positions, self.rope.of(layer))
        if self.cache.index_layout is not None:
            q = round_rows(self.cache.index_layout, q)
        return q, linear(u, weights.weights_proj) * (width**-0.5 * heads**-0.5)

    def _attention(
        self,
        layer: int,
        u: torch.Tensor,
        latent: torch.Tensor,
        weights: AttentionWeights,
        rows: SegmentRows,
        sample: Sample,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:
        config, inv_freq = self.config, self.rope.of(layer)
        window = self.cache.window(layer)
        row = rms_norm(linear(u, weights.wkv), weights.kv_norm, config.rms_norm_eps)
        window.write(rows.window_write, apply_rope(row, rows.positions, inv_freq))
        q = queries(latent, weights, config)
        source = config.kv_source(layer)
        if source is not None:
            self._attend_sample(layer, source, q, rows, sample, weights.sink)
        o = mega_attention(
            q,
            rows.positions,
            inv_freq,
            window,
            rows.window_keys,
            None if source is None else self.cache.main(source),
            None if source is None else slots,
            weights.sink,
            scale=config.softmax_scale,
        )
        return output(o, weights, config)

    @torch.no_grad()
    def _attend_sample(
        self,
        layer: int,
        source: int,
        q: torch.Tensor,
        rows: SegmentRows,
        sample: Sample,
        sink: torch.Tensor,
    ) -> None:
        """Add what the sampled rows of this layer attend to, to the source's target."""
        scale = self.config.softmax_scale
        picked = apply_rope(q[sample.rows], sample.positions, self.rope.of(layer))
        slots = rows.window_keys[sample.rows]
        keys = self.cache.window(layer).read(slots, picked.dtype)
        window_logits = torch.einsum("shd,swd->shw", picked, keys) * scale
        window_logits = window_logits.masked_fill((slots < 0).unsqueeze(1), -torch.inf)
        mass = attention_to_entries(
            picked,
            self.cache.main(source).values,
            sample,
            self.config.ratio(source),
            window_logits,
            sink,
            scale,
        )
        self._target = mass if self._target is None else self._target + mass

    def _teach(self, sample: Sample) -> None:
        """Close the current index source: all layers that share its selection have been summed.

        The candidate source waits for the segment's end: the sources above it choose among its
        blocks, so it learns what all of their layers attend to as well.
        """
        if self._scored is None or self._target is None:
            return
        if self._scored.layer == self.config.candidate_source_layer_id:
            self._candidate = self._scored, self._target
        else:
            self._add_loss(self._scored, self._target, sample)
            if self._candidate is not None:
                scored, target = self._candidate
                self._candidate = scored, target + self._target
        self._scored, self._target = None, None

    def _add_loss(self, scored: Scored, target: torch.Tensor, sample: Sample) -> None:
        source = self._source(scored.layer)
        keys, ratio = self.cache.index(source).values, self.config.ratio(source)
        loss = indexer_loss(scored.queries, scored.head_weights, keys, target, sample, ratio)
        self.collected.indexer_losses.append(loss)

    def _after_attention(
        self,
        layer: int,
        residual: Residual,
        y: torch.Tensor,
        weights: LayerWeights,
        counted: torch.Tensor,
    ) -> Residual:
        config = self.config
        attn = _mix(residual.streams, weights.attn_hc, config)
        streams = hc_expand(residual.streams, y, attn.post, attn.comb)
        ffn = _mix(streams, weights.ffn_hc, config)
        u = collapse(Residual(streams, attn.pre), weights.ffn_norm, config)
        routing = mega_gate(
            u,
            weights.moe.gate,
            weights.moe.bias.detach(),
            None,
            None,
            top_k=config.num_experts_per_tok,
            route_scale=config.routed_scaling_factor,
            gate_temp=config.gate_temp,
        )
        expert = torch.arange(config.n_routed_experts, device=u.device)
        chosen = (routing.ids.unsqueeze(-1) == expert) & counted.view(-1, 1, 1)
        self.collected.expert_counts[layer] = chosen.sum((0, 1))
        y = moe(
            u,
            routing.ids,
            routing.weights,
            weights.moe.routed,
            weights.moe.shared,
            swiglu_limit=config.swiglu_limit,
        )
        return Residual(hc_expand(streams, y, ffn.post, ffn.comb), ffn.pre)


def _latent(u: torch.Tensor, weights: CompressorWeights) -> torch.Tensor:
    if weights.wgate is None:
        return linear(u, weights.wkv)
    pairs_a = torch.unflatten(linear(u, weights.wkv), 0, (-1, 2))
    pairs_b = torch.unflatten(linear(u, weights.wgate), 0, (-1, 2))
    return pool_pairs(pairs_a, pairs_b)


def _mix(streams: torch.Tensor, weights: HyperWeights, config: ModelConfig) -> HcMix:
    return hc_mix(
        streams,
        weights.fn,
        weights.base,
        weights.scale,
        sinkhorn_iters=config.hc_sinkhorn_iters,
        hc_eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )
