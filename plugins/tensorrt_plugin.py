"""TensorRT plugins of all operators, made from their graph forms: one class for every schema.

    register_plugins(trt)          creators for ONNX nodes of domain "dsv41", of either library
    register_quick_plugins(quick)  the same operators as quickly deployable plugins of full TensorRT

On a device a plugin calls the operator on tensors over TensorRT's memory, on TensorRT's stream.
Inputs are not copied; a new result is copied once to where TensorRT wants it; a store that is
written in place is the output's memory already.

Three things differ from the graph (builder/plans/dialect.py prepares nodes so): packed rows are
int8, since TensorRT's uint8 is for network inputs only; a list is a text of its numbers, since the
ONNX parser cuts integers to 32 bits; and an optional operand that is left out is not among the
inputs, where the attribute `operands` lists the indices of those that are.

Building with these plugins was run with TensorRT-RTX. `enqueue` and the quickly deployable plugins
never ran: they need a GPU that TensorRT-RTX supports, or full TensorRT.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from plugins.graph import VERSION, GraphOperator, graph_operators
from plugins.graph_dims import Arithmetic
from plugins.graph_values import attribute_dtype
from plugins.schema import Kind

OPERANDS = "operands"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# By TensorRT's name of it, what torch calls a dtype. Packed rows travel as INT8.
_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
}
# What the array interface has no letter for is handed over as integers of its size.
_INTERFACE = {
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",
    torch.int8: "|i1",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.bool: "|b1",
    torch.uint8: "|u1",
}
# Creators that the library's registry refers to must not be collected.
_REGISTERED: dict[str, list[Any]] = {}


def torch_dtype(dtype: Any) -> torch.dtype:
    """What torch calls a TensorRT data type. Raises KeyError for one that no operator takes."""
    return _DTYPES[dtype.name]


@functools.cache
def operators_digest() -> str:
    """Of the inputs, attributes and outputs of all operators. A plan that was built for others
    would be taken too, and computed wrongly: it knows an operator by name alone."""
    forms = [(one.name, one.inputs, one.attributes, one.outputs) for one in graph_operators()]
    return hashlib.sha256(repr(forms).encode()).hexdigest()


class Node:
    """One operator in one graph: which operands it has, and its attributes."""

    def __init__(self, operator: GraphOperator, raw: Mapping[str, Any]) -> None:
        self.operator = operator
        self.attributes = operator.from_onnx_attributes(raw)
        given = raw.get(OPERANDS)
        self.operands = range(len(operator.inputs)) if given is None else [int(i) for i in given]

    def spread(self, given: Sequence[Any]) -> list[Any]:
        """What belongs to each operand of the operator, None where it is left out."""
        whole: list[Any] = [None] * len(self.operator.inputs)
        for index, one in zip(self.operands, given, strict=True):
            whole[index] = one
        return whole

    def aliased_input(self, output: int) -> int:
        """Which of the given inputs `output` is, −1 for an output of its own."""
        alias = self.operator.outputs[output].alias
        return -1 if alias is None else list(self.operands).index(alias)

    def output_dtypes(self, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
        """The outputs' dtypes for the given inputs'."""
        whole = self.spread(dtypes)
        result = []
        for output in self.operator.outputs:
            source = self.operator.output_dtype_of(output)
            if isinstance(source, int):
                dtype = whole[source]
            elif source is None:
                dtype = torch.int64 if output.kind == "int64" else torch.bool
            else:
                dtype = attribute_dtype(self.attributes[source])
            wide = output.kind == "wide"
            result.append(torch.promote_types(dtype, torch.float32) if wide else dtype)
        return result

    def output_shapes(self, shapes: Sequence[Sequence[Any]], arithmetic: Arithmetic) -> Any:
        return self.operator.output_shapes(self.spread(shapes), self.attributes, arithmetic)

    def takes(self, position: int, dtype: torch.dtype) -> bool:
        """Whether input or output `position` may have this dtype; inputs are counted first."""
        if position < len(self.operands):
            one = self.operator.inputs[self.operands[position]]
            return dtype in self._dtypes(one.name, one.kind)
        output = self.operator.outputs[position - len(self.operands)]
        return dtype in self._dtypes(output.name.removesuffix("_out"), output.kind)

    def _dtypes(self, name: str, kind: Kind) -> tuple[torch.dtype, ...]:
        match kind:
            case "int64" | "float64":
                return (torch.int64,)
            case "bool":
                return (torch.bool,)
            case "wide":
                return (torch.float32,)
            case "rows" if self.attributes[f"{name}_record"]:
                return (torch.int8, *_FLOATS)
        return _FLOATS

    def run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Compute `outputs` from `inputs`; those that alias an input are written through it."""
        tensors = self.spread(
            [one.view(torch.uint8) if one.dtype == torch.int8 else one for one in inputs]
        )
        made = self.operator.run(tensors, self.attributes)
        for declared, result, output in zip(self.operator.outputs, made, outputs, strict=True):
            if declared.alias is None:
                output.copy_(result)


