"""Write a random checkpoint of any configuration, in the released layout or in float32.

Distributions: matrices normal with std 1/√(fan in) (routers, mixes and the compressor's gate twice
that), embeddings, tables and sinks std 1, norms 1 + 0.1·normal, router biases 0.2·normal. Every
tensor has its own random stream, seeded by the seed and its name, so a tensor does not depend on
which others are written. Nothing larger than a chunk of one tensor is held in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from builder.assemble import check_output, fresh_partial
from builder.byte_tokenizer import byte_tokenizer, tokenizer_config
from builder.layout import FileSpec, Init, WeightSpec, checkpoint_files
from builder.presets import check_table_rows
from builder.progress import Progress
from builder.token_class import proportional_token_class, read_tokenizer
from engine.config import ModelConfig
from engine.directory import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    TOKEN_CLASS_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
)
from engine.safetensors_file import SafetensorsWriter, TensorInfo
from engine.tensor_source import INDEX_NAME
from plugins.formats.released import (
    quantize_fp4_rows,
    quantize_fp8_blocks,
    quantize_fp8_rows,
)

CheckpointFormat = Literal["released", "float32"]

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
    partial = fresh_partial(output)
    _write_weights(config, partial, seed, format, progress)
    if tokenizer is not None:
        tokenizer.save(str(partial / TOKENIZER_NAME))
        _write_json(partial / TOKENIZER_CONFIG_NAME, tokenizer_config(config))
    elif tokenizer_file is not None:
        shutil.copyfile(tokenizer_file, partial / TOKENIZER_NAME)
    np.save(partial / TOKEN_CLASS_NAME, proportional_token_class(config))
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(partial / GENERATION_CONFIG_NAME, {name: getattr(config, name) for name in special})
    os.rename(partial, output)


def _write_weights(
    config: ModelConfig, directory: Path, seed: int, format: CheckpointFormat, progress: Progress
) -> None:
    files = list(checkpoint_files(config))
    total = sum(info.num_bytes for file in files for info in _stored(file, format).values())
    progress.start("writing weights", total)
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        stored = _stored(file, format)
        weight_map.update(dict.fromkeys(stored, name))
        with SafetensorsWriter(directory / name, stored, {"format": "pt"}) as writer:
            for weight in file.weights:
                _write_weight(writer, weight, seed, format, progress)
    progress.finish()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / INDEX_NAME, index)
    _write_json(directory / CONFIG_NAME, released_config(config, quantized=format == "released"))


def released_config(config: ModelConfig, *, quantized: bool) -> dict[str, Any]:
    """The nested `config.json` of a checkpoint; `ModelConfig.from_dict` reads it back."""
    text = config.to_dict()
    top_level = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
    tokens = {key: text.pop(key) for key in top_level}
    text["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": text.pop("rope_factor"),
        "beta_fast": text.pop("rope_beta_fast"),
        "beta_slow": text.pop("rope_beta_slow"),
        "original_max_position_embeddings": text.pop("rope_original_length"),
    }
    text |= {
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    result: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        **tokens,
        "dtype": "bfloat16" if quantized else "float32",
        "text_config": text,
    }
    if quantized:
        result["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    return result


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def _stored(file: FileSpec, format: CheckpointFormat) -> dict[str, TensorInfo]:
    stored: dict[str, TensorInfo] = {}
    for weight in file.weights:
        stored |= weight.released() if format == "released" else weight.float32()
    return stored


def _write_weight(
    writer: SafetensorsWriter,
    weight: WeightSpec,
    seed: int,
    format: CheckpointFormat,
    progress: Progress,
) -> None:
    for values in _random_chunks(weight, seed):
        if format == "float32" or weight.storage == "f32":
            parts = [(weight.name, values)]
        elif weight.storage == "bf16":
            parts = [(weight.name, values.bfloat16())]
        else:
            quantize = {
                "fp8": quantize_fp8_blocks,
                "fp4": quantize_fp4_rows,
                "fp8_rows": quantize_fp8_rows,
            }[weight.storage]
            codes, scale = quantize(values)
            parts = [(weight.name, codes), (f"{weight.scale_name}", scale.view(torch.uint8))]
        for name, tensor in parts:
            writer.write(name, tensor)
            progress.advance(tensor.nbytes)


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
