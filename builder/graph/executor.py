"""Executes an exported graph, node by node, with the torch operators.

    executor = GraphExecutor(Path("engine/plans/encoder.onnx"))
    outputs = executor.run(encoder_tensors(batch, tables, pools, engram))

What runs is the file: its nodes, attributes and weights. Standard nodes are those of
builder/graph/ops.py, nodes of our domain run the registry's operators. onnx's ReferenceEvaluator is
not used: it works on numpy arrays, which have no bfloat16, and copies where a cache is written in
place.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from builder.graph.export import read_options
from builder.graph.ops import OPERATORS, TORCH_DTYPES, Run
from builder.graph.weights import TWO_A_BYTE
from engine.safetensors_file import map_file
from plugins.graph import DOMAIN, graph_operator


class GraphError(ValueError):
    """A graph or an input that cannot be executed; the message names it and what was expected."""


@dataclass(frozen=True)
class _Step:
    """One node; `released` are the values that nothing after it reads."""

    node: onnx.NodeProto
    run: Run
    attributes: Mapping[str, Any]
    released: tuple[str, ...]


class GraphExecutor:
    """One segment. Weights stay mapped; quantised ones are dequantised by their nodes, on use."""

    def __init__(self, path: Path) -> None:
        """Raises GraphError for a node that this software does not have."""
        model = onnx.load(path, load_external_data=False)
        self.path = path
        self.options = read_options(model)
        self.inputs = {one.name: one.type.tensor_type for one in model.graph.input}
        self.outputs = tuple(one.name for one in model.graph.output)
        maps: dict[str, mmap.mmap] = {}
        self._weights = {one.name: _tensor(one, path, maps) for one in model.graph.initializer}
        last: dict[str, int] = {}
        for index, node in enumerate(model.graph.node):
            last.update(dict.fromkeys(node.input, index))
        for name in ("", *self.outputs):
            last.pop(name, None)
        self._steps = [
            _Step(
                node,
                _runner(node, path),
                {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute},
                tuple({name for name in node.input if last.get(name) == index}),
            )
            for index, node in enumerate(model.graph.node)
        ]

    @torch.no_grad()
    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name. `inputs` may hold more than the graph reads; caches among them are
        written in place, and their `_out` outputs are the same tensors.

        Raises GraphError for an input that is missing or of another dtype or shape.
        """
        self._check(inputs)
        values = {**self._weights, **{name: inputs[name] for name in self.inputs}}
        for step in self._steps:
            tensors = [values[name] if name else None for name in step.node.input]
            made = step.run(tensors, step.attributes)  # type: ignore[arg-type]
            if isinstance(made, torch.Tensor):
                made = (made,)
            values.update(zip(step.node.output, made, strict=True))
            for name in step.released:
                del values[name]
        return {name: values[name] for name in self.outputs}

    def _check(self, inputs: Mapping[str, torch.Tensor]) -> None:
        sizes: dict[str, int] = {}
        for name, kind in self.inputs.items():
            dims = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
            expected = f"{name} of {self.path.name}: expected {_text(kind.elem_type)} {dims}"
            if name not in inputs:
                raise GraphError(f"{expected}, got none; give every input of the graph")
            given = inputs[name]
            fits = given.dtype == TORCH_DTYPES[kind.elem_type] and given.dim() == len(dims)
            fits = fits and all(
                size == (sizes.setdefault(dim, size) if isinstance(dim, str) else dim)
                for dim, size in zip(dims, given.shape, strict=False)
            )
            if not fits:
                raise GraphError(
                    f"{expected}, got {given.dtype} {list(given.shape)}; export the segment with "
                    "the options that the caches are made for"
                )


def _text(kind: int) -> str:
    return str(TORCH_DTYPES[kind]).removeprefix("torch.")


def _runner(node: onnx.NodeProto, path: Path) -> Run:
    if node.domain == DOMAIN:
        try:
            operator = graph_operator(node.op_type)
        except KeyError:
            operator = None
        if operator is not None:
            absent = [None] * (len(operator.inputs) - len(node.input))
            read = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
            attributes = operator.from_onnx_attributes(read)
            return lambda tensors, _: operator.run([*tensors, *absent], attributes)
    elif (node.domain, node.op_type) in OPERATORS:
        return OPERATORS[node.domain, node.op_type]
    raise GraphError(
        f"{path.name}: expected nodes that this software wrote, got {node.name} of "
        f"{node.domain or 'ONNX'} {node.op_type}; export the segment again"
    )


def _tensor(stored: onnx.TensorProto, path: Path, maps: dict[str, mmap.mmap]) -> torch.Tensor:
    """An initializer over mapped memory, or over the bytes in the graph."""
    dtype = TORCH_DTYPES[stored.data_type]
    shape = list(stored.dims)
    if stored.data_type in TWO_A_BYTE:
        shape[-1] //= 2
    if stored.data_location == onnx.TensorProto.EXTERNAL:
        place = {one.key: one.value for one in stored.external_data}
        location = place["location"]
        if location not in maps:
            maps[location] = map_file(path.with_name(location))
        offset, length = int(place["offset"]), int(place["length"])
        flat = torch.frombuffer(maps[location], dtype=torch.uint8, count=length, offset=offset)
    else:
        flat = torch.frombuffer(bytearray(stored.raw_data), dtype=torch.uint8)
    return flat.view(dtype).view(shape)
