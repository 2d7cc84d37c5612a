"""The tensors of a segment's graph: what an exported encoder, decoder or draft reads and writes.

The builder exports graphs with these inputs, in this order; the graph executor and the plan
executor fill them from a step. Sizes named by a word may change from step to step.

Caches are inputs that the graph writes in place, each with an output `<name>_out` of the same
memory. `context` is read for its length only, which sizes the key ranges of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.batch import DraftBatch, RaggedBatch
from engine.config import ModelConfig
from engine.network.block import Residual
from engine.network.precision import wide
from engine.network.weights import NetworkWeights
from engine.paged_cache import CachePools, PoolLayout, StepTables
from plugins.formats.rows import PackedRows, ValueRows

SEGMENTS = ("encoder", "decoder", "draft")
CACHES = ("global_pages", "window_pages", "tails")


@dataclass(frozen=True)
class SegmentTensor:
    """dims: sizes, the names of varying sizes, or formulas of those ("requests+1")."""

    name: str
    dims: tuple[int | str, ...]
    dtype: torch.dtype


def model_segments(config: ModelConfig) -> tuple[str, ...]:
    """The segments that a model has."""
    return SEGMENTS if config.num_nextn_predict_layers else SEGMENTS[:2]


def least_context(config: ModelConfig) -> int:
    """The shortest `context` of a graph: one entry more than a selection holds, in every source.

    Below it the network takes all entries without scoring them, to the same effect.
    """
    return (config.index_topk + 1) * config.max_ratio


def engram_tables(weights: NetworkWeights) -> dict[str, torch.Tensor]:
    """The Engram tables' memory, packed records or values, by the name of the encoder's input."""
    tables: dict[str, torch.Tensor] = {}
    for layer, one in enumerate(weights.layers):
        if one.engram is not None:
            store = one.engram.table
            assert isinstance(store, PackedRows | ValueRows)
            rows = store.data if isinstance(store, PackedRows) else store.values
            tables[f"engram_table_{layer}"] = rows
    return tables


def segment_inputs(
    segment: str,
    layout: PoolLayout,
    dtype: torch.dtype,
    *,
    quantize: bool,
    tables: Mapping[str, torch.Tensor],
) -> tuple[SegmentTensor, ...]:
    """All inputs that `segment` may have; a graph leaves out those that it does not need.

    `tables` as `engram_tables` gives them, for their shapes.
    """
    config = layout.config
    stored = torch.uint8 if quantize else dtype

    def index(name: str, *dims: int | str) -> SegmentTensor:
        return SegmentTensor(name, dims, torch.int64)

    window_caches = (
        SegmentTensor("window_tables", ("requests", "window_columns"), torch.int32),
        SegmentTensor("window_pages", ("num_window_pages", layout.window_page_elements), stored),
    )
    caches = (
        index("slots", "requests"),
        SegmentTensor("global_tables", ("requests", "global_columns"), torch.int32),
        SegmentTensor("global_pages", ("num_global_pages", layout.global_page_elements), stored),
        SegmentTensor("tails", ("num_slots", layout.tail_elements), wide(dtype)),
        *window_caches,
    )
    rows = tuple(index(name, "rows") for name in ("tokens", "positions", "request"))
    context = SegmentTensor("context", ("context",), torch.bool)
    decoder_rows = index("decoder_rows", "decoder_rows")
    match segment:
        case "encoder":
            return (
                *rows,
                index("query_start", "requests+1"),
                index("encoder_floor", "requests"),
                index("write_floor", "requests"),
                index("history", "requests", config.engram_max_ngram_size - 1),
                decoder_rows,
                context,
                *caches,
                *(SegmentTensor(n, tuple(t.shape), t.dtype) for n, t in tables.items()),
            )
        case "decoder":
            streams = ("decoder_rows", config.hc_mult, config.hidden_size)
            return (
                *rows,
                index("decoder_floor", "requests"),
                decoder_rows,
                index("logit_rows", "logit_rows"),
                context,
                SegmentTensor("streams", streams, dtype),
                SegmentTensor("pre", streams[:2], wide(dtype)),
                *caches,
            )
        case "draft":
            features = len(config.dspark_target_layer_ids) * config.hidden_size
            return (
                SegmentTensor("features", ("context_rows", features), dtype),
                index("context_request", "context_rows"),
                index("context_positions", "context_rows"),
                *(index(f"anchor_{name}", "anchors") for name in ("tokens", "positions")),
                *(index(f"anchor_{name}", "anchors") for name in ("request", "floor")),
                *window_caches,
            )
    raise ValueError(f"expected one of {', '.join(SEGMENTS)}, got {segment}")


def encoder_tensors(
    batch: RaggedBatch,
    tables: StepTables,
    pools: CachePools,
    engram: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The encoder's inputs for one step; engram: see `engram_tables`."""
    return {
        **_step_tensors(batch, tables, pools),
        **engram,
        "query_start": batch.query_start,
        "encoder_floor": batch.encoder_floor,
        "write_floor": batch.write_floor,
        "history": batch.history,
    }


def decoder_tensors(
    batch: RaggedBatch, tables: StepTables, pools: CachePools, encoded: Residual
) -> dict[str, torch.Tensor]:
    """The decoder's inputs; it takes at least one row, so a step without any leaves it out."""
    return {
        **_step_tensors(batch, tables, pools),
        "decoder_floor": batch.decoder_floor,
        "logit_rows": batch.logit_rows,
        "streams": encoded.streams,
        "pre": encoded.pre,
    }


def draft_tensors(
    context: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: DraftBatch,
    tables: StepTables,
    pools: CachePools,
) -> dict[str, torch.Tensor]:
    """The draft's inputs. context: features, request and positions of confirmed tokens, which are
    stored first; position −1 stores nothing."""
    features, request, positions = context
    return {
        "features": features,
        "context_request": request,
        "context_positions": positions,
        "anchor_tokens": batch.anchors,
        "anchor_positions": batch.positions,
        "anchor_request": batch.request,
        "anchor_floor": batch.floor,
        "window_tables": tables.window_pages,
        "window_pages": pools.window_pages,
    }


def _step_tensors(
    batch: RaggedBatch, tables: StepTables, pools: CachePools
) -> dict[str, torch.Tensor]:
    length = max(batch.max_context, least_context(pools.layout.config))
    return {
        "tokens": batch.tokens,
        "positions": batch.positions,
        "request": batch.request,
        "decoder_rows": batch.decoder_rows,
        "context": torch.empty(length, dtype=torch.bool, device=batch.positions.device),
        "slots": tables.slots,
        "global_tables": tables.global_pages,
        "window_tables": tables.window_pages,
        "global_pages": pools.global_pages,
        "window_pages": pools.window_pages,
        "tails": pools.tails,
    }
