"""The V4.1 network: three segments over a cache view."""

from __future__ import annotations

import torch

from engine.batch import DraftBatch, RaggedBatch
from engine.cache_view import CacheView
from engine.config import ConfigError, ModelConfig
from engine.network.block import Residual
from engine.network.decoder import Decoder, DecoderOutput
from engine.network.draft import Draft, DraftOutput
from engine.network.encoder import Encoder
from engine.network.engram import EngramHash
from engine.network.rope import RopeTables
from engine.network.weights import NetworkWeights


class Network:
    """One model in one compute dtype. Holds no state of requests: that is the cache's.

    Steps must come in order: the rows of a request extend the positions that its cache holds.
    A float64 network is the definition; the same code runs in float32 and bfloat16, and with
    weights that require gradients.
    """

    def __init__(self, config: ModelConfig, weights: NetworkWeights) -> None:
        device = weights.embed.device
        self.config = config
        self.weights = weights
        self.engram_hash = EngramHash(config, weights.token_class)
        rope = RopeTables.build(config, device)
        self._encoder = Encoder(config, weights, rope, self.engram_hash)
        self._decoder = Decoder(config, weights, rope)
        draft = weights.draft
        self._draft = None if draft is None else Draft(config, weights, draft, rope)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embed.dtype

    @property
    def drafts(self) -> bool:
        """Whether the model has draft stages."""
        return self._draft is not None

    @property
    def engram_seconds(self) -> float | None:
        """How long the last step waited for Engram rows; None on a device, which waits itself."""
        return self._encoder.engram_seconds

    def encoder(self, batch: RaggedBatch, cache: CacheView) -> Residual:
        """Layers 0 … decoder_start − 1 on every row, and the decoder's global KV.

        Returns the decoder's input, [Td, …] for `batch.decoder_rows`.
        """
        return self._encoder.run(batch, cache)

    def decoder(self, batch: RaggedBatch, cache: CacheView, encoded: Residual) -> DecoderOutput:
        """The remaining layers on `batch.decoder_rows`; logits of `batch.logit_rows`."""
        return self._decoder.run(batch, cache, encoded)

    def forward(self, batch: RaggedBatch, cache: CacheView) -> DecoderOutput:
        """Both segments of one step."""
        return self.decoder(batch, cache, self.encoder(batch, cache))

    def store_draft_context(
        self,
        features: torch.Tensor,
        request: torch.Tensor,
        positions: torch.Tensor,
        cache: CacheView,
    ) -> None:
        """Keep confirmed rows' draft features [n, targets·D] as the draft stages' context."""
        self._stages().store_context(features, request, positions, cache)

    def draft(self, batch: DraftBatch, cache: CacheView) -> DraftOutput:
        """One DSpark pass: a block of tokens after each anchor. Writes nothing."""
        return self._stages().run(batch, cache)

    def _stages(self) -> Draft:
        if self._draft is None:
            raise ConfigError(
                "this model has no draft stages (num_nextn_predict_layers is 0); "
                "serve it without drafting"
            )
        return self._draft
