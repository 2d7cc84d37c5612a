"""Write the weights of a checkpoint in the released layout or in float32, from any values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from builder.layout import FileSpec, WeightSpec, checkpoint_files
from builder.progress import Progress
from engine.config import ModelConfig
from engine.directory import ARCHITECTURE, CONFIG_NAME
from engine.safetensors_file import SafetensorsWriter, TensorInfo
from engine.tensor_source import INDEX_NAME
from plugins.formats.released import (
    quantize_fp4_rows,
    quantize_fp8_blocks,
    quantize_fp8_rows,
)

CheckpointFormat = Literal["released", "float32"]
Values = Callable[[WeightSpec], Iterable[torch.Tensor]]


def write_weights(
    config: ModelConfig,
    directory: Path,
    values: Values,
    format: CheckpointFormat,
    progress: Progress,
) -> None:
    """Every weight of the model, their index and `config.json`; the directory must exist.

    `values(weight)` gives a weight's float32 values in chunks of rows, each but the last a multiple
    of 32 rows. They are rounded to the stored format as the released quantisers round.
    """
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
                _write_weight(writer, weight, values(weight), format, progress)
    progress.finish()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / INDEX_NAME, index)
    write_json(directory / CONFIG_NAME, released_config(config, quantized=format == "released"))


def released_config(config: ModelConfig, *, quantized: bool) -> dict[str, Any]:
    """The nested `config.json` of a checkpoint; `read_config` reads it back."""
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
        "architectures": [ARCHITECTURE],
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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def _stored(file: FileSpec, format: CheckpointFormat) -> dict[str, TensorInfo]:
    stored: dict[str, TensorInfo] = {}
    for weight in file.weights:
        stored |= weight.released() if format == "released" else weight.float32()
    return stored


def _write_weight(
    writer: SafetensorsWriter,
    weight: WeightSpec,
    chunks: Iterable[torch.Tensor],
    format: CheckpointFormat,
    progress: Progress,
) -> None:
    for chunk in chunks:
        if format == "float32" or weight.storage == "f32":
            parts = [(weight.name, chunk)]
        elif weight.storage == "bf16":
            parts = [(weight.name, chunk.bfloat16())]
        else:
            quantize = {
                "fp8": quantize_fp8_blocks,
                "fp4": quantize_fp4_rows,
                "fp8_rows": quantize_fp8_rows,
            }[weight.storage]
            codes, scale = quantize(chunk)
            parts = [(weight.name, codes), (f"{weight.scale_name}", scale.view(torch.uint8))]
        for name, tensor in parts:
            writer.write(name, tensor)
            progress.advance(tensor.nbytes)
