"""The weights of one network, as the operators take them.

Precision: `dtype` is the compute dtype. Mixing matrices, biases, sinks, the gate, the head, the
pair compressor and the draft's Markov and confidence heads are kept and multiplied in at least
float32 ("wide"); rows of embeddings are widened when they are used. Tensors may be leaves that
require gradients; nothing here copies them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.rows import RowStore
from plugins.linear import LinearWeight
from plugins.moe import ExpertWeights


@dataclass(frozen=True)
class HyperWeights:
    """The mix of one sublayer, wide."""

    fn: torch.Tensor  # [S·(2 + S), S·D]
    base: torch.Tensor  # [S·(2 + S)]
    scale: torch.Tensor  # [3] pre, post, comb


@dataclass(frozen=True)
class CompressorWeights:
    """A KV source's compressor and index keys."""

    wkv: LinearWeight  # [head_dim, D], wide for ratio 2
    wgate: LinearWeight | None  # [head_dim, D] wide, None for ratio 1
    norm: torch.Tensor  # [head_dim]
    index_wk: LinearWeight  # [index_head_dim, head_dim]
    index_norm: torch.Tensor  # [index_head_dim]


@dataclass(frozen=True)
class IndexerWeights:
    """An index source's queries."""

    wq_b: LinearWeight  # [index heads · index_head_dim, q_lora_rank]
    weights_proj: LinearWeight  # [index heads, D]


@dataclass(frozen=True)
class AttentionWeights:
    wq_a: LinearWeight  # [q_lora_rank, D]
    q_norm: torch.Tensor  # [q_lora_rank]
    wq_b: LinearWeight  # [H·d, q_lora_rank]
    wkv: LinearWeight  # [d, D]
    kv_norm: torch.Tensor  # [d]
    sink: torch.Tensor  # [H] wide
    wo_a: LinearWeight  # [groups·o_lora_rank, H·d / groups]
    wo_b: LinearWeight  # [D, groups·o_lora_rank]
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoeWeights:
    gate: torch.Tensor  # [E, D] wide
    bias: torch.Tensor  # [E] wide
    bias_image: torch.Tensor | None  # [E] wide
    routed: ExpertWeights
    shared: ExpertWeights


@dataclass(frozen=True)
class EngramWeights:
    table: RowStore  # rows [engram_head_dim], never written
    wkv: LinearWeight  # [(S + 1)·D, columns · engram_head_dim]: a key per stream, then the value
    q_weight: torch.Tensor  # [S, D] wide
    k_weight: torch.Tensor  # [S, D] wide


@dataclass(frozen=True)
class LayerWeights:
    attn_norm: torch.Tensor  # [D]
    attn_hc: HyperWeights
    attention: AttentionWeights
    ffn_norm: torch.Tensor  # [D]
    ffn_hc: HyperWeights
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True)
class DraftWeights:
    """The DSpark stages; embedding and head are the target's."""

    main_proj: LinearWeight  # [D, targets·D]
    main_norm: torch.Tensor  # [D]
    stages: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [D]
    markov_embed: torch.Tensor  # [vocab, rank]
    markov_head: LinearWeight  # [vocab, rank] wide
    confidence: LinearWeight  # [1, D + rank] wide


@dataclass(frozen=True)
class NetworkWeights:
    embed: torch.Tensor  # [vocab, D]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [D]
    head: LinearWeight  # [vocab, D] wide
    draft: DraftWeights | None
    token_class: torch.Tensor  # int64 [vocab], Engram class of each token id
