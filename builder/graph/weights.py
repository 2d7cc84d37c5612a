"""The network's weights as a graph's initializers, quantised ones with their dequantising nodes.

A weight keeps its stored codes and becomes values inside the graph:

    NVFP4           DequantizeLinear(FLOAT4E2M1, block 16) of scales DequantizeLinear(E4M3, global)
    MXFP8           trt::TRT_MXFP8DequantizeLinear(E4M3, E8M0 bytes per 32)
    released FP8    the same: a 32×32 block's scale, written for each of its rows
    released FP4    DequantizeLinear(FLOAT4E2M1, block 32) of float32 scales

A float64 graph, which only comparisons use, holds the values: ONNX has no float64 scales. All data
lies in one file beside the graphs, page aligned, each weight once however many graphs read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onnx
import torch

from builder.graph.nodes import GraphBuilder, onnx_type
from plugins.formats.released import BLOCK
from plugins.formats.rows import PackedRows, Region, ValueRows
from plugins.graph_values import EXPERT_PARTS, GraphRows, Pages
from plugins.linear import LinearWeight, Matrix, PackedFormat, PackedLinearWeight, PackedMatrix
from plugins.moe import ExpertWeights, PackedExpertWeights

WEIGHTS_NAME = "weights.bin"
TRT_DOMAIN = "trt"
_ALIGNMENT = 4096
_NVFP4_GROUP = 16

T = TypeVar("T")
Types = onnx.TensorProto
# Types whose last dim counts two elements a byte.
TWO_A_BYTE = (Types.FLOAT4E2M1,)


@dataclass(frozen=True)
class Stack:
    """The matrices of all experts, one form [E, N, K]."""

    matrices: tuple[Matrix, ...]
    dtype: torch.dtype

    @property
    def packed(self) -> tuple[PackedMatrix, ...] | None:
        """The matrices, where all are packed in one format."""
        packed = tuple(one for one in self.matrices if isinstance(one, PackedMatrix))
        same = len(packed) == len(self.matrices) and len({one.format for one in packed}) == 1
        return packed if same else None


Leaf = torch.Tensor | PackedMatrix | Stack


def weight_leaves(weights: Any) -> dict[str, Leaf]:
    """Every tensor of the network's weights by its path, packed ones as they are, without the
    Engram tables."""
    leaves: dict[str, Leaf] = {}

    def visit(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, PackedRows | ValueRows):
            leaves[name] = leaf
        return leaf

    _map("", weights, visit)
    return leaves


def with_leaves(weights: T, tensors: Mapping[str, torch.Tensor]) -> T:
    """The same weights over a graph's tensors: values of every leaf, and the tables by the names
    of their inputs (engine/segments.py)."""

    def visit(name: str, leaf: Any) -> Any:
        if isinstance(leaf, PackedRows | ValueRows):
            table = tensors.get(f"engram_table_{name.split('.')[1]}")
            if table is None:  # a segment that looks nothing up
                return leaf
            return GraphRows(Pages(table), Region(0, 1, leaf.width), leaf.layout)
        return tensors[name]

    result: T = _map("", weights, visit)
    return result


def leaf_form(leaf: Leaf) -> torch.Tensor:
    """Shape and dtype of a leaf's values, on the meta device."""
    if isinstance(leaf, Stack):
        shape = leaf_form(_as_leaf(leaf.matrices[0])).shape
        return torch.empty(len(leaf.matrices), *shape, dtype=leaf.dtype, device="meta")
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")


def _as_leaf(matrix: Matrix) -> torch.Tensor | PackedMatrix:
    assert isinstance(matrix, torch.Tensor | PackedMatrix)
    return matrix


def _map(name: str, node: Any, visit: Callable[[str, Any], Any]) -> Any:
    def child(part: str, value: Any) -> Any:
        return _map(f"{name}.{part}" if name else part, value, visit)

    match node:
        case None:
            return None
        case torch.Tensor():
            return visit(name, node)
        case PackedLinearWeight():
            scale = child("input_scale", node.input_scale)
            return LinearWeight(visit(name, node.packed), node.quantized_input, scale)
        case LinearWeight():
            scale = child("input_scale", node.input_scale)
            return LinearWeight(visit(name, node.value), node.quantized_input, scale)
        case PackedExpertWeights():
            stacks = [Stack(tuple(matrices), node.dtype) for matrices in node.matrices()]
            w1, w3, w2 = map(child, EXPERT_PARTS, stacks)
            scale = child("input_scale", node.input_scale)
            return ExpertWeights(w1, w3, w2, node.quantized_input, scale)
        case ExpertWeights():
            w1, w3, w2 = (child(part, getattr(node, part)) for part in EXPERT_PARTS)
            scale = child("input_scale", node.input_scale)
            return ExpertWeights(w1, w3, w2, node.quantized_input, scale)
        case Stack():
            return visit(name, node)
        case PackedRows() | ValueRows():
            return visit(name, node)
        case tuple():
            return tuple(child(str(i), one) for i, one in enumerate(node))
    fields = {f.name: child(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)}
    return type(node)(**fields)


