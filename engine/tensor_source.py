"""Where weights come from: named tensors of a checkpoint or an engine, read lazily.

The helpers below turn stored tensors into what operators take. As released, a quantised `X.weight`
has its scales in `X.scale`: FP8 E4M3 linears one E8M0 byte per 32×32 block, FP4 experts one per 32
inputs of a row (two codes a byte, low nibble = even input), Engram rows one per 32 values of a row.
Requantised by ModelOpt they are in `X.weight_scale`: MXFP8 one E8M0 byte per 32 inputs of a row,
NVFP4 one E4M3 byte per 16 inputs, and one float32 for the whole weight in `X.weight_scale_2`; a
float32 in `X.input_scale` asks for NVFP4 inputs too (W4A4).
Unquantised weights are read as they are; the stored names and dtypes decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from engine.json_file import read_json
from engine.safetensors_file import (
    FLOAT_DTYPES,
    CheckpointError,
    SafetensorsFile,
    TensorInfo,
)
from plugins.formats.nvfp4 import CACHE
from plugins.formats.records import engram_record, nvfp4_engram_record
from plugins.formats.released import BLOCK
from plugins.formats.rows import PackedRows, RowStore, ValueRows
from plugins.linear import LinearWeight, Matrix, PackedFormat, PackedLinearWeight, PackedMatrix
from plugins.moe import ExpertWeights, PackedExpertWeights

__all__ = [
    "FLOAT_DTYPES",
    "CheckpointError",
    "CountedSource",
    "SafetensorsSource",
    "TensorInfo",
    "TensorSource",
    "dense",
    "engram_table",
    "expert_input_scale",
    "expert_weights",
    "linear_weight",
    "total_bytes",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


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
        return self.file_of(name).tensors[name]

    def read(self, name: str) -> torch.Tensor:
        return self.file_of(name).read(name)

    def file_of(self, name: str) -> SafetensorsFile:
        """The shard that holds a tensor. CheckpointError when there is no such tensor."""
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
            raw = read_json(index)
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


class CountedSource:
    """A source that reports the bytes of every tensor read, for a progress line."""

    def __init__(self, source: TensorSource, advance: Callable[[int], None]) -> None:
        self._source = source
        self._advance = advance

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def names(self) -> Iterable[str]:
        return self._source.names()

    def describe(self, name: str) -> TensorInfo:
        return self._source.describe(name)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        self._advance(tensor.nbytes)
        return tensor


def total_bytes(source: TensorSource) -> int:
    """Stored bytes of all tensors: what `CountedSource` reports when each is read once."""
    return sum(source.describe(name).num_bytes for name in source.names())


def dense(
    source: TensorSource, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """An unquantised tensor in `dtype`, in memory of its own."""
    _expect(source, name, shape, FLOAT_DTYPES)
    return source.read(name).to(dtype, copy=True)


def linear_weight(
    source: TensorSource,
    prefix: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    activation_quant: bool = True,
    packed: bool = False,
) -> LinearWeight:
    """`prefix.weight` [N, K] in `dtype`, quantised in any format of this module's head or not.

    A quantised weight asks for a quantised input, because the model was trained so;
    `activation_quant` False is a diagnostic. With `packed` a quantised weight stays as stored,
    mapped where the source maps it, and is decoded on use.
    """
    matrix = _packed_matrix(source, prefix, shape, dtype)
    scale = _input_scale(source, prefix) if activation_quant else None
    if matrix is None:
        return LinearWeight(dense(source, f"{prefix}.weight", shape, dtype), quantized_input=False)
    if packed:
        return PackedLinearWeight(matrix, activation_quant, scale)
    return LinearWeight(matrix.dequantize(), activation_quant, scale)


def expert_weights(
    source: TensorSource,
    prefix: str,
    num_experts: int,
    inter: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    activation_quant: bool = True,
    packed: bool = False,
) -> ExpertWeights:
    """The routed experts `prefix.E.{w1,w3,w2}.weight`, E = 0 … num_experts − 1.

    Quantised or not as w1 of expert 0 is, which decides for the inputs of all. `packed` as in
    `linear_weight`; else the experts are stacked.
    """
    shapes = {"w1": (inter, hidden), "w3": (inter, hidden), "w2": (hidden, inter)}
    first = f"{prefix}.0.w1"
    quantized = _packed_matrix(source, first, shapes["w1"], dtype) is not None

    def matrices(name: str) -> Iterator[Matrix]:
        for expert in range(num_experts):
            one = f"{prefix}.{expert}.{name}"
            matrix = _packed_matrix(source, one, shapes[name], dtype)
            yield matrix or dense(source, f"{one}.weight", shapes[name], dtype)

    scale = _expert_input_scales(source, prefix, num_experts) if activation_quant else None
    if packed and quantized:
        w1, w3, w2 = (tuple(matrices(name)) for name in ("w1", "w3", "w2"))
        return PackedExpertWeights(w1, w3, w2, dtype, activation_quant, scale)

    def stack(name: str) -> torch.Tensor:
        stacked = torch.empty(num_experts, *shapes[name], dtype=dtype)
        for values, matrix in zip(stacked, matrices(name), strict=True):
            values.copy_(matrix.to(dtype))
        return stacked

    inputs = quantized and activation_quant
    return ExpertWeights(stack("w1"), stack("w3"), stack("w2"), inputs, scale)


def _input_scale(source: TensorSource, prefix: str) -> torch.Tensor | None:
    """float32 [], the scale of the NVFP4 input of a weight, None where it has none."""
    name = f"{prefix}.input_scale"
    if name not in source:
        return None
    _expect(source, name, (), ("F32",))
    scale = source.read(name).clone()
    if not 0 < float(scale) < math.inf:
        raise CheckpointError(
            f"{name}: expected a positive scale, got {float(scale)}; calibrate the checkpoint again"
        )
    return scale


def expert_input_scale(source: TensorSource, prefix: str) -> torch.Tensor | None:
    """float32 [2], the scales of an expert's NVFP4 inputs: of w1 and w3, which take one, the larger
    of theirs, as fused kernels do; and of w2. None where the inputs are not calibrated."""
    scales = [_input_scale(source, f"{prefix}.{name}") for name in ("w1", "w3", "w2")]
    w1, w3, w2 = scales
    if w1 is None or w3 is None or w2 is None:
        if any(scale is not None for scale in scales):
            raise CheckpointError(
                f"{prefix}: expected input scales of w1, w3 and w2, or of none of them; give all "
                "three one format"
            )
        return None
    return torch.stack([torch.maximum(w1, w3), w2])


def _expert_input_scales(
    source: TensorSource, prefix: str, num_experts: int
) -> torch.Tensor | None:
    scales = [expert_input_scale(source, f"{prefix}.{expert}") for expert in range(num_experts)]
    found = [scale for scale in scales if scale is not None]
    if found and len(found) < num_experts:
        raise CheckpointError(
            f"{prefix}: expected input scales of all {num_experts} experts or of none, got "
            f"{len(found)}; give all experts of a layer one format"
        )
    return torch.stack(found) if found else None


def engram_table(
    source: TensorSource, prefix: str, rows: int, dim: int, dtype: torch.dtype
) -> RowStore:
    """An Engram table of `rows` rows of `dim` values.

    An engine's packed records (`prefix.rows`) stay mapped. A checkpoint's quantised rows and
    scales are joined to records in memory; unquantised rows are kept in `dtype`.
    """
    name, global_name = f"{prefix}.weight", f"{prefix}.weight_scale_2"
    record = engram_record(dim)
    if global_name in source:
        _expect(source, global_name, (), ("F32",))
        record = nvfp4_engram_record(dim, float(source.read(global_name)))
    if f"{prefix}.rows" in source:
        _expect(source, f"{prefix}.rows", (rows, record.bytes_per_row), ("U8",))
        return PackedRows(source.read(f"{prefix}.rows"), record)
    if source.describe(name).dtype in FLOAT_DTYPES:
        _expect(source, name, (rows, dim), FLOAT_DTYPES)
        return ValueRows(source.read(name).to(dtype))
    scale = f"{prefix}.scale" if f"{prefix}.scale" in source else f"{prefix}.weight_scale"
    _expect(source, name, (rows, record.data_bytes), ("F8_E4M3", "U8"))
    _expect(source, scale, (rows, record.scale_bytes), ("F8_E8M0", "F8_E4M3", "U8"))
    parts = source.read(name).view(torch.uint8), source.read(scale).view(torch.uint8)
    return PackedRows(torch.cat(parts, dim=1), record)


def _packed_matrix(
    source: TensorSource, prefix: str, shape: tuple[int, int], dtype: torch.dtype
) -> PackedMatrix | None:
    """A quantised `prefix.weight` [N, K] with its scales, None where it is not quantised."""
    name, (rows, columns) = f"{prefix}.weight", shape
    stored = source.describe(name).dtype
    if stored not in ("F8_E4M3", "I8", "U8"):
        return None
    # The weight before its scales: a wrong shape is the weight's fault.
    _expect(source, name, (rows, columns if stored == "F8_E4M3" else columns // 2), (stored,))
    requantized = f"{prefix}.weight_scale" in source
    scale = f"{prefix}.weight_scale" if requantized else f"{prefix}.scale"
    global_scale = None
    if stored == "F8_E4M3" and not requantized:
        packed_format = PackedFormat.FP8_BLOCKS
        _expect(source, scale, (-(-rows // BLOCK), -(-columns // BLOCK)), ("F8_E8M0",))
    elif stored == "F8_E4M3":
        packed_format = PackedFormat.MXFP8
        _expect(source, scale, (rows, columns // BLOCK), ("U8", "F8_E8M0"))
    elif stored == "I8":
        packed_format = PackedFormat.FP4_ROWS
        _expect(source, scale, (rows, columns // BLOCK), ("F8_E8M0",))
    else:
        packed_format = PackedFormat.NVFP4
        _expect(source, scale, (rows, columns // CACHE.group), ("F8_E4M3",))
        _expect(source, f"{prefix}.weight_scale_2", (), ("F32",))
        global_scale = source.read(f"{prefix}.weight_scale_2").clone()
    return PackedMatrix(
        packed_format, shape, source.read(name), source.read(scale), global_scale, dtype
    )


def _expect(
    source: TensorSource, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    info = source.describe(name)
    if info.dtype not in dtypes or info.shape != shape:
        raise CheckpointError(
            f"{name}: expected {' or '.join(dtypes)} {list(shape)}, got {info}; "
            "the checkpoint does not belong to this configuration"
        )
