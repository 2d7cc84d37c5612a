"""The engine directory: what `dsv41-build engine` writes and an executor opens.

    config.json               pretrained_config and build_config, Engram table files; see below
    rankN.safetensors         weights of rank N; names, dtypes and scales as in the checkpoint
    engram.L.bin              rows of layer L's table from byte 0 on, no header, shared by all ranks
    token_class.npy           int32 [vocab_size], Engram class of each token id
    tokenizer.json, tokenizer_config.json, chat_sections.json, generation_config.json
                              where there are any
    kernels/                  where asked for: kernels.json, compiled kernels of each target
    plans/                    where asked for: SEGMENT.onnx, SEGMENT.plan, weights.bin, plans.json
    manifest.json             sizes and hashes of all of these, written last

config.json has the shape of TensorRT-LLM's engines (1.2): `pretrained_config` is the model with its
architecture, mapping of ranks and quantisation, `build_config` the limits. Quantisation is told per
class of weights, and there is no dtype, which is chosen when serving.

Built under `<name>.partial` and renamed when complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine.config import ConfigError, ModelConfig
from engine.config_reader import read_config
from engine.manifest import FORMAT_VERSION, Advance, EngineError, Manifest
from engine.safetensors_file import STORED_AS, TensorInfo, map_file
from engine.tensor_source import (
    CheckpointError,
    CountedSource,
    SafetensorsSource,
    TensorSource,
    total_bytes,
)

if TYPE_CHECKING:
    from engine.network.weights import NetworkWeights

__all__ = ["PARTIAL_SUFFIX", "BuildConfig", "Engine", "EngineError", "EngramTableFile", "rank_file"]

PARTIAL_SUFFIX = ".partial"
ARCHITECTURE = "DeepseekV41ForCausalLM"
CONFIG_NAME = "config.json"
TOKEN_CLASS_NAME = "token_class.npy"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


def rank_file(rank: int) -> str:
    """The file of one rank's weights."""
    return f"rank{rank}.safetensors"


@dataclass(frozen=True)
class BuildConfig:
    """The limits that an engine was built for. Named as trtllm-build names its options."""

    max_batch_size: int  # requests in one step
    max_num_tokens: int  # rows in one step
    max_seq_len: int  # prompt and output of one request
    tp_size: int = 1  # ranks

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError when these limits do not fit the model."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name}: expected a positive number, got {value}")
        if self.max_num_tokens < 2 * config.sliding_window:
            raise ConfigError(
                f"max_num_tokens: expected at least two windows, {2 * config.sliding_window}, so "
                f"that a replayed window and new tokens fit one step, got {self.max_num_tokens}"
            )
        if self.max_seq_len > config.max_position_embeddings:
            raise ConfigError(
                f"max_seq_len: expected at most max_position_embeddings = "
                f"{config.max_position_embeddings}, got {self.max_seq_len}"
            )


@dataclass(frozen=True)
class EngramTableFile:
    """One mapped table. dtype "U8" means packed records, a float dtype plain rows."""

    layer: int
    file: str
    dtype: str
    rows: int
    row_width: int  # elements of `dtype`: a record's bytes, or the row's values

    @property
    def tensor_name(self) -> str:
        """The name under which `Engine.source` offers the rows."""
        return f"layers.{self.layer}.engram.embed.{'rows' if self.dtype == 'U8' else 'weight'}"

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.dtype, (self.rows, self.row_width))


