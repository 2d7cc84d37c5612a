"""Single nodes and weights of exported graphs, against torch, onnx's evaluator and stored bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from builder.graph.nodes import GraphBuilder, onnx_type
from builder.graph.ops import OPERATORS
from builder.graph.translate import translate
from builder.graph.weights import (
    Leaf,
    Stack,
    WeightFile,
    add_weight,
    leaf_form,
    stored_bytes,
)
from plugins.formats.released import quantize_fp4_rows, quantize_fp8_blocks
from plugins.linear import PackedFormat, PackedMatrix
from tests.builder.graphs import pack as pack_modelopt

ROWS = 5  # what the varying size is when a graph runs; it was traced with 4


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def ints(rows: int) -> torch.Tensor:
    """Negative numbers and zeros among them."""
    return torch.arange(3 * rows).view(rows, 3) * 5 - 17


def floats(rows: int) -> torch.Tensor:
    return torch.sin(torch.arange(rows * 3 * 4, dtype=torch.float64)).view(rows, 3, 4)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[int], torch.Tensor]]] = {
    "floor division by a number": (lambda x: x // 4, ints),
    "floor division by a size": (lambda x: x // x.shape[0], ints),
    "remainder by a size": (lambda x: x % x.shape[0], ints),
    "arithmetic": (lambda x: (x + 1) * x - x[:, :1], ints),
    "arithmetic of sizes": (lambda x: torch.arange(x.shape[0] * 3 - 2) + x.shape[0] // 2, ints),
    "comparisons": (lambda x: ((x >= 0) & (x < 9)) & ~(x == 3) & (x > x[:, 1:2]), ints),
    "where": (lambda x: torch.where(x >= 0, x, -1), ints),
    "clamp": (lambda x: x.clamp(-3, x.shape[0]), ints),
    "clamp below": (lambda x: x.clamp(min=-0.25), floats),
    "rows by index": (lambda x: x[(x[:, 0, 0] > 0).to(torch.int64)], floats),
    "elements by two indices": (lambda x: x[(x[:, :1] * 0), x % 3], ints),
    "slices": (lambda x: x[:, 1:-1], ints),
    "one of an axis": (lambda x: x[:, 1], floats),
    "shapes": (lambda x: x.flatten(1).unflatten(1, (6, 2)).unsqueeze(1), floats),
    "squeeze": (lambda x: x[:, :, :1].squeeze(-1), floats),
    "expand": (lambda x: x.unsqueeze(1).expand(-1, 2, -1), ints),
    "repeated rows": (lambda x: x.repeat_interleave(3, dim=0), ints),
    "split and join": (lambda x: torch.cat(torch.split(x, [1, 2], dim=1)[::-1], dim=1), ints),
    "chunk and stack": (lambda x: torch.stack(x.chunk(2, dim=-1), dim=1), floats),
    "casts": (lambda x: (x.to(torch.float32) > 0.5).to(torch.float64), floats),
    "mean in another dtype": (lambda x: x.mean(dim=1, dtype=torch.float32), floats),
    "first of the largest": (lambda x: (x * 0).argmax(dim=-1), floats),
    "elementwise": (lambda x: 1.0 / (1.0 + torch.exp(-x)), floats),
    "filled": (lambda x: torch.zeros_like(x) + torch.full_like(x, 7), ints),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_translation_computes_what_torch_does(name: str) -> None:
    """By onnx's own evaluator and by ours, with another size than the traced one."""
    function, operand = FUNCTIONS[name]
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(Function(function), (operand(4),), dynamic_shapes=({0: rows},))
    graph = GraphBuilder()
    (placeholder,) = program.graph_signature.user_inputs
    results = next(node for node in program.graph.nodes if node.op == "output").args[0]
    (output,) = translate(program, graph, {placeholder: "x"}, results)
    x = operand(ROWS)
    expected = function(x)
    infos = [
        onnx.helper.make_tensor_value_info(value, onnx_type(tensor.dtype), [None] * tensor.dim())
        for value, tensor in (("x", x), (output, expected))
    ]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "g", infos[:1], infos[1:], graph.initializers),
        opset_imports=[onnx.helper.make_opsetid("", 23)],
        ir_version=11,
    )
    onnx.checker.check_model(model)
    (theirs,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    ours = evaluate(graph, {"x": x})[output]
    for got in (torch.from_numpy(np.array(theirs)), ours):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-12)


def evaluate(graph: GraphBuilder, values: dict[str, Any]) -> dict[str, Any]:
    """Run a graph's nodes with the operators of the executor."""
    for one in graph.initializers:
        if one.name not in values:
            values[one.name] = torch.from_numpy(onnx.numpy_helper.to_array(one).copy())
    for node in graph.nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        run = OPERATORS[node.domain, node.op_type]
        made = run([values[name] for name in node.input], attributes)
        made = (made,) if isinstance(made, torch.Tensor) else made
        values.update(zip(node.output, made, strict=True))
    return values


