"""Engram in the network: table rows of a step, and their injection into the streams.

The rows depend on token ids only, so a step can compute and fetch them before its first layer.
(Technical report, section on Engram.)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import torch

from engine.batch import RaggedBatch
from engine.config import ConfigError, ModelConfig
from engine.network.beside import Beside
from engine.network.weights import EngramWeights, LayerWeights
from plugins.engram import engram_gate, engram_layout, engram_lookup, engram_rows
from plugins.linear import linear


class EngramHash:
    """Which table rows a step's tokens read.

    Raises ConfigError when the tables have other sizes than the hash needs, or an Engram layer
    lies above the encoder, where prefill does not see every row.
    """

    def __init__(self, config: ModelConfig, token_class: torch.Tensor) -> None:
        if any(layer > config.decoder_start for layer in config.engram_layer_ids):
            raise ConfigError(
                f"engram_layer_ids: expected layers up to {config.decoder_start}, the first "
                f"decoder layer, got {list(config.engram_layer_ids)}"
            )
        self._token_class = token_class
        self._pad_class = int(token_class[config.engram_pad_token_id])
        self._dead_token_id = config.image_token_id
        self._layouts = engram_layout(
            config.engram_layer_ids,
            max_ngram_size=config.engram_max_ngram_size,
            n_heads=config.engram_n_heads,
            vocab_size=config.engram_vocab_size,
            compressed_vocab_size=config.engram_compressed_vocab_size,
        )
        sizes = tuple(layout.num_rows for layout in self._layouts.values())
        if sizes != config.engram_num_embeddings:
            raise ConfigError(
                f"engram_num_embeddings: expected {list(sizes)}, the sums of the primes from "
                f"engram_vocab_size = {config.engram_vocab_size} on, "
                f"got {list(config.engram_num_embeddings)}"
            )

    def rows(self, batch: RaggedBatch) -> dict[int, torch.Tensor]:
        """Table rows [T, columns] of each Engram layer, int64."""
        return {
            layer: engram_rows(
                batch.tokens,
                batch.request,
                batch.query_start,
                batch.history,
                self._token_class,
                layout,
                pad_class=self._pad_class,
                dead_token_id=self._dead_token_id,
            )
            for layer, layout in self._layouts.items()
        }


class EngramMemories:
    """What a step reads of each layer's table, [T, columns · width]: fetched before the first layer
    runs, on a device beside it.

    `seconds` is how long the step had to wait for it, None on a device, where nobody waits but the
    stream that reads it.
    """

    seconds: float | None = None

    def __init__(
        self,
        rows: Mapping[int, torch.Tensor],
        layers: Sequence[LayerWeights],
        dtype: torch.dtype,
    ) -> None:
        """rows [T, columns] of each Engram layer's table."""
        self._made: dict[int, Beside[torch.Tensor]] = {}
        for layer, of_layer in rows.items():
            weights = layers[layer].engram
            if weights is None:  # a diagnostic network without this memory
                continue
            lookup = functools.partial(engram_lookup, weights.table, dtype=dtype)
            started = time.monotonic()
            self._made[layer] = Beside("engram", lookup, of_layer)
            if not of_layer.is_cuda:
                self.seconds = (self.seconds or 0.0) + time.monotonic() - started

    def take(self, layer: int) -> torch.Tensor:
        """The layer's memory, once."""
        return self._made.pop(layer).take()


def inject(
    streams: torch.Tensor,
    memory: torch.Tensor,
    weights: EngramWeights,
    is_image: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Streams [T, S, D] after the gate; memory [T, columns · width] of the layer's table."""
    num_streams, hidden = streams.shape[1:]
    projected = linear(memory, weights.wkv)
    keys, value = torch.split(projected, [num_streams * hidden, hidden], dim=-1)
    return engram_gate(
        streams,
        torch.unflatten(keys, -1, (num_streams, hidden)),
        value,
        weights.q_weight,
        weights.k_weight,
        None if is_image is None else ~is_image,
        norm_eps=eps,
    )
