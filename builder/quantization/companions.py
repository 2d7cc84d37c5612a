"""What lies beside the shards of a requantised checkpoint: configuration, index, descriptions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from builder.checkpoint import Checkpoint, requantized_format
from builder.quantization.modelopt import LayerFormat, describe_layers, modelopt_version
from builder.quantization.recipe import Target, stored_format
from engine.chat_sections import CHAT_SECTIONS_NAME
from engine.directory import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    TOKEN_CLASS_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
)
from engine.safetensors_file import TensorInfo
from engine.tensor_source import INDEX_NAME

HF_QUANT_NAME = "hf_quant_config.json"
_COPIED = (
    *(TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, CHAT_SECTIONS_NAME),
    *(GENERATION_CONFIG_NAME, TOKEN_CLASS_NAME),
)
_RELEASED_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def layer_formats(
    checkpoint: Checkpoint, targets: Mapping[str, Target], calibrated: Collection[str]
) -> dict[str, LayerFormat | None]:
    """ModelOpt's format of every matrix of the output, by module name; None for the others.

    `calibrated` are the modules that get an input scale.
    """
    formats: dict[str, LayerFormat | None] = {}
    for weight in checkpoint.weights:
        target = targets[weight.name]
        kept = requantized_format(weight, checkpoint.source) if target == "source" else None
        stored = kept or stored_format(target)
        if stored == "mxfp8":
            formats[weight.base] = "mxfp8"
        elif stored == "nvfp4":
            keeps = target == "source" and weight.input_scale_name in checkpoint.source
            scaled = weight.base in calibrated or keeps
            formats[weight.base] = "nvfp4" if scaled else "w4a16_nvfp4"
        elif len(weight.shape) == 2 and weight.name.endswith(".weight"):
            formats[weight.base] = None
    return formats


def write_companions(
    checkpoint: Checkpoint,
    directory: Path,
    formats: Mapping[str, LayerFormat | None],
    shards: Mapping[str, Mapping[str, TensorInfo]],
    *,
    released: bool,
) -> None:
    """Copy the tokenizer and its like; write config.json, the index and hf_quant_config.json.

    `released`: the output has the released layout, which config.json then says.
    """
    for name in _COPIED:
        if (checkpoint.directory / name).is_file():
            shutil.copyfile(checkpoint.directory / name, directory / name)
    weight_map = {name: shard for shard, stored in shards.items() for name in stored}
    total = sum(info.num_bytes for stored in shards.values() for info in stored.values())
    write_json(
        directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    config: dict[str, Any] = json.loads((checkpoint.directory / CONFIG_NAME).read_text())
    if any(formats.values()):
        description, config["quantization_config"] = describe_layers(formats)
        producer = {"name": "modelopt", "version": modelopt_version()}
        write_json(directory / HF_QUANT_NAME, {"producer": producer, **description})
    elif released:
        config["quantization_config"] = _RELEASED_CONFIG
    write_json(directory / CONFIG_NAME, config)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))
