"""Quickly deployable plugins: what is registered, and what the descriptions answer.

Full TensorRT is not here, so the module tensorrt.plugin is stood in for by the few names of it that
the registration uses, written from its documentation: sizes are integers, descriptions are data.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from test_graph import NAMES, arguments_of
from test_tensorrt_plugin import node_of

from plugins.graph import graph_operator
from plugins.tensorrt_plugin import OPERANDS, torch_dtype, trt_dtype
from plugins.tensorrt_quick_plugin import register_quick_plugins


class DataType(Enum):
    FLOAT, HALF, BF16, INT8, INT32, INT64, BOOL, UINT8 = range(8)


@dataclass
class TensorDesc:
    shape_expr: tuple[int, ...]
    dtype: DataType
    alias: TensorDesc | None = None

    def aliased(self) -> TensorDesc:
        return TensorDesc(self.shape_expr, self.dtype, self)


@dataclass
class Quick(ModuleType):
    """tensorrt.plugin as far as the registration knows it."""

    described: dict[str, Callable[..., Any]] = field(default_factory=dict)
    implemented: dict[str, Callable[..., Any]] = field(default_factory=dict)
    trt = SimpleNamespace(DataType=DataType)
    TensorDesc = TensorDesc
    Tensor = torch.Tensor
    ShapeExpr = int
    min = staticmethod(min)

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def from_shape_expr(shape: tuple[int, ...], dtype: DataType) -> TensorDesc:
        return TensorDesc(shape, dtype)

    def register(self, name: str) -> Callable[[Callable[..., Any]], None]:
        return lambda function: self.described.__setitem__(name, function)

    def impl(self, name: str) -> Callable[[Callable[..., Any]], None]:
        return lambda function: self.implemented.__setitem__(name, function)


@pytest.fixture(scope="module")
def quick() -> Quick:
    made = Quick()
    register_quick_plugins(made)
    return made


def test_signatures_are_those_that_tensorrt_reads(quick: Quick) -> None:
    """Operands in the schema's order, then the attributes; by hand for one operator."""
    assert set(quick.described) == set(quick.implemented) == {f"dsv41::{name}" for name in NAMES}
    described = inspect.signature(quick.described["dsv41::kv_write"])
    assert {name: one.annotation for name, one in described.parameters.items()} == {
        "values": TensorDesc,
        "rows": TensorDesc,
        "slots": TensorDesc,
        "attributes": str,
    }
    assert get_args(described.return_annotation) == (TensorDesc,)
    implemented = inspect.signature(quick.implemented["dsv41::kv_write"])
    names = ["values", "rows", "slots", "attributes", "outputs", "stream"]
    assert list(implemented.parameters) == names
    assert implemented.return_annotation is None


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_are_what_the_operators_give(name: str, quick: Quick) -> None:
    for arguments in arguments_of(name, torch.bfloat16):
        node, inputs = node_of(name, arguments)
        operator = graph_operator(name)
        text = operator.onnx_attributes(node.attributes) | {OPERANDS: list(node.operands)}
        scalar = TensorDesc((), DataType.FLOAT)
        descs = [
            scalar if t is None else TensorDesc(tuple(t.shape), trt_dtype(quick.trt, t.dtype))
            for t in node.spread(inputs)
        ]
        made = quick.described[f"dsv41::{name}"](*descs, attributes=json.dumps(text))
        tensors, attributes = operator.flatten(arguments)
        expected = operator.run(tensors, attributes)
        for one, declared, wanted in zip(made, operator.outputs, expected, strict=True):
            stored = torch.int8 if wanted.dtype == torch.uint8 else wanted.dtype
            assert (tuple(one.shape_expr), torch_dtype(one.dtype)) == (wanted.shape, stored)
            assert one.alias is (None if declared.alias is None else descs[declared.alias])
