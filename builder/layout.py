"""Every tensor of a checkpoint as one table: name, shape, stored format, class, shard rule, init.

The released layout: FP8 E4M3 linears with one E8M0 scale per 32×32 block, FP4 routed experts with
one per 32 inputs of a row, FP8 Engram rows with one per 32 values, BF16 and F32 for the rest. Each
rank of a tensor-parallel engine gets the slice that `Shard` names. The vision tower is not part of
the text model and is left out. ModelOpt's layouts for requantised weights: see `requantized`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from engine.config import ModelConfig
from engine.safetensors_file import TensorInfo
from plugins.formats.released import BLOCK

Storage = Literal["fp8", "fp4", "fp8_rows", "bf16", "f32"]
Requantized = Literal["nvfp4", "mxfp8"]


class Shard(Enum):
    """How a weight [out, in] is divided over the ranks of an engine."""

    REPLICATED = "replicated"
    COLUMNS = "columns"  # of the layer: output rows of the weight (heads, vocabulary, experts' I)
    ROWS = "rows"  # of the layer: input columns of the weight; a sum over ranks follows
    EXPERTS = "experts"  # whole experts, contiguous ranges of ids
    TABLE = "table"  # one memory-mapped file that all ranks share


class Init(Enum):
    """How a random checkpoint fills a tensor."""

    MATRIX = "matrix"  # normal, std 1/sqrt(fan in)
    DOUBLED = "doubled"  # the same, twice as wide: gates and mixes
    UNIT = "unit"  # normal, std 1: embeddings, tables, sinks
    NORM = "norm"  # 1 + 0.1·normal
    BASE = "base"  # 0.5·normal
    SCALE = "scale"  # 0.5 + 0.3·normal
    BIAS = "bias"  # 0.2·normal


@dataclass(frozen=True)
class WeightSpec:
    """One weight. `shape` counts values; `group` is the line of `inspect` that it belongs to."""

    name: str
    shape: tuple[int, ...]
    storage: Storage
    group: str
    shard: Shard
    init: Init
    expert: int | None = None

    @property
    def scale_name(self) -> str | None:
        """The tensor that holds the scales in the released layout, None where there are none."""
        if self.storage in ("bf16", "f32"):
            return None
        return self.name.removesuffix(".weight") + ".scale"

    def released(self) -> dict[str, TensorInfo]:
        """The stored tensors of the released layout, by name."""
        if self.storage in ("bf16", "f32"):
            return {self.name: TensorInfo(self.storage.upper(), self.shape)}
        rows, columns = self.shape
        scales = TensorInfo("F8_E8M0", (rows, columns // BLOCK))
        if self.storage == "fp4":
            values = TensorInfo("I8", (rows, columns // 2))
        else:
            values = TensorInfo("F8_E4M3", self.shape)
            if self.storage == "fp8":
                grid = (-(-rows // BLOCK), -(-columns // BLOCK))
                scales = TensorInfo("F8_E8M0", grid)
        return {self.name: values, f"{self.scale_name}": scales}

    @property
    def base(self) -> str:
        """The name without `.weight`; the names of companions begin so."""
        return self.name.removesuffix(".weight")

    @property
    def input_scale_name(self) -> str:
        """The float32 [] tensor that holds the scale of a calibrated input, beside NVFP4 codes."""
        return f"{self.base}.input_scale"

    def requantized(self, format: Requantized) -> dict[str, TensorInfo]:
        """The stored tensors of a weight that ModelOpt quantised: codes, scales of 32 (MXFP8) or
        16 (NVFP4) inputs of a row, and NVFP4's global scale."""
        rows, columns = self.shape
        if format == "mxfp8":
            return {
                self.name: TensorInfo("F8_E4M3", self.shape),
                f"{self.base}.weight_scale": TensorInfo("U8", (rows, columns // 32)),
            }
        return {
            self.name: TensorInfo("U8", (rows, columns // 2)),
            f"{self.base}.weight_scale": TensorInfo("F8_E4M3", (rows, columns // 16)),
            f"{self.base}.weight_scale_2": TensorInfo("F32", ()),
        }

    def float32(self) -> dict[str, TensorInfo]:
        """The stored tensors of an unquantised float32 checkpoint."""
        return {self.name: TensorInfo("F32", self.shape)}


@dataclass(frozen=True)
class FileSpec:
    """The weights of one shard of a checkpoint, in the released order of shards."""

    title: str
    weights: tuple[WeightSpec, ...]


def checkpoint_files(config: ModelConfig) -> Iterator[FileSpec]:
    """The shards of a checkpoint: embedding, one per layer, head, one per stage, one per table."""
    vocabulary = (config.vocab_size, config.hidden_size)
    yield FileSpec("embedding", (_vocabulary("embed.weight", vocabulary, Init.UNIT),))
    for layer in range(config.num_hidden_layers):
        yield FileSpec(f"layer {layer}", tuple(_backbone_layer(config, layer)))
    norm = _norm("norm.weight", config.hidden_size, "other")
    yield FileSpec("head", (_vocabulary("head.weight", vocabulary, Init.MATRIX), norm))
    for stage in range(config.num_nextn_predict_layers):
        yield FileSpec(f"draft stage {stage}", tuple(_draft_stage(config, stage)))
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        table = WeightSpec(
            f"layers.{layer}.engram.embed.weight",
            (rows, config.engram_head_dim),
            "fp8_rows",
            "Engram tables",
            Shard.TABLE,
            Init.UNIT,
        )
        yield FileSpec(f"Engram table of layer {layer}", (table,))


def all_weights(config: ModelConfig) -> Iterator[WeightSpec]:
    for file in checkpoint_files(config):
        yield from file.weights


def _backbone_layer(config: ModelConfig, layer: int) -> Iterator[WeightSpec]:
    prefix = f"layers.{layer}"
    yield from _block(config, prefix, config.n_routed_experts, "routed experts")
    hidden, attn = config.hidden_size, f"{prefix}.attn"
    if config.is_kv_source(layer):
        group = "compressors and indexers"
        head, index = config.head_dim, config.index_head_dim
        yield _bf16(f"{attn}.compressor.wkv.weight", (head, hidden), group)
        if config.ratio(layer) == 2:
            yield _bf16(f"{attn}.compressor.wgate.weight", (head, hidden), group, Init.DOUBLED)
        yield _norm(f"{attn}.compressor.norm.weight", head, group)
        yield _bf16(f"{attn}.indexer.wk.weight", (index, head), group)
        yield _norm(f"{attn}.indexer.k_norm.weight", index, group)
    if config.is_index_source(layer):
        group = "compressors and indexers"
        heads = config.index_n_heads
        yield _fp8(
            f"{attn}.indexer.wq_b.weight",
            (heads * config.index_head_dim, config.q_lora_rank),
            group,
            Shard.REPLICATED,
        )
        yield _bf16(f"{attn}.indexer.weights_proj.weight", (heads, hidden), group)
    if layer in config.engram_layer_ids:
        streams = config.hc_mult
        values = ((streams + 1) * hidden, config.engram_columns * config.engram_head_dim)
        yield _fp8(f"{prefix}.engram.wkv.weight", values, "Engram gates", Shard.REPLICATED)
        for side in ("q", "k"):
            yield _bf16(
                f"{prefix}.engram.{side}_weight", (streams, hidden), "Engram gates", Init.NORM
            )


def _draft_stage(config: ModelConfig, stage: int) -> Iterator[WeightSpec]:
    prefix, group, hidden = f"mtp.{stage}", "draft", config.hidden_size
    yield from _block(config, prefix, config.dspark_n_routed_experts, "draft experts")
    if stage == 0:
        features = len(config.dspark_target_layer_ids) * hidden
        yield _fp8(f"{prefix}.main_proj.weight", (hidden, features), group, Shard.REPLICATED)
        yield _norm(f"{prefix}.main_norm.weight", hidden, group)
    if stage == config.num_nextn_predict_layers - 1:
        rank = config.dspark_markov_rank
        pair = (config.vocab_size, rank)
        yield _norm(f"{prefix}.norm.weight", hidden, group)
        yield _bf16(f"{prefix}.markov_head.embed.weight", pair, group, Init.UNIT)
        yield WeightSpec(
            f"{prefix}.markov_head.head.weight", pair, "bf16", group, Shard.COLUMNS, Init.MATRIX
        )
        yield _bf16(f"{prefix}.confidence_head.proj.weight", (1, hidden + rank), group)


def _block(
    config: ModelConfig, prefix: str, num_experts: int, experts_group: str
) -> Iterator[WeightSpec]:
    """What every layer and every draft stage has: norms, attention, mixes, experts."""
    hidden, inter, heads = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_attention_heads,
    )
    attn, group = f"{prefix}.attn", "attention"
    for name in ("attn_norm", "ffn_norm"):
        yield _norm(f"{prefix}.{name}.weight", hidden, "other")
    lora, head = config.q_lora_rank, config.head_dim
    yield _fp8(f"{attn}.wq_a.weight", (lora, hidden), group, Shard.REPLICATED)
    yield _norm(f"{attn}.q_norm.weight", lora, group)
    yield _fp8(f"{attn}.wq_b.weight", (heads * head, lora), group, Shard.COLUMNS)
    yield _fp8(f"{attn}.wkv.weight", (head, hidden), group, Shard.REPLICATED)
    yield _norm(f"{attn}.kv_norm.weight", head, group)
    out = config.o_groups * config.o_lora_rank
    group_width = heads // config.o_groups * head
    yield _fp8(f"{attn}.wo_a.weight", (out, group_width), group, Shard.COLUMNS)
    yield _fp8(f"{attn}.wo_b.weight", (hidden, out), group, Shard.ROWS)
    yield WeightSpec(f"{attn}.attn_sink", (heads,), "f32", group, Shard.COLUMNS, Init.UNIT)
    for part in ("attn", "ffn"):
        mixes, streams = config.hc_rows, config.hc_mult
        yield _f32(f"{prefix}.hc_{part}_fn", (mixes, streams * hidden), Init.DOUBLED)
        yield _f32(f"{prefix}.hc_{part}_base", (mixes,), Init.BASE)
        yield _f32(f"{prefix}.hc_{part}_scale", (3,), Init.SCALE)
    ffn = f"{prefix}.ffn"
    yield _bf16(f"{ffn}.gate.weight", (num_experts, hidden), "routers", Init.DOUBLED)
    for name in ("bias", "bias_vl"):
        yield _f32(f"{ffn}.gate.{name}", (num_experts,), Init.BIAS, "routers")
    for expert in range(num_experts):
        for name, shape in _expert_shapes(inter, hidden):
            yield WeightSpec(
                f"{ffn}.experts.{expert}.{name}.weight",
                shape,
                "fp4",
                experts_group,
                Shard.EXPERTS,
                Init.MATRIX,
                expert,
            )
    for name, shape in _expert_shapes(inter, hidden):
        shard = Shard.ROWS if name == "w2" else Shard.COLUMNS
        yield _fp8(f"{ffn}.shared_experts.{name}.weight", shape, "shared experts", shard)


def _expert_shapes(inter: int, hidden: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("w1", (inter, hidden)), ("w2", (hidden, inter)), ("w3", (inter, hidden))


def _fp8(name: str, shape: tuple[int, int], group: str, shard: Shard) -> WeightSpec:
    return WeightSpec(name, shape, "fp8", group, shard, Init.MATRIX)


def _bf16(name: str, shape: tuple[int, ...], group: str, init: Init = Init.MATRIX) -> WeightSpec:
    return WeightSpec(name, shape, "bf16", group, Shard.REPLICATED, init)


def _f32(name: str, shape: tuple[int, ...], init: Init, group: str = "mixes") -> WeightSpec:
    return WeightSpec(name, shape, "f32", group, Shard.REPLICATED, init)


def _norm(name: str, width: int, group: str) -> WeightSpec:
    return _bf16(name, (width,), group, Init.NORM)


def _vocabulary(name: str, shape: tuple[int, int], init: Init) -> WeightSpec:
    return WeightSpec(name, shape, "bf16", "embedding and head", Shard.COLUMNS, init)
