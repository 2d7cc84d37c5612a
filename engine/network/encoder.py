"""The encoder segment: every row through the layers below the decoder, and the CED projection.

The decoder's global KV is a function of the encoder's output alone: its first layer's attention
input. Writing it here, for every row, is what lets prefill run the decoder on the last rows only.
(Technical report, sections on the causal encoder-decoder and on bounded replay.)
"""

from __future__ import annotations

import torch

from engine.batch import RaggedBatch
from engine.cache_view import CacheView
from engine.config import ModelConfig
from engine.network.attention import attention
from engine.network.block import (
    Residual,
    SublayerOutput,
    after_attention,
    attention_input,
    collapse,
    embed,
    written,
)
from engine.network.compress import compress
from engine.network.engram import EngramHash, EngramMemories, inject
from engine.network.rope import RopeTables
from engine.network.rows import CompressRows, SegmentRows, decoder_rows
from engine.network.select import Selection
from engine.network.weights import NetworkWeights


class Encoder:
    """Layers 0 … decoder_start − 1, and what layer decoder_start writes for every row.

    `engram_seconds`: the last run's wait for Engram rows, None where it is not the host's.
    """

    engram_seconds: float | None = None

    def __init__(
        self, config: ModelConfig, weights: NetworkWeights, rope: RopeTables, engram: EngramHash
    ) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope
        self._engram = engram

    def run(self, batch: RaggedBatch, cache: CacheView) -> Residual:
        """The decoder's input for `batch.decoder_rows`; writes windows, entries and tails."""
        config = self._config
        rows = SegmentRows.of_encoder(batch, cache, config)
        entry_rows = CompressRows.of(batch, cache, config)
        layers, embedding = self._weights.layers, self._weights.embed
        engram = EngramMemories(self._engram.rows(batch), layers, embedding.dtype)
        self.engram_seconds = engram.seconds
        state: Residual | SublayerOutput = embed(batch.tokens, embedding, config)
        published: Selection | None = None
        for layer in range(config.decoder_start):
            weights = layers[layer]
            state = self._inject(layer, state, engram, rows)
            x = attention_input(state, weights, config)
            self._compress(layer, x.u, entry_rows, cache)
            y, published = attention(
                x.u, layer, weights.attention, config, rows, cache, self._rope.of(layer), published
            )
            state = after_attention(
                x,
                y,
                weights,
                config,
                top_k=config.num_experts_per_tok,
                is_image=rows.is_image,
            )
        layer = config.decoder_start
        residual = written(self._inject(layer, state, engram, rows))
        u = collapse(residual, layers[layer].attn_norm, config)
        self._compress(layer, u, entry_rows, cache)
        kept = decoder_rows(batch)
        return residual if kept is None else residual.rows(kept)

    def _inject(
        self,
        layer: int,
        state: Residual | SublayerOutput,
        engram: EngramMemories,
        rows: SegmentRows,
    ) -> Residual | SublayerOutput:
        weights = self._weights.layers[layer].engram
        if weights is None:
            return state
        residual, memory = written(state), engram.take(layer)
        eps = self._config.rms_norm_eps
        streams = inject(residual.streams, memory, weights, rows.is_image, eps)
        return Residual(streams, residual.pre)

    def _compress(self, layer: int, u: torch.Tensor, rows: CompressRows, cache: CacheView) -> None:
        weights = self._weights.layers[layer].attention.compressor
        if weights is not None:
            eps = self._config.rms_norm_eps
            compress(u, layer, weights, rows, cache, self._rope.of(layer), eps)
