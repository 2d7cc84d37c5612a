"""The rows that one segment runs, and every slot that depends on the row but not on the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import RaggedBatch
from engine.cache_view import CacheView
from engine.config import ModelConfig
from plugins.indexer import KeySlots


@dataclass(frozen=True)
class SegmentRows:
    """T rows of a segment. Slots are those of the cache that the step runs on."""

    positions: torch.Tensor  # [T]
    request: torch.Tensor  # [T]
    window_write: torch.Tensor  # [T] slot of the row's own window row
    window_keys: torch.Tensor  # [T, W] its window, oldest first, −1 below the floor
    key_slots: dict[int, KeySlots]  # ratio → [R, n] slots of every entry a row may see
    is_image: torch.Tensor | None  # [T] bool, None where the model has no image token

    @staticmethod
    def of_encoder(batch: RaggedBatch, cache: CacheView, config: ModelConfig) -> SegmentRows:
        """All rows of the step."""
        layers = range(config.decoder_start)
        return _segment(batch, slice(None), batch.encoder_floor, layers, cache, config)

    @staticmethod
    def of_decoder(batch: RaggedBatch, cache: CacheView, config: ModelConfig) -> SegmentRows:
        """The rows that run through the decoder."""
        layers = range(config.decoder_start, config.num_hidden_layers)
        return _segment(batch, batch.decoder_rows, batch.decoder_floor, layers, cache, config)


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
    behind = torch.arange(1 - window, 1, device=position.device)
    keys = position.unsqueeze(-1) + behind
    slots = cache.window_slots(request.unsqueeze(-1), keys)
    return torch.where(keys >= floor.unsqueeze(-1), slots, -1)


def _segment(
    batch: RaggedBatch,
    kept: torch.Tensor | slice,
    floor: torch.Tensor,
    layers: range,
    cache: CacheView,
    config: ModelConfig,
) -> SegmentRows:
    def key_slots(ratio: int) -> KeySlots:
        return cache.key_slots(ratio, batch.num_requests, batch.max_context // ratio)

    ratios = {config.ratio(layer) for layer in layers if config.is_index_source(layer)}
    positions, request = batch.positions[kept], batch.request[kept]
    image = config.image_token_id
    return SegmentRows(
        positions=positions,
        request=request,
        window_write=cache.window_slots(request, positions),
        window_keys=window_keys(positions, request, floor[request], cache, config.sliding_window),
        key_slots={ratio: key_slots(ratio) for ratio in sorted(ratios)},
        is_image=None if image is None else batch.tokens[kept] == image,
    )


@dataclass(frozen=True)
class CompressRows:
    """Where the encoder's rows put compressed entries and compressor rows."""

    positions: torch.Tensor  # [T]
    request: torch.Tensor  # [T]
    entry_write: dict[int, torch.Tensor]  # ratio → [T] slot of the entry that the row closes
    is_first: torch.Tensor  # [T] the row before it is not in the batch
    tail_read: torch.Tensor  # [R] tail slot of the position before the request's first row
    tail_write: torch.Tensor  # [T] tail slot, −1 for all but the newest rows

    @staticmethod
    def of(batch: RaggedBatch, cache: CacheView, config: ModelConfig) -> CompressRows:
        positions, request = batch.positions, batch.request
        row = torch.arange(batch.num_rows, device=positions.device)
        first_row, end_row = batch.query_start[:-1], batch.query_start[1:]

        def entry_write(ratio: int) -> torch.Tensor:
            closes = (positions + 1) % ratio == 0
            owned = positions >= batch.write_floor[request]
            slots = cache.entry_slots(ratio, request, positions // ratio)
            return torch.where(closes & owned, slots, -1)

        newest = row >= (end_row - cache.tail_capacity)[request]
        ratios = {config.ratio(source) for source in config.kv_source_layer_ids}
        return CompressRows(
            positions=positions,
            request=request,
            entry_write={ratio: entry_write(ratio) for ratio in sorted(ratios)},
            is_first=row == first_row[request],
            tail_read=cache.tail_slots(
                torch.arange(batch.num_requests, device=positions.device),
                positions[first_row] - 1,
            ),
            tail_write=torch.where(newest, cache.tail_slots(request, positions), -1),
        )