@dataclass(frozen=True)
class Engine:
    """An opened engine. Weights are mapped, not read, until `load_weights`."""

    path: Path
    config: ModelConfig
    build: BuildConfig
    quantization: Mapping[str, str]
    tables: tuple[EngramTableFile, ...]
    manifest: Manifest

    @staticmethod
    def open(path: Path, *, verify: bool = False, advance: Advance = lambda _: None) -> Engine:
        """Check the files against the manifest and read the configuration.

        Sizes of all files and hashes of small ones are always checked, a large rank file's hash
        when its weights are loaded, all hashes with `verify`; `advance` gets bytes hashed.
        Raises EngineError naming what is unfinished, altered or of another format version.
        """
        if not path.is_dir():
            raise EngineError(
                f"expected an engine directory at {path}, found none; "
                "build one with dsv41-build engine"
            )
        if path.name.endswith(PARTIAL_SUFFIX):
            raise EngineError(
                f"{path} is an engine that was never finished; build it again with "
                "dsv41-build engine"
            )
        manifest = Manifest.read(path)
        manifest.check(path, verify=verify, advance=advance)
        for name in (CONFIG_NAME, TOKEN_CLASS_NAME):
            if name not in manifest.files:
                raise EngineError(f"{path} is not an engine: its manifest does not list {name}")
        return Engine.described(path, manifest)

    @staticmethod
    def described(path: Path, manifest: Manifest) -> Engine:
        """What its config.json says, unchecked: also of an engine that is being built."""
        raw = json.loads((path / CONFIG_NAME).read_text())
        model = raw["pretrained_config"]
        quantization, mapping = model.pop("quantization"), model.pop("mapping")
        del model["architecture"]
        config, _ = read_config(model)
        return Engine(
            path=path,
            config=config,
            build=BuildConfig(**raw["build_config"], tp_size=mapping["tp_size"]),
            quantization=quantization,
            tables=tuple(EngramTableFile(**entry) for entry in raw["engram_tables"]),
            manifest=manifest,
        )

    def config_json(self) -> str:
        """The text of config.json."""
        limits = asdict(self.build)
        ranks = limits.pop("tp_size")
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "pretrained_config": {
                    "architecture": ARCHITECTURE,
                    "mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1},
                    "quantization": dict(self.quantization),
                    **self.config.to_dict(),
                },
                "build_config": limits,
                "engram_tables": [asdict(table) for table in self.tables],
            },
            indent=1,
        )

    @cached_property
    def token_class(self) -> npt.NDArray[np.int32]:
        """int32 [vocab_size], the Engram class of each token id."""
        classes: npt.NDArray[np.int32] = np.load(self.path / TOKEN_CLASS_NAME, allow_pickle=False)
        return classes

    @property
    def tokenizer_path(self) -> Path | None:
        """tokenizer.json, None for an engine without text."""
        path = self.path / TOKENIZER_NAME
        return path if path.is_file() else None

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's generation defaults, {} where it has none."""
        path = self.path / GENERATION_CONFIG_NAME
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def source(self, rank: int = 0) -> TensorSource:
        """The tensors of one rank, and the tables. Raises EngineError for a rank that is not."""
        if not 0 <= rank < self.build.tp_size:
            raise EngineError(
                f"rank: expected 0 … {self.build.tp_size - 1}, the ranks of {self.path}, got {rank}"
            )
        return _EngineSource(self.path, rank, self.tables)

    def weight_bytes(self, rank: int = 0) -> int:
        """What `load_weights` reads: a rank's tensors, mapped tables included, and the rank's file
        once more where it still has to be hashed."""
        name = rank_file(rank)
        size = 0 if self.manifest.hashed_on_open(name) else self.manifest.files[name][0]
        return total_bytes(self.source(rank)) + size

    def load_weights(
        self,
        dtype: torch.dtype,
        *,
        rank: int = 0,
        activation_quant: bool = True,
        packed: bool = False,
        advance: Advance = lambda _: None,
    ) -> NetworkWeights:
        """The network's weights in `dtype`; `advance` gets bytes read, `weight_bytes` in all.

        `packed`: quantised weights stay mapped and are decoded on use. Raises EngineError for an
        engine of several ranks, and for a rank file that was altered.
        """
        from engine.network.load import load_weights

        if self.build.tp_size != 1:
            raise EngineError(
                f"{self.path} is built for {self.build.tp_size} ranks, and this software runs one; "
                "build it with --tp_size 1"
            )
        if not self.manifest.hashed_on_open(rank_file(rank)):
            self.manifest.check_hash(self.path, rank_file(rank), advance)
        return load_weights(
            self.config,
            CountedSource(self.source(rank), advance),
            self.token_class,
            dtype,
            activation_quant=activation_quant,
            packed=packed,
        )


class _EngineSource:
    """A rank's tensors plus the mapped tables."""

    def __init__(self, path: Path, rank: int, tables: tuple[EngramTableFile, ...]) -> None:
        self._path = path
        self._rank = SafetensorsSource(path / rank_file(rank))
        self._tables = {table.tensor_name: table for table in tables}

    def __contains__(self, name: str) -> bool:
        return name in self._rank or name in self._tables

    def names(self) -> Iterable[str]:
        return [*self._rank.names(), *self._tables]

    def describe(self, name: str) -> TensorInfo:
        table = self._tables.get(name)
        return self._rank.describe(name) if table is None else table.info

    def read(self, name: str) -> torch.Tensor:
        table = self._tables.get(name)
        if table is None:
            return self._rank.read(name)
        path, info = self._path / table.file, table.info
        if path.stat().st_size != info.num_bytes:
            raise CheckpointError(
                f"{path}: expected {info.num_bytes} bytes for {info}, got {path.stat().st_size}; "
                "build the engine again"
            )
        return torch.frombuffer(map_file(path), dtype=STORED_AS[info.dtype]).view(info.shape)
