"""Exported graphs in the place of the network, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from builder.graph.executor import GraphExecutor
from builder.graph.export import export_segments
from builder.graph.trace import GraphOptions
from engine.batch import DraftBatch, RaggedBatch
from engine.config import ModelConfig
from engine.network.block import Residual
from engine.network.decoder import DecoderOutput
from engine.network.draft import DraftOutput
from engine.network.weights import NetworkWeights
from engine.paged_cache import PagedCache
from engine.segments import (
    decoder_tensors,
    draft_tensors,
    encoder_tensors,
    engram_tables,
    model_segments,
)
from plugins.formats.nvfp4 import quantize_weight
from plugins.formats.released import quantize_fp8_rows
from plugins.linear import LinearWeight, PackedFormat, PackedLinearWeight, PackedMatrix
from plugins.moe import ExpertWeights, PackedExpertWeights

GLOBAL_PAGE_TOKENS = 4
WINDOW_PAGE_ROWS = 2


class GraphNetwork:
    """The executed graphs, with the network's interface over a `PagedCache`."""

    def __init__(self, config: ModelConfig, weights: NetworkWeights, directory: Path) -> None:
        self.config = config
        self.segments = {
            name: GraphExecutor(directory / f"{name}.onnx") for name in model_segments(config)
        }
        self.dtype = self.segments["encoder"].options.dtype
        self._engram = engram_tables(weights)

    def forward(self, batch: RaggedBatch, cache: PagedCache) -> DecoderOutput:
        pools, tables = cache._pools, cache._tables
        made = self.segments["encoder"].run(encoder_tensors(batch, tables, pools, self._engram))
        assert made["window_pages_out"] is pools.window_pages
        encoded = Residual(made["streams"], made["pre"])
        if not len(batch.decoder_rows):
            features = len(self.config.dspark_target_layer_ids) * self.config.hidden_size
            return DecoderOutput(torch.empty(0, self.config.vocab_size), torch.empty(0, features))
        made = self.segments["decoder"].run(decoder_tensors(batch, tables, pools, encoded))
        return DecoderOutput(made["logits"], made["draft_features"])

    def store_and_draft(
        self,
        context: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        batch: DraftBatch,
        cache: PagedCache,
    ) -> DraftOutput:
        tensors = draft_tensors(context, batch, cache._tables, cache._pools)
        made = self.segments["draft"].run(tensors)
        return DraftOutput(made["tokens"], made["confidence"])


def export(
    config: ModelConfig,
    weights: NetworkWeights,
    directory: Path,
    dtype: torch.dtype,
    *,
    quantize: bool,
) -> GraphNetwork:
    directory.mkdir(exist_ok=True)
    options = GraphOptions(dtype, quantize, GLOBAL_PAGE_TOKENS, WINDOW_PAGE_ROWS)
    export_segments(config, weights, directory, options)
    return GraphNetwork(config, weights, directory)


def pack(values: torch.Tensor, kind: PackedFormat) -> PackedMatrix:
    """NVFP4 or MXFP8, as ModelOpt lays them out."""
    global_scale = None
    if kind is PackedFormat.NVFP4:
        codes, scale, global_scale = quantize_weight(values)
    else:
        codes, scale = quantize_fp8_rows(values)
    rows, columns = values.shape
    return PackedMatrix(kind, (rows, columns), codes, scale, global_scale, values.dtype)


def packed_weights(weights: NetworkWeights) -> NetworkWeights:
    """The same network with its experts and wider linears as NVFP4 by NVFP4 (W4A4), under scales
    that differ by expert, and its narrower ones, where they are not widened, in MXFP8."""

    def change(node: Any, visit: Callable[[Any], Any]) -> Any:
        if isinstance(node, ExpertWeights):
            parts = (
                [pack(matrix, PackedFormat.NVFP4) for matrix in part] for part in node.matrices()
            )
            scale = torch.logspace(-3, -1, 2 * node.count).view(node.count, 2)
            return PackedExpertWeights(*parts, node.w1.dtype, True, scale)
        if isinstance(node, LinearWeight):
            fits = node.value.shape[1] % 32 == 0 and node.value.shape[0] < 512
            if not fits:
                return node
            if node.value.shape[0] >= 128:
                packed = pack(node.value, PackedFormat.NVFP4)
                return PackedLinearWeight(packed, True, torch.tensor(0.02))
            return PackedLinearWeight(pack(node.value, PackedFormat.MXFP8), True)
        if isinstance(node, tuple):
            return tuple(visit(one) for one in node)
        if is_dataclass(node):
            return type(node)(**{f.name: visit(getattr(node, f.name)) for f in fields(node)})
        return node

    def visit(node: Any) -> Any:
        return change(node, visit)

    result: NetworkWeights = visit(weights)
    return result
