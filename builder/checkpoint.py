"""A checkpoint directory, checked whole before anything long is done with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from builder.layout import Requantized, WeightSpec, all_weights
from builder.presets import check_table_rows
from builder.token_class import (
    Int32Array,
    computed_token_class,
    read_token_class,
    read_tokenizer,
)
from engine.chat_sections import ChatSections
from engine.config import ConfigError, ModelConfig
from engine.config_reader import read_config_file
from engine.directory import GENERATION_CONFIG_NAME, TOKENIZER_CONFIG_NAME
from engine.json_file import read_json
from engine.manifest import MANIFEST_NAME
from engine.safetensors_file import TensorInfo
from engine.tensor_source import FLOAT_DTYPES, CheckpointError, SafetensorsSource, TensorSource

# Tensors of the released files that belong to the vision tower.
_VISION_PREFIXES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
_STORAGE_TITLES = {"fp8": "linears", "fp4": "experts", "fp8_rows": "engram_rows"}
_DTYPE_TITLES = {"F8_E4M3": "fp8", "I8": "fp4"}


@dataclass(frozen=True)
class Checkpoint:
    """Configuration and weights. `warnings` are for the user: ignored keys and tensors."""

    directory: Path
    config: ModelConfig
    source: SafetensorsSource
    weights: tuple[WeightSpec, ...]
    warnings: tuple[str, ...]

    @staticmethod
    def open(directory: Path) -> Checkpoint:
        """Read config.json and all headers; check every tensor's presence, dtype and shape, and
        that the tokenizer, where there is one, is the model's.

        Raises ConfigError or CheckpointError with one sentence.
        """
        if not directory.is_dir():
            raise CheckpointError(
                f"expected a checkpoint directory at {directory}, found none; check the path"
            )
        if (directory / MANIFEST_NAME).is_file():
            raise CheckpointError(
                f"{directory} is an engine, expected a checkpoint; give it with --engine"
            )
        config, warnings = read_config_file(directory / "config.json")
        check_table_rows(config)
        source = SafetensorsSource(directory)
        present: list[WeightSpec] = []
        known: set[str] = set()
        for weight in all_weights(config):
            names = check_weight(weight, source)
            known.update(names)
            if names:
                present.append(weight)
        unknown = [name for name in source.names() if name not in known]
        strange = [name for name in unknown if not name.startswith(_VISION_PREFIXES)]
        if len(strange) < len(unknown):
            warnings.append("the vision tower is ignored: only the text model is read")
        if strange:
            warnings.append(
                f"{len(strange)} tensors are ignored: not part of this model, such as {strange[0]}"
            )
        checkpoint = Checkpoint(directory, config, source, tuple(present), tuple(warnings))
        if checkpoint.tokenizer_file is not None:
            read_tokenizer(config, checkpoint.tokenizer_file)
        for name in (TOKENIZER_CONFIG_NAME, GENERATION_CONFIG_NAME):
            _check_json(directory / name)
        ChatSections.read(directory)
        return checkpoint

    @property
    def quantization(self) -> dict[str, str]:
        """How linears, experts and engram_rows are stored: fp8, fp4, mxfp8, nvfp4, nvfp4-w4a4
        (with the scale of an NVFP4 input), or a float dtype."""
        found: dict[str, set[str]] = {title: set() for title in _STORAGE_TITLES.values()}
        for weight in self.weights:
            title = _STORAGE_TITLES.get(weight.storage)
            if title is not None:
                w4a4 = weight.input_scale_name in self.source
                found[title].add(
                    ("nvfp4-w4a4" if w4a4 else requantized_format(weight, self.source))
                    or _DTYPE_TITLES.get(dtype := self.source.describe(weight.name).dtype)
                    or dtype.lower()
                )
        return {title: " and ".join(sorted(dtypes)) or "none" for title, dtypes in found.items()}

    @property
    def tokenizer_file(self) -> Path | None:
        path = self.directory / "tokenizer.json"
        return path if path.is_file() else None

    def token_class(self, given: Path | None) -> tuple[Int32Array, str]:
        """Engram classes int32 [vocab_size] and where they come from.

        In this order: the file that the user gave, the checkpoint's token_class.npy, its
        tokenizer. Raises ConfigError when there is none of them or it does not fit the model.
        """
        stored = self.directory / "token_class.npy"
        if given is not None:
            return read_token_class(self.config, given), given.name
        if stored.is_file():
            return read_token_class(self.config, stored), stored.name
        if self.tokenizer_file is not None:
            return computed_token_class(self.config, self.tokenizer_file), "tokenizer.json"
        raise ConfigError(
            f"expected token_class.npy or tokenizer.json in {self.directory}, found neither; "
            "give the Engram classes with --token-class"
        )


def _check_json(path: Path) -> None:
    """Raise CheckpointError when the file is there and is not a JSON object."""
    if not path.is_file():
        return
    try:
        value = read_json(path)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object; restore or remove the file")


def requantized_format(weight: WeightSpec, source: TensorSource) -> Requantized | None:
    """Which of ModelOpt's layouts a weight has, None where it is as released or unquantised."""
    if weight.scale_name is None or f"{weight.base}.weight_scale" not in source:
        return None
    return "nvfp4" if source.describe(weight.name).dtype == "U8" else "mxfp8"


def check_weight(weight: WeightSpec, source: TensorSource) -> tuple[str, ...]:
    """The names of a weight's stored tensors, () where an optional weight is not there.

    Quantised weights must have the released layout or one of ModelOpt's; others may be stored in
    any float dtype. Raises CheckpointError naming the tensor.
    """
    if weight.name not in source and weight.name.endswith(".bias_vl"):
        return ()  # only image spans use it
    stored = source.describe(weight.name)
    requantized = requantized_format(weight, source)
    expected = weight.requantized(requantized) if requantized else weight.released()
    if requantized == "nvfp4" and weight.input_scale_name in source:
        expected[weight.input_scale_name] = TensorInfo("F32", ())
    if stored.dtype not in FLOAT_DTYPES and weight.scale_name is not None:
        for name, info in expected.items():
            if source.describe(name) != info:
                raise CheckpointError(
                    f"{name}: expected {info}, got {source.describe(name)}; "
                    "the checkpoint does not belong to this configuration"
                )
        return tuple(expected)
    if stored.dtype not in FLOAT_DTYPES or stored.shape != weight.shape:
        quantized = f"{expected[weight.name]} or " if weight.scale_name else ""
        raise CheckpointError(
            f"{weight.name}: expected {quantized}{'/'.join(FLOAT_DTYPES)} {list(weight.shape)}, "
            f"got {stored}; the checkpoint does not belong to this configuration"
        )
    return (weight.name,)
