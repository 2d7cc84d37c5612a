"""Where weights come from: named tensors of a checkpoint or an engine, read lazily.

The helpers below turn stored tensors into what operators take. A quantised `X.weight` has its
scales in `X.scale`: FP8 E4M3 linears one E8M0 byte per 32×32 block, FP4 experts one per 32 inputs
of a row (two codes a byte, low nibble = even input), Engram rows one per 32 values of a row.
Unquantised weights are read as they are; the stored dtype decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from engine.safetensors_file import CheckpointError, SafetensorsFile, TensorInfo

__all__ = ["CheckpointError", "SafetensorsSource", "TensorInfo", "TensorSource", "dense"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class TensorSource(Protocol):
    """Named tensors. Reading is lazy; what is read must not be written to."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> Iterable[str]: ...

    def describe(self, name: str) -> TensorInfo:
        """Dtype and shape without reading. CheckpointError when there is no such tensor."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored; E8M0 as raw uint8. CheckpointError when there is none."""
        ...


class SafetensorsSource:
    """The tensors of one file, or of a directory's shards, checked whole when opened.

    In a directory the index names the shards; without an index `model.safetensors` is read, and
    without that every `*.safetensors` file. Raises CheckpointError naming the file at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner: dict[str, SafetensorsFile] = {}
        if path.is_file():
            self._add(SafetensorsFile(path))
        elif (path / INDEX_NAME).is_file():
            self._open_index(path / INDEX_NAME)
        else:
            single = path / SINGLE_NAME
            shards = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
            if not shards:
                raise CheckpointError(
                    f"expected {SINGLE_NAME} or {INDEX_NAME} in {path}, found neither; "
                    "point at a checkpoint directory"
                )
            for shard in shards:
                self._add(SafetensorsFile(shard))

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def names(self) -> Iterable[str]:
        return self._owner.keys()

    def describe(self, name: str) -> TensorInfo:
        return self._file(name).tensors[name]

    def read(self, name: str) -> torch.Tensor:
        return self._file(name).read(name)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._owner:
            raise CheckpointError(
                f"expected a tensor {name} in {self.path}, found none; "
                "the checkpoint does not belong to this configuration"
            )
        return self._owner[name]

    def _add(self, file: SafetensorsFile) -> None:
        for name in file.tensors:
            if name in self._owner:
                raise CheckpointError(
                    f"{name} is both in {self._owner[name].path} and in {file.path}; "
                    "remove the file that does not belong to the checkpoint"
                )
            self._owner[name] = file

    def _open_index(self, index: Path) -> None:
        try:
            raw = json.loads(index.read_text())
            weight_map = {str(name): str(shard) for name, shard in raw["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(
                f"{index} is not an index: expected JSON with a weight_map of tensor to file names"
            ) from None
        files: dict[str, SafetensorsFile] = {}
        for shard in sorted(set(weight_map.values())):
            path = index.parent / shard
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing: {index.name} places "
                    f"{sum(one == shard for one in weight_map.values())} tensors in it; "
                    "copy the shard into the checkpoint"
                )
            files[shard] = SafetensorsFile(path)
        for name, shard in weight_map.items():
            if name not in files[shard].tensors:
                raise CheckpointError(
                    f"{files[shard].path} lacks {name}, which {index.name} places in it; "
                    "copy the shard or the index again"
                )
            self._owner[name] = files[shard]


def expect(
    source: TensorSource, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> TensorInfo:
    """Check a tensor's header; CheckpointError with its name, what was expected and what came."""
    info = source.describe(name)
    if info.dtype not in dtypes or info.shape != shape:
        raise CheckpointError(
            f"{name}: expected {' or '.join(dtypes)} {list(shape)}, got {info}; "
            "the checkpoint does not belong to this configuration"
        )
    return info


def dense(
    source: TensorSource, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """An unquantised tensor in `dtype`, always in memory of its own."""
    expect(source, name, shape, FLOAT_DTYPES)
    return source.read(name).to(dtype, copy=True)