def test_what_cannot_be_translated_is_named() -> None:
    program = torch.export.export(Function(torch.erf), (torch.ones(2),))
    with pytest.raises(NotImplementedError, match=r"uses aten.erf.default, which"):
        translate(program, GraphBuilder(), {"x": "x"}, [])


# -- weights ---------------------------------------------------------------------------------------


def pack(values: torch.Tensor, kind: PackedFormat) -> PackedMatrix:
    if kind in (PackedFormat.NVFP4, PackedFormat.MXFP8):
        return pack_modelopt(values, kind)
    quantize = quantize_fp8_blocks if kind is PackedFormat.FP8_BLOCKS else quantize_fp4_rows
    codes, scale = quantize(values)
    return PackedMatrix(kind, tuple(values.shape), codes, scale, None, values.dtype)


def matrices(kind: PackedFormat, count: int, dtype: torch.dtype) -> list[PackedMatrix]:
    draw = torch.Generator().manual_seed(7)
    packed = [pack(torch.randn(40, 64, generator=draw) * 3**i, kind) for i in range(count)]
    return [replace(one, dtype=dtype) for one in packed]


def stored(path: Path, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """An initializer as a reader of ONNX files sees it: elements of its own type."""
    array: np.ndarray[Any, Any] = onnx.numpy_helper.to_array(tensor, str(path.parent)).copy()
    return array


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", PackedFormat)
@pytest.mark.parametrize("count", [None, 3])
def test_weight_nodes_give_the_decoded_weight(
    tmp_path: Path, kind: PackedFormat, count: int | None, dtype: torch.dtype
) -> None:
    """Bit for bit, one matrix or a stack of experts of different scales."""
    packed = matrices(kind, count or 1, dtype)
    leaf: Leaf = packed[0] if count is None else Stack(tuple(packed), dtype)
    decoded = [one.dequantize() for one in packed]
    expected = decoded[0] if count is None else torch.stack(decoded)
    assert leaf_form(leaf).shape == expected.shape
    graph, path = GraphBuilder(), tmp_path / "weights.bin"
    written: list[int] = []
    with WeightFile(path, written.append) as file:
        add_weight(graph, file, "w", leaf)
    assert sum(written) == stored_bytes(leaf)
    elements = {one.name: stored(path, one) for one in graph.initializers}
    values = {name: torch_of(array) for name, array in elements.items()}
    got = evaluate(graph, values)["w"]
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    if dtype == torch.float64:
        assert not graph.nodes, "float64 values lie in the file themselves"
    elif kind in (PackedFormat.NVFP4, PackedFormat.FP4_ROWS):
        assert elements["w.codes"].shape == expected.shape
        theirs = reference(graph, elements)
        torch.testing.assert_close(theirs, expected.double(), rtol=2e-2, atol=0)


def torch_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """As the executor maps it: eight-bit floats as such, four-bit ones two a byte."""
    if array.dtype == ml_dtypes.float4_e2m1fn:
        nibbles = array.view(np.uint8)
        return torch.from_numpy(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def reference(graph: GraphBuilder, elements: dict[str, np.ndarray[Any, Any]]) -> torch.Tensor:
    """The weight by the formula of DequantizeLinear, in float64 from ml_dtypes' own decoding."""
    codes = elements["w.codes"].astype(np.float64)
    scale = elements["w.scale"].astype(np.float64)
    if "w.global_scale" in elements:
        whole = elements["w.global_scale"].astype(np.float64)
        scale = scale * whole.reshape(*whole.shape, *[1] * (scale.ndim - whole.ndim))
    group = codes.shape[-1] // scale.shape[-1]
    return torch.from_numpy(codes * scale.repeat(group, axis=-1))


def test_a_weight_whose_rows_are_part_groups_keeps_its_values(tmp_path: Path) -> None:
    matrix = pack(torch.randn(33, 50), PackedFormat.FP8_BLOCKS)
    graph = GraphBuilder()
    with WeightFile(tmp_path / "weights.bin", lambda _: None) as file:
        add_weight(graph, file, "w", matrix)
    assert not graph.nodes
    got = stored(tmp_path / "weights.bin", graph.initializers[0])
    assert torch.equal(torch.from_numpy(got), matrix.dequantize())


def test_a_weight_of_two_graphs_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    graphs = GraphBuilder(), GraphBuilder()
    first, second = torch.arange(4.0), torch.arange(6.0)
    with WeightFile(path, lambda _: None) as file:
        for graph in graphs:
            add_weight(graph, file, "a", first)
            add_weight(graph, file, "b", second)
    assert path.stat().st_size == 4096 + 24, "each starts a page"
    for graph in graphs:
        assert [stored(path, one).tolist() for one in graph.initializers] == [
            first.tolist(),
            second.tolist(),
        ]
