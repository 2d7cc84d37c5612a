"""Which part of each weight a rank holds, and writing the file of one rank.

Columns of a layer are rows of its weight [out, in]: query heads with their sinks, output groups,
the vocabulary, the shared expert's inner width. Rows of a layer are the weight's columns; their
partial results are summed over ranks. Routed experts go whole, in contiguous ranges. The KV latent,
compressors, indexers, mixes, norms and routers are on every rank, because all heads share one
latent. Engram tables are files that all ranks map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from builder.checkpoint import check_weight
from builder.layout import Shard, WeightSpec
from builder.progress import Progress
from builder.values import check_values
from engine.config import ConfigError, ModelConfig
from engine.safetensors_file import SafetensorsWriter, TensorInfo
from engine.tensor_source import TensorSource
from plugins.formats.released import BLOCK


@dataclass(frozen=True)
class RankTensor:
    """One stored tensor of a rank: rows and columns (None where all) of the checkpoint's."""

    name: str
    info: TensorInfo
    rows: slice
    columns: slice | None

    def read(self, source: TensorSource) -> torch.Tensor:
        if not self.info.shape:
            return source.read(self.name)
        whole = source.read(self.name)[self.rows]
        return whole if self.columns is None else whole[:, self.columns].contiguous()


def check_world_size(config: ModelConfig, world_size: int) -> None:
    """Raise ConfigError naming what cannot be divided over `world_size` ranks."""
    parts = {
        "num_attention_heads": config.num_attention_heads,
        "o_groups": config.o_groups,
        "vocab_size": config.vocab_size,
        "n_routed_experts": config.n_routed_experts,
        "dspark_n_routed_experts": config.dspark_n_routed_experts,
        "blocks of 32 in moe_intermediate_size": config.moe_intermediate_size // BLOCK,
        "blocks of 32 in o_groups · o_lora_rank": config.o_groups * config.o_lora_rank // BLOCK,
    }
    for name, count in parts.items():
        if count % world_size:
            raise ConfigError(
                f"tp_size: expected a divisor of {name} = {count}, got {world_size}; "
                "choose fewer ranks"
            )


def rank_tensors(
    weights: Iterable[WeightSpec],
    config: ModelConfig,
    source: TensorSource,
    rank: int,
    world_size: int,
) -> Iterator[RankTensor]:
    """The stored tensors of `rank`; of a table only its global scale, where it has one.

    The world size must divide the model.
    """
    for weight in weights:
        if not _owns_expert(weight, config, rank, world_size):
            continue
        for name in check_weight(weight, source):
            info = source.describe(name)
            if not info.shape:  # a global scale, which every rank and every table needs
                yield RankTensor(name, info, slice(None), None)
                continue
            if weight.shard is Shard.TABLE:
                continue
            shape = list(info.shape)
            rows, columns = slice(None), None
            if weight.shard is Shard.COLUMNS:
                rows = _part(shape[0], rank, world_size)
                shape[0] //= world_size
            elif weight.shard is Shard.ROWS:
                columns = _part(shape[1], rank, world_size)
                shape[1] //= world_size
            yield RankTensor(name, TensorInfo(info.dtype, tuple(shape)), rows, columns)


def write_rank(
    path: Path, tensors: Iterable[RankTensor], source: TensorSource, progress: Progress
) -> list[str]:
    """Write one rank's safetensors file; the tensors are read one by one.

    Returns the names of tensors with huge values. Raises CheckpointError for a NaN or an infinity.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    header = {name: tensor.info for name, tensor in by_name.items()}
    huge = []
    with SafetensorsWriter(path, header, {"format": "pt"}) as writer:
        for name, tensor in by_name.items():
            stored = tensor.read(source)
            if check_values(name, stored, tensor.info.dtype, tensor.rows.start or 0):
                huge.append(name)
            writer.write(name, stored)
            progress.advance(tensor.info.num_bytes)
    return huge


def rank_bytes(
    config: ModelConfig, sizes: Iterable[tuple[WeightSpec, int]], world_size: int
) -> int:
    """Bytes on the largest rank, given each weight's stored bytes; tables are left out."""
    total = 0
    for weight, num_bytes in sizes:
        if weight.shard is Shard.TABLE or not _owns_expert(weight, config, 0, world_size):
            continue
        divided = weight.shard in (Shard.COLUMNS, Shard.ROWS)
        total += num_bytes // world_size if divided else num_bytes
    return total


def _part(size: int, rank: int, world_size: int) -> slice:
    share = size // world_size
    return slice(rank * share, (rank + 1) * share)


def _owns_expert(weight: WeightSpec, config: ModelConfig, rank: int, world_size: int) -> bool:
    if weight.expert is None:
        return True
    draft = weight.name.startswith("mtp.")
    experts = config.dspark_n_routed_experts if draft else config.n_routed_experts
    return weight.expert // (experts // world_size) == rank
