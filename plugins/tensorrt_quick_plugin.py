"""Quickly deployable plugins of full TensorRT, made from the operators' graph forms.

    import tensorrt.plugin
    register_quick_plugins(tensorrt.plugin)
    tensorrt.plugin.op.dsv41.norm(x, weight, attributes='{"eps": "1e-20"}')

For networks that are written with TensorRT's Python API; ONNX nodes get the plugins of
plugins/tensorrt_plugin.py. All attributes are one text, JSON of the names and values that an ONNX
node has. Every operand is given: for an optional one that is left out a scalar, and `operands`
lists the indices of the others. Packed rows are int8.

Never run: TensorRT-RTX takes no such plugins, and full TensorRT needs a GPU. Checked once: the
Python sources of TensorRT 11.0 accept the registrations and infer all dtypes and aliases.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import GenericAlias, ModuleType
from typing import Any

from plugins.graph import DOMAIN, GraphOperator, graph_operators
from plugins.graph_dims import Arithmetic
from plugins.tensorrt_plugin import Node, on_stream, tensor_at, torch_dtype, trt_dtype

_ATTRIBUTES = "attributes"


def register_quick_plugins(quick: ModuleType) -> None:
    """Register every operator with `quick`, the module tensorrt.plugin; once per process."""
    for operator in graph_operators():
        name = f"{DOMAIN}::{operator.name}"
        quick.register(name)(_description(quick, operator))
        quick.impl(name)(_implementation(quick, operator))


def quick_arithmetic(quick: ModuleType) -> Arithmetic:
    """Formulas of dims over the module's shape expressions."""
    return Arithmetic(
        constant=quick.ShapeExpr,
        add=lambda a, b: a + b,
        sub=lambda a, b: a - b,
        mul=lambda a, b: a * b,
        exact_div=lambda a, b: a // b,
        ceil_div=quick.cdiv,
        min=quick.min,
    )


def _description(quick: ModuleType, operator: GraphOperator) -> Callable[..., Any]:
    """Output shapes and dtypes, which TensorRT asks for with descriptions of the inputs."""

    def describe(*descs: Any, attributes: str) -> Any:
        node = Node(operator, json.loads(attributes))
        given = [descs[index] for index in node.operands]
        dtypes = node.output_dtypes([torch_dtype(desc.dtype) for desc in given])
        shapes = node.output_shapes(
            [list(desc.shape_expr) for desc in given], quick_arithmetic(quick)
        )
        return tuple(
            quick.from_shape_expr(tuple(shape), dtype=trt_dtype(quick.trt, dtype))
            if declared.alias is None
            else descs[declared.alias].aliased()
            for declared, shape, dtype in zip(operator.outputs, shapes, dtypes, strict=True)
        )

    result = GenericAlias(tuple, (quick.TensorDesc,) * len(operator.outputs))
    _sign(describe, operator, {_ATTRIBUTES: str}, quick.TensorDesc, result)
    return describe


def _implementation(quick: ModuleType, operator: GraphOperator) -> Callable[..., Any]:
    """What runs on a device."""
    count = len(operator.inputs)

    def implement(*given: Any, stream: int) -> None:
        node = Node(operator, json.loads(given[count]))
        with on_stream(stream):
            inputs, outputs = (
                [tensor_at(t.data_ptr, tuple(t.shape), torch_dtype(t.dtype)) for t in tensors]
                for tensors in ([given[index] for index in node.operands], given[count + 1])
            )
            node.run(inputs, outputs)

    outputs = GenericAlias(tuple, (quick.Tensor,) * len(operator.outputs))
    kinds = {_ATTRIBUTES: str, "outputs": outputs, "stream": int}
    _sign(implement, operator, kinds, quick.Tensor, None)
    return implement


def _sign(
    function: Callable[..., Any],
    operator: GraphOperator,
    more: dict[str, Any],
    tensor: type,
    result: Any,
) -> None:
    """Give `function` the signature that TensorRT reads: the operands by name, then `more`."""
    kinds = {one.name: tensor for one in operator.inputs} | more
    parameter, kind = inspect.Parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [parameter(name, kind, annotation=one) for name, one in kinds.items()]
    signature = inspect.Signature(parameters, return_annotation=result)
    function.__signature__ = signature  # type: ignore[attr-defined]
