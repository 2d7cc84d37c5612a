"""The graph form of every operator, derived from its one schema: torch custom op and ONNX node.

    operator = graph_operator("kv_write")
    operator.inputs       plain tensors in the schema's order, see plugins/graph_values.py
    operator.attributes   the schema's attributes, then those that operands are taken apart into
    operator.outputs      the schema's outputs, then one per store that is written in place
    operator.torch_op     torch.ops.dsv41.kv_write
    operator.onnx_schema  domain "dsv41", op_type "kv_write", inputs and attributes of these names
    operator.run          the operator itself on such tensors: what executors and plugins call

A graph has no side effects: a store that an operator writes is an input and an output. `run`
writes the input and returns it as that output (`GraphOutput.alias`); so does a plan, whose plugin
aliases the two. The torch custom op may not, and copies. See docs/adr/0005-graph-operators.md.

ONNX keeps float attributes in float32, so a float attribute is the text of its float64.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import plugins
from plugins.graph_dims import INTEGERS, Arithmetic, bind, shape_of
from plugins.graph_values import (
    EXPERT_PARTS,
    Attribute,
    attribute_dtype,
    attribute_types,
    flatten_attribute,
    flatten_operand,
    operand_attribute_types,
    replace_rows,
    restore_attribute,
    restore_operand,
)
from plugins.registry import OPERATORS, Operator, tracers
from plugins.schema import Kind, TensorSpec

if TYPE_CHECKING:
    import onnx

DOMAIN = "dsv41"
VERSION = 1


@dataclass(frozen=True)
class GraphInput:
    """One tensor. A store's dims name its rows; the tensor is pages [num_pages, elements]."""

    name: str
    dims: tuple[str, ...]
    kind: Kind
    optional: bool


@dataclass(frozen=True)
class GraphAttribute:
    """type: int, float, str or list (of ints). An optional one may be left out."""

    name: str
    type: type
    optional: bool


@dataclass(frozen=True)
class GraphOutput:
    """One tensor. alias: the input that it is, written in place, None for a tensor of its own."""

    name: str
    dims: tuple[str, ...]
    kind: Kind
    alias: int | None


