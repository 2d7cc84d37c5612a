"""The model that is trained: its configuration and its initial weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from builder.layout import WeightSpec, all_weights
from builder.token_class import token_classes
from engine.config import ModelConfig
from engine.config_reader import read_config_file
from engine.directory import CONFIG_NAME
from engine.network.load import load_weights
from engine.network.weights import NetworkWeights
from engine.safetensors_file import TensorInfo
from engine.tensor_source import SafetensorsSource, TensorSource
from examples.tinyflash.tokenizer import TOKENIZER_FILE
from plugins.formats.released import (
    dequantize_fp4_rows,
    dequantize_fp8_blocks,
    dequantize_fp8_rows,
)

# How much the streams' content moves the mixes at first; their static part dominates.
_MIX_SCALE = 0.1

CONFIG_FILE = Path(__file__).parent.parent / "config.json"


@lru_cache
def model_config() -> ModelConfig:
    return read_config_file(CONFIG_FILE)[0]


def checkpoint_config(directory: Path) -> ModelConfig:
    """Raises ConfigError when there is none that can be used."""
    return read_config_file(directory / CONFIG_NAME)[0]


class CheckpointTensors:
    """A tensor source of a released checkpoint's values, every tensor as float32."""

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        self._specs = {spec.name: spec for spec in all_weights(config)}
        self._source = SafetensorsSource(directory)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def names(self) -> Iterable[str]:
        return self._specs

    def describe(self, name: str) -> TensorInfo:
        return TensorInfo("F32", self._specs[name].shape)

    def read(self, name: str) -> torch.Tensor:
        spec, stored = self._specs[name], self._source.read(name)
        if spec.scale_name is None:
            return stored.float()
        dequantize = {
            "fp8": dequantize_fp8_blocks,
            "fp4": dequantize_fp4_rows,
            "fp8_rows": dequantize_fp8_rows,
        }[spec.storage]
        return dequantize(stored, self._source.read(spec.scale_name), torch.float32)


class InitialTensors:
    """A tensor source that draws each tensor when asked for it."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._specs = {spec.name: spec for spec in all_weights(config)}
        self._generator = torch.Generator().manual_seed(seed)
        self._layers = config.num_hidden_layers
        self._streams = config.hc_mult

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def names(self) -> Iterable[str]:
        return self._specs

    def describe(self, name: str) -> TensorInfo:
        return TensorInfo("F32", self._specs[name].shape)

    def read(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        if name.endswith(("gate.bias", "gate.bias_vl", "attn_sink")):
            return torch.zeros(spec.shape)
        if name.endswith("_base"):
            return self._mix_base(name)
        if name.endswith("_scale"):
            return torch.full(spec.shape, _MIX_SCALE)
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            return torch.ones(spec.shape)
        return torch.randn(spec.shape, generator=self._generator) * self._std(spec)

    def _mix_base(self, name: str) -> torch.Tensor:
        """A sublayer reads mostly one stream, writes to all, and the streams hardly mix."""
        size = self._streams
        layer = int(name.split(".")[1])
        pre = torch.full((size,), -1.5)
        pre[layer % size] = 1.5
        return torch.cat([pre, torch.zeros(size), 3.0 * torch.eye(size).flatten()])

    def _std(self, spec: WeightSpec) -> float:
        if spec.name.endswith("embed.weight"):
            return 0.5 if "engram" not in spec.name else 0.02
        std = 1.0 / math.sqrt(spec.shape[-1])
        # What is added to the streams starts small.
        writes = spec.name.endswith(("wo_b.weight", "w2.weight"))
        return std / math.sqrt(2 * self._layers) if writes else std


def initial_weights(config: ModelConfig, seed: int) -> NetworkWeights:
    """Random float32 weights; a function of the seed."""
    return _load(config, InitialTensors(config, seed))


def checkpoint_weights(config: ModelConfig, directory: Path) -> NetworkWeights:
    """The float32 values of an exported checkpoint, to train on from."""
    return _load(config, CheckpointTensors(config, directory))


def _load(config: ModelConfig, source: TensorSource) -> NetworkWeights:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    classes = token_classes(tokenizer, config.vocab_size).astype(np.int64)
    return load_weights(config, source, classes, torch.float32)
