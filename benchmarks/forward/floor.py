"""The fewest bytes that a step moves: weights that its rows meet, each once, and cache rows that
they read, each once a layer. What lies between two operators is not counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.forward.cases import Case
from engine.config import ModelConfig
from engine.network.weights import EngramWeights, LayerWeights, MoeWeights, NetworkWeights
from plugins.formats.sizes import index_row_bytes, main_row_bytes, window_row_bytes
from plugins.linear import PackedMatrix
from plugins.moe import ExpertWeights


def weight_bytes(node: Any) -> int:
    """Stored bytes of weights in dataclasses and tuples; Engram tables and experts apart."""
    if isinstance(node, torch.Tensor | PackedMatrix):
        return node.nbytes
    if isinstance(node, ExpertWeights):
        return sum(weight_bytes(part) for part in node.matrices())
    if isinstance(node, tuple | list):
        return sum(map(weight_bytes, node))
    if hasattr(node, "packed"):
        return weight_bytes(node.packed)
    if dataclasses.is_dataclass(node):
        skipped = {"table"} if isinstance(node, EngramWeights) else set()
        skipped |= {"routed"} if isinstance(node, MoeWeights) else set()
        fields = (f.name for f in dataclasses.fields(node) if f.name not in skipped)
        return sum(weight_bytes(getattr(node, name)) for name in fields)
    return 0


def step_bytes(
    case: Case,
    config: ModelConfig,
    weights: NetworkWeights,
    rows: int,
    decoder_rows: int,
    *,
    in_turn: bool = False,
) -> int:
    """Of the target's forward. rows: all of the step, decoder_rows: those of its decoder; in_turn:
    they choose the experts one after the other."""
    total = weight_bytes(weights.norm) + weight_bytes(weights.head)
    for layer, of_layer in enumerate(weights.layers):
        mine = rows if layer < config.decoder_start else decoder_rows
        per_token = config.num_experts_per_tok
        total += weight_bytes(of_layer) + _expert_bytes(of_layer, per_token, mine, in_turn)
        total += sum(_cache_bytes(layer, request, config) for request in case.requests)
    return total


def draft_bytes(
    case: Case, config: ModelConfig, weights: NetworkWeights, *, in_turn: bool = False
) -> int:
    """Of the draft pass behind a decode step that keeps all its rows: a block for each request."""
    draft = weights.draft
    assert draft is not None, "the model drafts"
    total = weight_bytes(weights.head) + weight_bytes(draft) - weight_bytes(draft.markov_embed)
    rows = len(case.requests) * config.dspark_block_size
    for stage in draft.stages:
        total += _expert_bytes(stage, config.dspark_num_experts_per_tok, rows, in_turn)
        for request in case.requests:
            seen = min(request.context, config.sliding_window)
            total += seen * window_row_bytes(config.head_dim)
    return total


def _expert_bytes(layer: LayerWeights, per_token: int, rows: int, in_turn: bool) -> int:
    """Of the experts that `rows` rows choose, so many each: in turn, or were all as likely."""
    experts = layer.moe.routed
    share = 1 - (1 - per_token / experts.count) ** rows
    if in_turn:
        share = min(1.0, rows * per_token / experts.count)
    return int(weight_bytes(experts) * share)


def _cache_bytes(layer: int, request: Any, config: ModelConfig) -> int:
    rows = request.rows
    if layer >= config.decoder_start and not request.decodes:
        rows = min(rows, config.sliding_window)
    seen = min(request.context, rows + config.sliding_window - 1)
    total = seen * window_row_bytes(config.head_dim)
    ratio = config.ratio(layer)
    if not ratio:
        return total
    entries = request.context // ratio
    total += min(entries, rows * config.index_topk) * main_row_bytes(config.head_dim)
    if config.is_index_source(layer) and entries > config.index_topk:
        keys = entries
        if layer > config.candidate_source_layer_id:
            most = config.candidate_topk_blocks * config.candidate_block_size
            keys = min(entries, rows * most)
        total += keys * index_row_bytes(config.index_head_dim)
    return total