def shape_arithmetic(trt: ModuleType, builder: Any) -> Arithmetic:
    """Formulas of dims over the dimension expressions that `builder` makes."""
    operations = trt.DimensionOperation

    def combine(operation: Any) -> Any:
        return lambda a, b: builder.operation(operation, a, b)

    return Arithmetic(
        constant=builder.constant,
        add=combine(operations.SUM),
        sub=combine(operations.SUB),
        mul=combine(operations.PROD),
        exact_div=combine(operations.FLOOR_DIV),
        ceil_div=combine(operations.CEIL_DIV),
        min=combine(operations.MIN),
    )


def tensor_at(pointer: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The device memory at `pointer` as a tensor; it owns nothing."""
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype, device="cuda")
    return torch.as_tensor(_DeviceMemory(pointer, shape, dtype), device="cuda").view(dtype)


class _DeviceMemory:
    def __init__(self, pointer: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": tuple(shape),
            "typestr": _INTERFACE[dtype],
            "strides": None,
            "version": 3,
        }


@contextlib.contextmanager
def on_stream(stream: int) -> Iterator[None]:
    """Run operators on TensorRT's stream."""
    external = torch.cuda.ExternalStream(stream)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(external), torch.inference_mode():
        yield


def register_plugins(trt: ModuleType) -> None:
    """Register a creator for every operator, once per library."""
    if trt.__name__ in _REGISTERED:
        return
    made = [_derived(_Creator, trt)(operator) for operator in graph_operators()]
    for one in made:
        if not trt.get_plugin_registry().register_creator(one, one.plugin_namespace):
            raise RuntimeError(f"{trt.__name__} did not take the plugin {one.name}")
    _REGISTERED[trt.__name__] = made


def attribute_text(value: Sequence[int]) -> str:
    """A list as a plugin's attribute."""
    return " ".join(map(str, value))


def _fields(trt: ModuleType, node: Node) -> Any:
    """A node's attributes as plugin fields."""
    values = node.operator.onnx_attributes(node.attributes)
    values[OPERANDS] = list(node.operands)
    return trt.PluginFieldCollection([_field(trt, name, value) for name, value in values.items()])


def _field(trt: ModuleType, name: str, value: int | str | list[int]) -> Any:
    if isinstance(value, int):
        number = np.array([value], dtype=np.int32)
        return trt.PluginField(name, number, trt.PluginFieldType.INT32)
    text = value if isinstance(value, str) else attribute_text(value)
    return trt.PluginField(name, f"{text}\0".encode(), trt.PluginFieldType.CHAR)


def _raw_attributes(trt: ModuleType, operator: GraphOperator, fields: Any) -> dict[str, Any]:
    """Plugin fields as the attributes of an ONNX node; the inverse of `_fields`."""
    lists = {OPERANDS, *(one.name for one in operator.attributes if one.type is list)}
    raw: dict[str, Any] = {}
    for field in fields:
        if field.type == trt.PluginFieldType.CHAR:
            text = np.asarray(field.data).tobytes().split(b"\0", 1)[0].decode()
            raw[field.name] = [int(n) for n in text.split()] if field.name in lists else text
        else:
            raw[field.name] = int(np.asarray(field.data).reshape(-1)[0])
    return raw


class _Derived:
    """What both classes below need to become subclasses of a library's classes."""

    trt: Any
    bases: tuple[Any, ...]

    def _init_bases(self) -> None:
        for base in self.bases:
            base.__init__(self)


class _Plugin(_Derived):
    """One node, as TensorRT asks for it while building and running."""

    def __init__(self, node: Node) -> None:
        self._init_bases()
        self.node = node
        self.plugin_name = node.operator.name
        self.plugin_version = str(VERSION)
        self.plugin_namespace = ""
        self.num_outputs = len(node.operator.outputs)

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    def clone(self) -> Any:
        return type(self)(self.node)

    def get_fields_to_serialize(self) -> Any:
        return _fields(self.trt, self.node)

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        made = self.node.output_dtypes([torch_dtype(one) for one in input_types])
        return [trt_dtype(self.trt, dtype) for dtype in made]

    def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
        shapes = [list(one) for one in inputs]
        made = self.node.output_shapes(shapes, shape_arithmetic(self.trt, builder))
        return [self.trt.DimsExprs(shape) for shape in made]

    def get_aliased_input(self, output: int) -> int:
        return self.node.aliased_input(output)

    def supports_format_combination(self, position: int, tensors: Any, num_inputs: int) -> bool:
        tensor = tensors[position].desc
        if tensor.format != self.trt.TensorFormat.LINEAR or tensor.type.name not in _DTYPES:
            return False
        return self.node.takes(position, torch_dtype(tensor.type))

    def configure_plugin(self, inputs: Any, outputs: Any) -> None:
        pass

    def on_shape_change(self, inputs: Any, outputs: Any) -> None:
        pass

    def attach_to_context(self, context: Any) -> Any:
        return self.clone()

    def set_tactic(self, tactic: int) -> None:
        pass

    def enqueue(
        self,
        input_descs: Any,
        output_descs: Any,
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        def tensors(descs: Any, pointers: Sequence[int]) -> list[torch.Tensor]:
            return [
                tensor_at(pointer, tuple(desc.dims), torch_dtype(desc.type))
                for desc, pointer in zip(descs, pointers, strict=True)
            ]

        with on_stream(stream):
            self.node.run(tensors(input_descs, inputs), tensors(output_descs, outputs))


class _Creator(_Derived):
    """Makes the plugins of one operator."""

    def __init__(self, operator: GraphOperator) -> None:
        self._init_bases()
        self.operator = operator
        self.name = operator.name
        self.plugin_version = str(VERSION)
        self.plugin_namespace = ""
        empty: dict[str, int | str | list[int]] = {
            one.name: 0 if one.type is int else "" for one in operator.attributes
        }
        fields = [_field(self.trt, name, value) for name, value in (empty | {OPERANDS: ""}).items()]
        self.field_names = self.trt.PluginFieldCollection(fields)

    def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
        node = Node(self.operator, _raw_attributes(self.trt, self.operator, fields))
        return _derived(_Plugin, self.trt)(node)


_BASES: dict[type, tuple[str, ...]] = {
    _Plugin: ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime"),
    _Creator: ("IPluginCreatorV3One",),
}


@functools.cache
def _derived(methods: type, trt: ModuleType) -> Any:
    """`methods` as a subclass of the classes of one library."""
    bases = tuple(getattr(trt, name) for name in _BASES[methods])
    return type(methods.__name__, (methods, *bases), {"trt": trt, "bases": bases})


def trt_dtype(trt: ModuleType, dtype: torch.dtype) -> Any:
    names = {made: name for name, made in _DTYPES.items()}
    return getattr(trt.DataType, names[dtype])
