"""The rows that one segment runs, and every slot that depends on the row but not on the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import RaggedBatch
from engine.cache_view import CacheView
from engine.config import ModelConfig
from plugins.indexer import KeySlots
from plugins.row_numbers import entry_numbers, window_numbers


@dataclass(frozen=True)
class SegmentRows:
    """T rows of a segment. Slots are those of the cache that the step runs on."""

    positions: torch.Tensor  # [T]
    request: torch.Tensor  # [T]
    window_write: torch.Tensor  # [T] slot of the row's own window row
    window_keys: torch.Tensor  # [T, W] its window, oldest first, −1 below the floor
    key_slots: dict[int, KeySlots]  # ratio → [R, n] slots of every entry a row may see
    num_visible: dict[int, torch.Tensor]  # ratio → [T] how many entries the row sees
    is_image: torch.Tensor | None  # [T] bool, None where the model has no image token

    @staticmethod
    def of_encoder(batch: RaggedBatch, cache: CacheView, config: ModelConfig) -> SegmentRows:
        """All rows of the step."""
        layers = range(config.decoder_start)
        return _segment(batch, None, batch.encoder_floor, layers, cache, config)

    @staticmethod
    def of_decoder(batch: RaggedBatch, cache: CacheView, config: ModelConfig) -> SegmentRows:
        """The rows that run through the decoder."""
        layers = range(config.decoder_start, config.num_hidden_layers)
        return _segment(batch, decoder_rows(batch), batch.decoder_floor, layers, cache, config)


def decoder_rows(batch: RaggedBatch) -> torch.Tensor | None:
    """The rows that run through the decoder, None for all of them: what decodes needs no gathering.
    A traced graph gathers always, because its sizes are not known."""
    rows = batch.decoder_rows
    is_all = not torch.compiler.is_exporting() and rows.shape[0] == batch.num_rows
    return None if is_all else rows


def window_keys(
    position: torch.Tensor,
    request: torch.Tensor,
    floor: torch.Tensor,
    cache: CacheView,
    window: int,
) -> torch.Tensor:
    """Slots [T, W] of positions max(floor, p − W + 1) … p, oldest first; −1 below that.

    position, request [T]; floor [T] is the lowest position that the row may read.
    """
    keys = window_numbers(position, floor, window).keys
    return cache.window_slots(request.unsqueeze(-1), keys)


def _segment(
    batch: RaggedBatch,
    kept: torch.Tensor | None,
    floor: torch.Tensor,
    layers: range,
    cache: CacheView,
    config: ModelConfig,
) -> SegmentRows:
    def key_slots(ratio: int) -> KeySlots:
        return cache.key_slots(ratio, batch.num_requests, batch.max_context // ratio)

    ratios = sorted({config.ratio(layer) for layer in layers if config.is_index_source(layer)})
    positions, request, tokens = batch.positions, batch.request, batch.tokens
    if kept is not None:
        positions, request, tokens = positions[kept], request[kept], tokens[kept]
    numbers = window_numbers(
        positions,
        floor[request],
        config.sliding_window,
        ratios=ratios,
        tokens=tokens,
        token=config.image_token_id,
    )
    return SegmentRows(
        positions=positions,
        request=request,
        window_write=cache.window_slots(request, positions),
        window_keys=cache.window_slots(request.unsqueeze(-1), numbers.keys),
        key_slots={ratio: key_slots(ratio) for ratio in ratios},
        num_visible=numbers.visible,
        is_image=numbers.is_token,
    )


@dataclass(frozen=True)
class CompressRows:
    """Where the encoder's rows put compressed entries and compressor rows."""

    request: torch.Tensor  # [T]
    # ratio → [T] position of the first token of the entry that the row would close, where it stands
    entry_position: dict[int, torch.Tensor]
    entry_write: dict[int, torch.Tensor]  # ratio → [T] slot of the entry that the row closes
    is_first: torch.Tensor  # [T] the row before it is not in the batch
    tail_read: torch.Tensor  # [R] tail slot of the position before the request's first row
    tail_write: torch.Tensor  # [T] tail slot, −1 for all but the newest rows

    @staticmethod
    def of(batch: RaggedBatch, cache: CacheView, config: ModelConfig) -> CompressRows:
        ratios = sorted({config.ratio(source) for source in config.kv_source_layer_ids})
        numbers = entry_numbers(
            batch.positions,
            batch.request,
            batch.query_start,
            batch.write_floor,
            ratios=ratios,
            capacity=cache.tail_capacity,
        )
        requests = torch.arange(batch.num_requests, device=batch.positions.device)
        return CompressRows(
            request=batch.request,
            entry_position={ratio: _behind(batch.positions, ratio - 1) for ratio in ratios},
            entry_write={
                ratio: cache.entry_slots(ratio, batch.request, entries)
                for ratio, entries in numbers.entries.items()
            },
            is_first=numbers.is_first,
            tail_read=cache.tail_slots(requests, numbers.before),
            tail_write=cache.tail_slots(batch.request, numbers.newest),
        )


def _behind(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    return positions - tokens if tokens else positions
