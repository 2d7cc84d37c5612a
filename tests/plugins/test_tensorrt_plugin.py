"""Plugins of all operators: their answers while TensorRT builds, and what they compute."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from test_graph import NAMES, arguments_of, as_tuple, same, store_tensor

from builder.plans import BACKENDS, PlanRequest
from plugins.graph import DOMAIN, graph_operator
from plugins.tensorrt_library import TENSORRT_RTX, missing
from plugins.tensorrt_plugin import OPERANDS, Node

needs_rtx = pytest.mark.skipif(missing(TENSORRT_RTX) is not None, reason=str(missing(TENSORRT_RTX)))
CODES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.int64: onnx.TensorProto.INT64,
    torch.bool: onnx.TensorProto.BOOL,
}


def node_of(name: str, arguments: dict[str, Any]) -> tuple[Node, list[torch.Tensor]]:
    """The plugin's node and the tensors that TensorRT would give it."""
    operator = graph_operator(name)
    tensors, attributes = operator.flatten(arguments)
    given = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None}
    raw = operator.onnx_attributes(attributes) | {OPERANDS: list(given)}
    packed = [t.view(torch.int8) if t.dtype == torch.uint8 else t for t in given.values()]
    return Node(operator, raw), packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_computes_what_the_reference_computes(name: str, dtype: torch.dtype) -> None:
    """Bitwise, into memory that TensorRT owns; packed rows are int8 and written in place."""
    for arguments in arguments_of(name, dtype):
        wanted_arguments = copy.deepcopy(arguments)
        reference = graph_operator(name).entry.reference
        expected = list(as_tuple(reference(**wanted_arguments)))
        node, inputs = node_of(name, arguments)
        dtypes = node.output_dtypes([tensor.dtype for tensor in inputs])
        outputs = []
        for index, made in enumerate(dtypes):
            alias = node.aliased_input(index)
            if alias >= 0:
                spec = next(s for s in node.operator.entry.schema.inputs if s.aliased)
                expected.append(store_tensor(wanted_arguments[spec.name]))
                outputs.append(inputs[alias])
            else:
                outputs.append(torch.full(expected[index].shape, 3).to(made))
        node.run(inputs, outputs)
        for got, wanted in zip(outputs, expected, strict=True):
            same(got.view(torch.uint8) if wanted.dtype == torch.uint8 else got, wanted)


def test_kinds_decide_which_dtypes_a_plugin_takes() -> None:
    """kv_write: values, packed rows, slots, and the rows again; by hand from its schema."""
    raw = {"rows_region": [0, 1, 32], "rows_record": "window"}
    node = Node(graph_operator("kv_write"), raw)
    asked = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
    taken = [[dtype for dtype in asked if node.takes(position, dtype)] for position in range(4)]
    floats = [torch.float32, torch.bfloat16]
    assert taken == [floats, [*floats, torch.int8], [torch.int64], [*floats, torch.int8]]
    plain = Node(graph_operator("kv_write"), raw | {"rows_record": ""})
    assert not plain.takes(1, torch.int8)


def test_an_operand_that_is_left_out_shifts_the_others() -> None:
    """mega_attention without main: sink, its eighth operand, is the sixth input."""
    node = Node(graph_operator("mega_attention"), {OPERANDS: [0, 1, 2, 3, 4, 7]})
    assert node.spread("abcdef") == ["a", "b", "c", "d", "e", None, None, "f"]
    assert node.takes(5, torch.float32)
    assert not node.takes(5, torch.int64)


@needs_rtx
def test_tensorrt_builds_every_operator_on_every_case(tmp_path: Path) -> None:
    """One network of all of them; TensorRT infers the shapes and dtypes that the operators give."""
    nodes, inputs, outputs, expected = [], [], [], {}
    make_info = onnx.helper.make_tensor_value_info
    for name in NAMES:
        operator = graph_operator(name)
        for case, arguments in enumerate(arguments_of(name, torch.bfloat16)):
            label = f"{name}.{case}"
            tensors, attributes = operator.flatten(arguments)
            node = onnx.helper.make_node(name, [], [], name=label, domain=DOMAIN)
            for one, tensor in zip(operator.inputs, tensors, strict=True):
                node.input.append("" if tensor is None else f"{label}.{one.name}")
                if tensor is not None:
                    inputs.append(make_info(node.input[-1], CODES[tensor.dtype], tensor.shape))
            for key, value in operator.onnx_attributes(attributes).items():
                kind = onnx.AttributeProto.INTS if isinstance(value, list) else None
                node.attribute.append(onnx.helper.make_attribute(key, value, attr_type=kind))
            for one, tensor in zip(
                operator.outputs, operator.run(tensors, attributes), strict=True
            ):
                node.output.append(f"{label}.{one.name}.made")
                outputs.append(make_info(node.output[-1], CODES[tensor.dtype], tensor.shape))
                made = torch.int8 if tensor.dtype == torch.uint8 else tensor.dtype
                alias = None if one.alias is None else node.input[one.alias]
                expected[node.output[-1]] = (
                    str(made).removeprefix("torch."),
                    tuple(tensor.shape),
                    alias,
                )
            nodes.append(node)
    graph = onnx.helper.make_graph(nodes, "all operators", inputs, outputs)
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(DOMAIN, 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "all")
    info = BACKENDS["tensorrt-rtx"].build(PlanRequest(tmp_path / "all", tmp_path / "plan", {}))
    got = {b.name: (b.dtype, b.shape, b.alias) for b in info.bindings if not b.is_input}
    assert got == expected
    assert len(got) > 200
    assert (tmp_path / "plan").stat().st_size == info.num_bytes
