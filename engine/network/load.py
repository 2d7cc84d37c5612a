"""Weights from named tensors: one function per part of the network, names as released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.config import ConfigError, ModelConfig
from engine.network.precision import wide
from engine.network.weights import (
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    MoeWeights,
    NetworkWeights,
)
from engine.tensor_source import (
    TensorSource,
    dense,
    engram_table,
    expert_input_scale,
    expert_weights,
    linear_weight,
)
from plugins.linear import LinearWeight, PackedLinearWeight
from plugins.moe import ExpertWeights, PackedExpertWeights


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    token_class: npt.NDArray[np.integer[Any]],
    dtype: torch.dtype,
    *,
    activation_quant: bool = True,
    packed: bool = False,
) -> NetworkWeights:
    """Read every weight of the model in compute dtype `dtype`.

    token_class [vocab]: Engram class of each token id. `activation_quant` off is a diagnostic that
    leaves the inputs of linears released in FP8 or FP4 unrounded. `packed` keeps quantised weights
    as their stored bytes and decodes them on use: same results, less memory, more work. Raises
    CheckpointError naming the tensor that is missing or has another shape or dtype than the
    configuration asks for.
    """
    if token_class.shape != (config.vocab_size,):
        raise ConfigError(
            f"token_class: expected one class for each of {config.vocab_size} token ids, "
            f"got shape {list(token_class.shape)}"
        )
    classes = torch.from_numpy(token_class.astype(np.int64))
    if classes.min() < 0 or classes.max() >= config.engram_compressed_vocab_size:
        raise ConfigError(
            f"token_class: expected classes 0 … {config.engram_compressed_vocab_size - 1}, "
            f"got {int(classes.min())} … {int(classes.max())}"
        )
    return _Loader(config, source, dtype, activation_quant, packed).network(classes)


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        dtype: torch.dtype,
        activation_quant: bool,
        packed: bool,
    ) -> None:
        self.config = config
        self.source = source
        self.dtype = dtype
        self.wide = wide(dtype)
        self.activation_quant = activation_quant
        self.packed = packed

    def network(self, token_class: torch.Tensor) -> NetworkWeights:
        c = self.config
        vocab, hidden = c.vocab_size, c.hidden_size
        return NetworkWeights(
            embed=self._dense("embed.weight", vocab, hidden),
            layers=tuple(self._backbone_layer(layer) for layer in range(c.num_hidden_layers)),
            norm=self._dense("norm.weight", hidden),
            head=self._linear("head", vocab, hidden, dtype=self.wide),
            draft=self._draft() if c.num_nextn_predict_layers else None,
            token_class=token_class,
        )

    def _dense(self, name: str, *shape: int) -> torch.Tensor:
        return dense(self.source, name, shape, self.dtype)

    def _wide(self, name: str, *shape: int) -> torch.Tensor:
        return dense(self.source, name, shape, self.wide)

    def _linear(
        self, prefix: str, rows: int, columns: int, dtype: torch.dtype | None = None
    ) -> LinearWeight:
        return linear_weight(
            self.source,
            prefix,
            (rows, columns),
            dtype or self.dtype,
            activation_quant=self.activation_quant,
            packed=self.packed,
        )

    def _backbone_layer(self, layer: int) -> LayerWeights:
        c = self.config
        return self._layer(
            f"layers.{layer}",
            c.n_routed_experts,
            self._compressor(layer) if c.is_kv_source(layer) else None,
            self._indexer(layer) if c.is_index_source(layer) else None,
            self._engram(layer) if layer in c.engram_layer_ids else None,
        )

    def _layer(
        self,
        prefix: str,
        num_experts: int,
        compressor: CompressorWeights | None = None,
        indexer: IndexerWeights | None = None,
        engram: EngramWeights | None = None,
    ) -> LayerWeights:
        hidden = self.config.hidden_size
        return LayerWeights(
            attn_norm=self._dense(f"{prefix}.attn_norm.weight", hidden),
            attn_hc=self._hyper(f"{prefix}.hc_attn"),
            attention=self._attention(f"{prefix}.attn", compressor, indexer),
            ffn_norm=self._dense(f"{prefix}.ffn_norm.weight", hidden),
            ffn_hc=self._hyper(f"{prefix}.hc_ffn"),
            moe=self._moe(f"{prefix}.ffn", num_experts),
            engram=engram,
        )

    def _hyper(self, prefix: str) -> HyperWeights:
        c = self.config
        return HyperWeights(
            fn=self._wide(f"{prefix}_fn", c.hc_rows, c.hc_mult * c.hidden_size),
            base=self._wide(f"{prefix}_base", c.hc_rows),
            scale=self._wide(f"{prefix}_scale", 3),
        )

    def _attention(
        self, prefix: str, compressor: CompressorWeights | None, indexer: IndexerWeights | None
    ) -> AttentionWeights:
        c = self.config
        heads, groups = c.num_attention_heads, c.o_groups
        return AttentionWeights(
            wq_a=self._linear(f"{prefix}.wq_a", c.q_lora_rank, c.hidden_size),
            q_norm=self._dense(f"{prefix}.q_norm.weight", c.q_lora_rank),
            wq_b=self._linear(f"{prefix}.wq_b", heads * c.head_dim, c.q_lora_rank),
            wkv=self._linear(f"{prefix}.wkv", c.head_dim, c.hidden_size),
            kv_norm=self._dense(f"{prefix}.kv_norm.weight", c.head_dim),
            sink=self._wide(f"{prefix}.attn_sink", heads),
            # The released code dequantises this one at load and multiplies unrounded inputs.
            wo_a=linear_weight(
                self.source,
                f"{prefix}.wo_a",
                (groups * c.o_lora_rank, heads // groups * c.head_dim),
                self.dtype,
                activation_quant=False,
                packed=self.packed,
            ),
            wo_b=self._linear(f"{prefix}.wo_b", c.hidden_size, groups * c.o_lora_rank),
            compressor=compressor,
            indexer=indexer,
        )

    def _compressor(self, layer: int) -> CompressorWeights:
        c = self.config
        prefix = f"layers.{layer}.attn"
        pooled = c.ratio(layer) == 2
        dtype = self.wide if pooled else self.dtype
        wgate = f"{prefix}.compressor.wgate"
        return CompressorWeights(
            wkv=self._linear(f"{prefix}.compressor.wkv", c.head_dim, c.hidden_size, dtype),
            wgate=self._linear(wgate, c.head_dim, c.hidden_size, dtype) if pooled else None,
            norm=self._dense(f"{prefix}.compressor.norm.weight", c.head_dim),
            index_wk=self._linear(f"{prefix}.indexer.wk", c.index_head_dim, c.head_dim),
            index_norm=self._dense(f"{prefix}.indexer.k_norm.weight", c.index_head_dim),
        )

    def _indexer(self, layer: int) -> IndexerWeights:
        c = self.config
        prefix = f"layers.{layer}.attn.indexer"
        return IndexerWeights(
            wq_b=self._linear(f"{prefix}.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            weights_proj=self._linear(f"{prefix}.weights_proj", c.index_n_heads, c.hidden_size),
        )

    def _engram(self, layer: int) -> EngramWeights:
        c = self.config
        prefix = f"layers.{layer}.engram"
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
        memory = c.engram_columns * c.engram_head_dim
        return EngramWeights(
            table=engram_table(self.source, f"{prefix}.embed", rows, c.engram_head_dim, self.dtype),
            wkv=self._linear(f"{prefix}.wkv", (c.hc_mult + 1) * c.hidden_size, memory),
            q_weight=self._wide(f"{prefix}.q_weight", c.hc_mult, c.hidden_size),
            k_weight=self._wide(f"{prefix}.k_weight", c.hc_mult, c.hidden_size),
        )

    def _moe(self, prefix: str, num_experts: int) -> MoeWeights:
        c = self.config
        inter, hidden = c.moe_intermediate_size, c.hidden_size
        image_bias = f"{prefix}.gate.bias_vl"
        shared = [
            self._linear(f"{prefix}.shared_experts.{name}", rows, columns)
            for name, rows, columns in (
                ("w1", inter, hidden),
                ("w3", inter, hidden),
                ("w2", hidden, inter),
            )
        ]
        scale = expert_input_scale(self.source, f"{prefix}.shared_experts")
        shared_scale = scale[None] if scale is not None and self.activation_quant else None
        return MoeWeights(
            gate=self._wide(f"{prefix}.gate.weight", num_experts, hidden),
            bias=self._wide(f"{prefix}.gate.bias", num_experts),
            bias_image=self._wide(image_bias, num_experts) if image_bias in self.source else None,
            routed=expert_weights(
                self.source,
                f"{prefix}.experts",
                num_experts,
                inter,
                hidden,
                self.dtype,
                activation_quant=self.activation_quant,
                packed=self.packed,
            ),
            shared=_one_expert(shared, shared_scale, self.dtype),
        )

    def _draft(self) -> DraftWeights:
        c = self.config
        hidden, rank = c.hidden_size, c.dspark_markov_rank
        last = f"mtp.{c.num_nextn_predict_layers - 1}"
        targets = len(c.dspark_target_layer_ids)
        return DraftWeights(
            main_proj=self._linear("mtp.0.main_proj", hidden, targets * hidden),
            main_norm=self._dense("mtp.0.main_norm.weight", hidden),
            stages=tuple(
                self._layer(f"mtp.{stage}", c.dspark_n_routed_experts)
                for stage in range(c.num_nextn_predict_layers)
            ),
            norm=self._dense(f"{last}.norm.weight", hidden),
            markov_embed=self._dense(f"{last}.markov_head.embed.weight", c.vocab_size, rank),
            markov_head=self._linear(f"{last}.markov_head.head", c.vocab_size, rank, self.wide),
            confidence=self._linear(f"{last}.confidence_head.proj", 1, hidden + rank, self.wide),
        )


def _one_expert(
    shared: Sequence[LinearWeight], scale: torch.Tensor | None, dtype: torch.dtype
) -> ExpertWeights:
    """w1, w3 and w2 of the shared expert, as a stack of one; w1 decides for the inputs."""
    quantized = shared[0].quantized_input
    if any(isinstance(weight, PackedLinearWeight) for weight in shared):
        w1, w3, w2 = ((w.packed if isinstance(w, PackedLinearWeight) else w.value,) for w in shared)
        return PackedExpertWeights(w1, w3, w2, dtype, quantized, scale)
    stacked1, stacked3, stacked2 = (weight.value.unsqueeze(0) for weight in shared)
    return ExpertWeights(stacked1, stacked3, stacked2, quantized, scale)
