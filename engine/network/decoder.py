"""The decoder segment: the layers that read one global KV, and the head.

Nothing that these layers make is read by another token except through the window, so prefill runs
them on a request's last rows only: those at or above its decoder floor.
(Technical report, section on bounded replay, decoder side.)
"""

from __future__ import annotations

from typing import NamedTuple

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
    written,
)
from engine.network.precision import wide
from engine.network.rope import RopeTables
from engine.network.rows import SegmentRows
from engine.network.select import Selection
from engine.network.weights import NetworkWeights
from plugins.linear import wide_linear


class DecoderOutput(NamedTuple):
    logits: torch.Tensor  # [Tl, vocab] at least float32, of batch.logit_rows
    draft_features: torch.Tensor  # [Td, targets·D] of batch.decoder_rows, what the draft reads


class Decoder:
    """Layers decoder_start … L − 1. The first one's entries were written by the encoder."""

    def __init__(self, config: ModelConfig, weights: NetworkWeights, rope: RopeTables) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope

    def run(self, batch: RaggedBatch, cache: CacheView, residual: Residual) -> DecoderOutput:
        """`residual` [Td, …]: the encoder's output for `batch.decoder_rows`; writes windows."""
        config = self._config
        if residual.streams.shape[0] == 0:
            return self._nothing(residual)  # a chunk that ends below every decoder floor
        rows = SegmentRows.of_decoder(batch, cache, config)
        published: Selection | None = None
        features = []
        state: Residual | SublayerOutput = residual
        for layer in range(config.decoder_start, config.num_hidden_layers):
            weights = self._weights.layers[layer]
            x = attention_input(state, weights, config)
            if layer in config.dspark_target_layer_ids:
                features.append(_stream_mean(x.streams))
            y, published = attention(
                x.u,
                layer,
                weights.attention,
                config,
                rows,
                cache,
                self._rope.of(layer),
                published,
            )
            state = after_attention(
                x,
                y,
                weights,
                config,
                top_k=config.num_experts_per_tok,
                is_image=rows.is_image,
            )
        h = collapse(written(state).rows(batch.logit_rows), self._weights.norm, config)
        logits = wide_linear(h, self._weights.head)
        return DecoderOutput(logits, torch.cat(features, dim=-1))

    def _nothing(self, residual: Residual) -> DecoderOutput:
        streams, targets = residual.streams, len(self._config.dspark_target_layer_ids)
        return DecoderOutput(
            streams.new_zeros(0, self._config.vocab_size, dtype=wide(streams.dtype)),
            streams.new_zeros(0, targets * self._config.hidden_size),
        )


def _stream_mean(streams: torch.Tensor) -> torch.Tensor:
    return streams.mean(dim=1, dtype=wide(streams.dtype)).to(streams.dtype)
