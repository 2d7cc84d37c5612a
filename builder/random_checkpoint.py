"""Write a random checkpoint of any configuration, in the released layout or in float32.

Distributions: matrices normal with std 1/√(fan in) (routers, mixes and the compressor's gate twice
that), embeddings, tables and sinks std 1, norms 1 + 0.1·normal, router biases 0.2·normal. Every
tensor has its own random stream, seeded by the seed and its name, so a tensor does not depend on
which others are written. Nothing larger than a chunk of one tensor is held in memory.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from builder.assemble import check_output, complete_directory
from builder.byte_tokenizer import byte_tokenizer, tokenizer_config
from builder.layout import Init, WeightSpec
from builder.presets import check_table_rows
from builder.progress import Progress
from builder.token_class import proportional_token_class, read_tokenizer
from builder.write_checkpoint import CheckpointFormat, write_json, write_weights
from engine.config import ModelConfig
from engine.directory import (
    GENERATION_CONFIG_NAME,
    TOKEN_CLASS_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
)

# A multiple of the block height; 16 Mi values are 64 MiB in float32.
_CHUNK_VALUES = 16 << 20
_ROW_ALIGNMENT = 32


@dataclass(frozen=True)
class _Distribution:
    mean: float
    std: float


def init_checkpoint(
    config: ModelConfig,
    output: Path,
    *,
    seed: int,
    format: CheckpointFormat,
    tokenizer_file: Path | None,
    progress: Progress,
) -> None:
    """Write a whole checkpoint: weights, configuration, tokenizer, Engram classes.

    Written under a temporary name and renamed when complete. Without `tokenizer_file` the
    tokenizer is byte-level. Raises ConfigError when the output directory is not free or the
    vocabulary is too small.
    """
    check_output(output)
    check_table_rows(config)
    tokenizer = byte_tokenizer(config) if tokenizer_file is None else None
    if tokenizer_file is not None:
        read_tokenizer(config, tokenizer_file)
    with complete_directory(output) as partial:
        write_weights(
            config, partial, lambda weight: _random_chunks(weight, seed), format, progress
        )
        if tokenizer is not None:
            tokenizer.save(str(partial / TOKENIZER_NAME))
            write_json(partial / TOKENIZER_CONFIG_NAME, tokenizer_config(config))
        elif tokenizer_file is not None:
            shutil.copyfile(tokenizer_file, partial / TOKENIZER_NAME)
        np.save(partial / TOKEN_CLASS_NAME, proportional_token_class(config))
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(
            partial / GENERATION_CONFIG_NAME, {name: getattr(config, name) for name in special}
        )


def _random_chunks(weight: WeightSpec, seed: int) -> Iterator[torch.Tensor]:
    digest = hashlib.sha256(f"{seed}:{weight.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    spread = _distribution(weight)
    rows, row_values = weight.shape[0], math.prod(weight.shape[1:])
    step = max(_CHUNK_VALUES // row_values // _ROW_ALIGNMENT, 1) * _ROW_ALIGNMENT
    for start in range(0, rows, step):
        shape = (min(step, rows - start), *weight.shape[1:])
        yield torch.randn(shape, generator=generator).mul_(spread.std).add_(spread.mean)


def _distribution(weight: WeightSpec) -> _Distribution:
    fan_in = weight.shape[-1]
    return {
        Init.MATRIX: _Distribution(0.0, fan_in**-0.5),
        Init.DOUBLED: _Distribution(0.0, 2 * fan_in**-0.5),
        Init.UNIT: _Distribution(0.0, 1.0),
        Init.NORM: _Distribution(1.0, 0.1),
        Init.BASE: _Distribution(0.0, 0.5),
        Init.SCALE: _Distribution(0.5, 0.3),
        Init.BIAS: _Distribution(0.0, 0.2),
    }[weight.init]