class GraphOperator:
    """One operator as graphs know it; made by `graph_operator`."""

    def __init__(self, entry: Operator) -> None:
        self.entry = entry
        self.name = entry.schema.name
        hints = typing.get_type_hints(entry.reference, _names_of(entry.reference))
        self._types = {name: _plain_type(hints[name]) for name in entry.schema.attributes}
        self._result: Any = hints["return"]
        self.inputs = tuple(one for spec in entry.schema.inputs for one in _graph_inputs(spec))
        self.attributes = tuple(self._graph_attributes())
        aliases = [
            GraphOutput(f"{one.name}_out", one.dims, one.kind, index)
            for index, one in enumerate(self.inputs)
            if any(spec.aliased and spec.name == one.name for spec in entry.schema.inputs)
        ]
        made = [GraphOutput(o.name, o.dims, o.kind, None) for o in entry.schema.outputs]
        self.outputs = (*made, *aliases)

    def _graph_attributes(self) -> typing.Iterator[GraphAttribute]:
        parameters = inspect.signature(self.entry.reference).parameters
        for name in self.entry.schema.attributes:
            optional = parameters[name].default is not inspect.Parameter.empty
            for one, kind in attribute_types(name, self._types[name]).items():
                yield GraphAttribute(one, kind, optional)
        for spec in self.entry.schema.inputs:
            for one, kind in operand_attribute_types(spec).items():
                yield GraphAttribute(one, kind, False)

    # -- running -----------------------------------------------------------------------------------

    def run(
        self, tensors: Sequence[torch.Tensor | None], attributes: Mapping[str, Attribute]
    ) -> tuple[torch.Tensor, ...]:
        """The outputs for `tensors` in the order of `inputs`, None where an optional one is left
        out. Stores are written in place and returned. Runs the kernel on a device that has one."""
        arguments = self._restore(list(tensors), attributes)
        first = next(tensor for tensor in tensors if tensor is not None)
        made = self.entry.implementation(first.device)(**arguments)
        if made is None:
            outputs: tuple[torch.Tensor, ...] = ()
        else:
            outputs = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        written = [tensors[one.alias] for one in self.outputs if one.alias is not None]
        return (*outputs, *(tensor for tensor in written if tensor is not None))

    def _restore(
        self, tensors: list[torch.Tensor | None], attributes: Mapping[str, Attribute]
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for spec in self.entry.schema.inputs:
            count = len(_graph_inputs(spec))
            arguments[spec.name] = restore_operand(spec, tensors[:count], attributes)
            tensors = tensors[count:]
        for name, kind in self._types.items():
            arguments[name] = restore_attribute(name, kind, attributes)
        return arguments

    # -- shapes ------------------------------------------------------------------------------------

    def output_shapes(
        self,
        shapes: Sequence[Sequence[Any] | None],
        attributes: Mapping[str, Attribute],
        arithmetic: Arithmetic = INTEGERS,
    ) -> list[list[Any]]:
        """The shapes of all outputs for these input shapes; None where an input is left out."""
        sizes: dict[str, Any] = dict(attributes)
        for one, shape in zip(self.inputs, shapes, strict=True):
            if shape is None:
                continue
            if one.kind == "rows":
                region = attributes[f"{one.name}_region"]
                assert isinstance(region, list)
                sizes.setdefault(one.dims[-1], region[2])
            else:
                bind(one.dims, shape, sizes)
        result: list[list[Any]] = []
        for output in self.outputs:
            alias = None if output.alias is None else shapes[output.alias]
            made = shape_of(output.dims, sizes, arithmetic) if output.alias is None else alias
            assert made is not None
            result.append(list(made))
        return result

    def output_dtype_of(self, output: GraphOutput) -> int | str | None:
        """Where the dtype of an output comes from: the index of an input, the name of an attribute
        (an ONNX dtype code), or None for an output whose kind is its dtype."""
        if output.alias is not None:
            return output.alias
        if output.kind in ("int64", "bool"):
            return None
        for index, one in enumerate(self.inputs):
            if one.kind == "float":
                return index
        return next(name for name, kind in self._types.items() if kind is torch.dtype)

    def _fake(self, *operands: Any) -> Any:
        tensors = operands[: len(self.inputs)]
        given = zip(self.attributes, operands[len(self.inputs) :], strict=True)
        attributes = {one.name: value for one, value in given if value is not None}
        shapes = [None if tensor is None else tensor.shape for tensor in tensors]
        outputs = []
        for output, shape in zip(
            self.outputs, self.output_shapes(shapes, attributes, _SYMBOLIC), strict=True
        ):
            source = self.output_dtype_of(output)
            if isinstance(source, int):
                dtype = tensors[source].dtype
            elif source is None:
                dtype = torch.int64 if output.kind == "int64" else torch.bool
            else:
                dtype = attribute_dtype(attributes[source])
            if output.kind == "wide":
                dtype = torch.promote_types(dtype, torch.float32)
            outputs.append(tensors[0].new_empty(shape, dtype=dtype))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    # -- torch -------------------------------------------------------------------------------------

    @functools.cached_property
    def torch_op(self) -> Any:
        """torch.ops.dsv41.<name>, registered on first use; operands are `inputs`, `attributes`."""
        qualified = f"{DOMAIN}::{self.name}"
        torch.library.custom_op(
            qualified, self._copying, mutates_args=(), schema=self._torch_schema()
        ).register_fake(self._fake)
        return getattr(getattr(torch.ops, DOMAIN), self.name).default

    def _torch_schema(self) -> str:
        tensors = [f"Tensor{'?' if one.optional else ''} {one.name}" for one in self.inputs]
        names = {int: "int", float: "float", str: "str", list: "int[]"}
        attributes = [
            f"{names[one.type]}{'?' if one.optional else ''} {one.name}" for one in self.attributes
        ]
        outputs = ", ".join("Tensor" for _ in self.outputs)
        result = outputs if len(self.outputs) == 1 else f"({outputs})"
        return f"({', '.join([*tensors, *attributes])}) -> {result}"

    def _copying(self, *operands: Any) -> Any:
        tensors: list[torch.Tensor | None] = list(operands[: len(self.inputs)])
        for output in self.outputs:
            if output.alias is not None:
                written = tensors[output.alias]
                assert written is not None
                tensors[output.alias] = written.clone()
        given = zip(self.attributes, operands[len(self.inputs) :], strict=True)
        outputs = self.run(tensors, {one.name: v for one, v in given if v is not None})
        return outputs[0] if len(outputs) == 1 else outputs

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Call the custom op with a reference's arguments, as a graph is traced.

        Returns what the reference returns; written stores go on with the op's outputs.
        """
        bound = inspect.signature(self.entry.reference).bind(*args, **kwargs)
        bound.apply_defaults()
        tensors, attributes = self.flatten(bound.arguments)
        values = [attributes.get(one.name) for one in self.attributes]
        outputs = self.torch_op(*tensors, *values)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        made = len(self.entry.schema.outputs)
        for output, tensor in zip(self.outputs[made:], outputs[made:], strict=True):
            replace_rows(bound.arguments[output.name.removesuffix("_out")], tensor)
        if made == 0:
            return None
        return outputs[0] if made == 1 else self._result(*outputs[:made])

    def flatten(
        self, arguments: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor | None], dict[str, Attribute]]:
        """A reference's arguments by name as graph tensors and attributes."""
        tensors: list[torch.Tensor | None] = []
        attributes: dict[str, Attribute] = {}
        for name in self.entry.schema.attributes:
            attributes |= flatten_attribute(name, arguments[name])
        for spec in self.entry.schema.inputs:
            parts, more = flatten_operand(spec, arguments[spec.name])
            tensors += parts
            attributes |= more
        return tensors, attributes

    # -- ONNX --------------------------------------------------------------------------------------

    @functools.cached_property
    def onnx_schema(self) -> onnx.defs.OpSchema:
        """The node's schema, registered with onnx on first use."""
        import onnx

        schema_type = onnx.defs.OpSchema
        options = schema_type.FormalParameterOption
        types = {list: schema_type.AttrType.INTS, int: schema_type.AttrType.INT}
        ends: dict[str, Sequence[GraphInput | GraphOutput]] = {"T": self.inputs, "U": self.outputs}
        inputs = [
            schema_type.FormalParameter(
                one.name,
                f"T{index}",
                param_option=options.Optional if one.optional else options.Single,
            )
            for index, one in enumerate(self.inputs)
        ]
        outputs = [
            schema_type.FormalParameter(one.name, f"U{index}")
            for index, one in enumerate(self.outputs)
        ]
        schema = schema_type(
            self.name,
            DOMAIN,
            VERSION,
            doc=inspect.getdoc(self.entry.reference) or "",
            inputs=inputs,
            outputs=outputs,
            type_constraints=[
                (f"{letter}{index}", _ONNX_TYPES[one.kind], one.kind)
                for letter, ones in ends.items()
                for index, one in enumerate(ones)
            ],
            attributes=[
                schema_type.Attribute(
                    one.name,
                    types.get(one.type, schema_type.AttrType.STRING),
                    required=not one.optional,
                )
                for one in self.attributes
            ],
        )
        onnx.defs.register_schema(schema)
        return schema

    def onnx_attributes(
        self, attributes: Mapping[str, Attribute]
    ) -> dict[str, int | str | list[int]]:
        """The node's attributes: floats as the shortest text that reads back the same."""
        return {n: repr(v) if isinstance(v, float) else v for n, v in attributes.items()}

    def from_onnx_attributes(self, attributes: Mapping[str, Any]) -> dict[str, Attribute]:
        """Inverse of `onnx_attributes`; texts may be bytes. Names of no attribute are ignored."""
        result: dict[str, Attribute] = {}
        for one in self.attributes:
            if one.name not in attributes:
                continue
            value = attributes[one.name]
            text = value.decode() if isinstance(value, bytes) else value
            result[one.name] = [int(v) for v in text] if one.type is list else one.type(text)
        return result


@functools.cache
def graph_operator(name: str) -> GraphOperator:
    """The graph form of the operator `name`. Raises KeyError when there is none."""
    _import_operators()
    return GraphOperator(OPERATORS[name])


def _trace(name: str, *args: Any, **kwargs: Any) -> Any:
    return graph_operator(name).trace(*args, **kwargs)


tracers[:] = [_trace]


def graph_operators() -> tuple[GraphOperator, ...]:
    """All operators that are nodes of graphs, by name."""
    _import_operators()
    nodes = (name for name, entry in OPERATORS.items() if not entry.schema.composite)
    return tuple(graph_operator(name) for name in sorted(nodes))


@functools.cache
def _import_operators() -> None:
    for module in pkgutil.iter_modules(plugins.__path__):
        if module.ispkg and module.name != "formats":
            importlib.import_module(f"plugins.{module.name}")


def _names_of(reference: Any) -> dict[str, Any]:
    """The names that a reference's annotations use, those of type checking included."""
    from plugins.formats.rows import RowStore

    return {**reference.__globals__, "RowStore": RowStore}


def _plain_type(hint: Any) -> Any:
    """X of `X | None`."""
    options = [one for one in typing.get_args(hint) if one is not type(None)]
    return options[0] if options else hint


def _graph_inputs(spec: TensorSpec) -> list[GraphInput]:
    one = GraphInput(spec.name, spec.dims, spec.kind, spec.optional)
    scale = GraphInput(f"{spec.name}_input_scale", (), "wide", optional=True)
    if spec.kind == "weight":
        return [one, scale]
    if spec.kind != "experts":
        return [one]
    count, inter, hidden = spec.dims
    dims = {"w2": (count, hidden, inter)}
    parts = [
        replace(one, name=f"{spec.name}_{part}", dims=dims.get(part, spec.dims))
        for part in EXPERT_PARTS
    ]
    return [*parts, replace(scale, dims=(count, "2"))]


_SYMBOLIC = replace(INTEGERS, min=torch.sym_min)
_FLOATS = ["tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"]
_ONNX_TYPES: dict[Kind, list[str]] = {
    "float": _FLOATS,
    "wide": ["tensor(float)", "tensor(double)"],
    "float64": ["tensor(int64)"],
    "int64": ["tensor(int64)"],
    "bool": ["tensor(bool)"],
    "rows": [*_FLOATS, "tensor(uint8)"],
    "weight": _FLOATS,
    "experts": _FLOATS,
}