class WeightFile:
    """The file of all initializers; tensors are appended and found again by name."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        self._file = path.open("wb")
        self._location = path.name
        self._advance = advance
        self._known: dict[str, onnx.TensorProto] = {}

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(
        self, name: str, kind: int, shape: Sequence[int], parts: Iterable[torch.Tensor]
    ) -> onnx.TensorProto:
        """The tensor `name` of ONNX type `kind`, its bytes those of `parts` one after another."""
        if name not in self._known:
            offset = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
            self._file.seek(offset)
            for part in parts:
                data = part.contiguous().reshape(-1).view(torch.uint8).numpy()
                self._file.write(data.data)
                self._advance(data.nbytes)
            length = self._file.tell() - offset
            tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            entries = (("location", self._location), ("offset", offset), ("length", length))
            for key, value in entries:
                tensor.external_data.add(key=key, value=str(value))
            self._known[name] = tensor
        return self._known[name]


def add_weight(graph: GraphBuilder, file: WeightFile, name: str, leaf: Leaf) -> None:
    """Make the value `name` of the graph: the weight in its compute dtype."""
    form = leaf_form(leaf)
    packed = _packed(leaf)
    if packed is None or form.dtype == torch.float64 or not _fits(packed[0]):
        shape = tuple(form.shape)
        graph.initializers.append(file.add(name, onnx_type(form.dtype), shape, _values(leaf)))
        return
    lead = (len(packed),) if isinstance(leaf, Stack) else ()
    writer = _Dequantizer(graph, file, name, lead, packed)
    if packed[0].format is PackedFormat.NVFP4:
        writer.nvfp4(form.dtype)
    elif packed[0].format is PackedFormat.FP4_ROWS:
        writer.released_fp4(form.dtype)
    else:
        writer.mxfp8(form.dtype)


def stored_bytes(leaf: Leaf) -> int:
    """The bytes that `add_weight` puts into the file for a leaf."""
    form, packed = leaf_form(leaf), _packed(leaf)
    values = form.numel()
    if packed is None or form.dtype == torch.float64 or not _fits(packed[0]):
        return values * form.dtype.itemsize
    if packed[0].format is PackedFormat.NVFP4:
        return values // 2 + values // _NVFP4_GROUP + 4 * len(packed)
    if packed[0].format is PackedFormat.FP4_ROWS:
        return values // 2 + values // BLOCK * 4
    return values + values // BLOCK


def _packed(leaf: Leaf) -> tuple[PackedMatrix, ...] | None:
    if isinstance(leaf, Stack):
        return leaf.packed
    return (leaf,) if isinstance(leaf, PackedMatrix) else None


def _fits(matrix: PackedMatrix) -> bool:
    """Whether rows are whole groups; a released FP8 block may hang over the edge."""
    return matrix.shape[1] % (_NVFP4_GROUP if matrix.format is PackedFormat.NVFP4 else BLOCK) == 0


def _values(leaf: Leaf) -> Iterable[torch.Tensor]:
    """The leaf's values in the compute dtype, matrix by matrix."""
    if isinstance(leaf, Stack):
        return (matrix.to(leaf.dtype) for matrix in leaf.matrices)
    return (leaf.to(leaf.dtype),)


@dataclass(frozen=True)
class _Dequantizer:
    """Initializers and nodes of one packed weight or stack [*lead, N, K]."""

    graph: GraphBuilder
    file: WeightFile
    name: str
    lead: tuple[int, ...]
    matrices: tuple[PackedMatrix, ...]

    def nvfp4(self, dtype: torch.dtype) -> None:
        scales = self._add("scale", Types.FLOAT8E4M3FN, _NVFP4_GROUP, lambda m: m.scale)
        steps = (m.global_scale for m in self.matrices if m.global_scale is not None)
        globals_ = self._put("global_scale", Types.FLOAT, self.lead, steps)
        step = self.graph.emit("DequantizeLinear", [scales, globals_], axis=0)
        self._fp4(step, _NVFP4_GROUP, dtype)

    def released_fp4(self, dtype: torch.dtype) -> None:
        self._fp4(self._add("scale", Types.FLOAT, BLOCK, PackedMatrix.steps), BLOCK, dtype)

    def mxfp8(self, dtype: torch.dtype) -> None:
        codes = self._add("codes", Types.FLOAT8E4M3FN, 1, lambda m: m.codes)
        scale = self._add("scale", Types.UINT8, BLOCK, _row_scales)
        self.graph.emit(
            "TRT_MXFP8DequantizeLinear",
            [codes, scale],
            outputs=[self.name],
            domain=TRT_DOMAIN,
            axis=-1,
            block_size=BLOCK,
            output_dtype=onnx_type(dtype),
        )

    def _fp4(self, step: str, group: int, dtype: torch.dtype) -> None:
        codes = self._add("codes", Types.FLOAT4E2M1, 1, lambda m: m.codes)
        exact = dtype == torch.float32
        values = self.graph.emit(
            "DequantizeLinear",
            [codes, step],
            outputs=[self.name] if exact else [],
            axis=len(self.lead) + 1,
            block_size=group,
        )
        if not exact:  # in float32 first: the network rounds the product once
            self.graph.emit("Cast", [values], outputs=[self.name], to=onnx_type(dtype))

    def _add(
        self, part: str, kind: int, group: int, read: Callable[[PackedMatrix], torch.Tensor]
    ) -> str:
        """An initializer with one element per `group` values of a row."""
        rows, columns = self.matrices[0].shape
        shape = (*self.lead, rows, columns // group)
        return self._put(part, kind, shape, (read(matrix) for matrix in self.matrices))

    def _put(
        self, part: str, kind: int, shape: Sequence[int], parts: Iterable[torch.Tensor]
    ) -> str:
        tensor = self.file.add(f"{self.name}.{part}", kind, shape, parts)
        self.graph.initializers.append(tensor)
        return tensor.name


def _row_scales(matrix: PackedMatrix) -> torch.Tensor:
    """E8M0 bytes [N, K / 32]; a released block's scale serves each of its rows."""
    scale = matrix.scale.view(torch.uint8)
    if matrix.format is PackedFormat.FP8_BLOCKS:
        scale = scale.repeat_interleave(BLOCK, 0)[: matrix.shape[0]]
    return scale
