"""The configuration of a model: its dims, and the roles that follow from them.

`engine.config_reader` makes one from the released files and refuses what cannot run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any


class ConfigError(ValueError):
    """A configuration that this implementation cannot run; the message says what to change."""


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions and roles of one V4.1 model. Field names follow the Hugging Face file.

    Layer indices count the backbone first (0 … num_hidden_layers − 1), then the draft stages.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_length: int
    max_position_embeddings: int
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_compressed_vocab_size: int
    engram_pad_token_id: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    gate_temp: float = 1.0
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None

    def with_changes(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)

    # -- roles ---------------------------------------------------------------------------------

    @property
    def num_layers_total(self) -> int:
        """Backbone layers plus draft stages: the number of layers that own window rows."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def decoder_start(self) -> int:
        """First decoder layer: the last KV source. Layers below it are the encoder."""
        return self.kv_source_layer_ids[-1]

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry that `layer` reads; 0 for window-only layers."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose main KV and index keys `layer` reads, None for window-only layers."""
        return _last_at_or_below(self.kv_source_layer_ids, layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection `layer` reads, None for window-only layers."""
        return _last_at_or_below(self.index_source_layer_ids, layer) if self.ratio(layer) else None

    def is_kv_source(self, layer: int) -> bool:
        return layer in self.kv_source_layer_ids

    def is_index_source(self, layer: int) -> bool:
        return layer in self.index_source_layer_ids

    @property
    def pair_source_layer_ids(self) -> tuple[int, ...]:
        """KV sources of ratio 2: the layers that keep a compressor tail."""
        return tuple(s for s in self.kv_source_layer_ids if self.ratio(s) == 2)

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def hc_rows(self) -> int:
        """Rows of a mixing matrix: pre, post and the S x S combination."""
        return self.hc_mult * (2 + self.hc_mult)

    @property
    def engram_columns(self) -> int:
        """Table rows that one token reads in one Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def max_ratio(self) -> int:
        return max(self.compress_ratios)

    @cached_property
    def exact_replay_length(self) -> int:
        """Rows to replay so that everything after a prefix hit is exact: L·(W − 1)."""
        return self.num_hidden_layers * (self.sliding_window - 1)

    def inv_freq(self, layer: int) -> tuple[float, ...]:
        """The rotary frequencies of `layer`, in float64, [qk_rope_head_dim / 2].

        Window-only layers: plain, `rope_theta`. Others: `compress_rope_theta` with YaRN at every
        length (technical report; YaRN is arXiv 2309.00071).
        """
        dim = self.qk_rope_head_dim
        compressed = self.ratio(layer) > 0
        theta = self.compress_rope_theta if compressed else self.rope_theta
        base = [theta ** (-2.0 * k / dim) for k in range(dim // 2)]
        if not compressed:
            return tuple(base)

        def correction(rotations: float) -> float:
            turns = self.rope_original_length / (2.0 * math.pi * rotations)
            return dim * math.log(turns) / (2.0 * math.log(theta))

        low = max(math.floor(correction(self.rope_beta_fast)), 0)
        high = min(math.ceil(correction(self.rope_beta_slow)), dim - 1)
        span = max(high - low, 1e-3)
        ramp = [min(max((k - low) / span, 0.0), 1.0) for k in range(dim // 2)]
        return tuple(
            f * (1.0 - r) + f / self.rope_factor * r for f, r in zip(base, ramp, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """The flat form that `read_config` reads back without loss."""
        result: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            result[field.name] = list(value) if isinstance(value, tuple) else value
        return result


def _last_at_or_below(ids: tuple[int, ...], layer: int) -> int:
    return max(source for source in ids if source <= layer)
