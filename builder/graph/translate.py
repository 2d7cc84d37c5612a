"""From a traced program to the nodes of an ONNX graph.

Operators of ours become nodes of our domain; the glue between them is few aten operators, each
with its standard ONNX node here. torch's own converter is not used: it refuses sizes as scalars,
which slots of dynamic pages need, and it names values as it likes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from builder.graph.nodes import GraphBuilder, onnx_type
from plugins.graph import DOMAIN, graph_operator


def translate(
    program: torch.export.ExportedProgram,
    graph: GraphBuilder,
    names: Mapping[str, str],
    results: Sequence[Node],
) -> list[str]:
    """Append the program's nodes; returns the names of the values of `results`.

    names: the value that stands for each of the program's inputs. Inputs that nothing reads need
    none. Raises NotImplementedError naming an aten operator that is not in this module.
    """
    walker = _Walker(program, graph, names)
    for node in program.graph.nodes:
        if node.users and node.op != "output":  # what nobody reads are assertions
            walker.visit(node)
    return [walker.name(node) for node in results]


class _Walker:
    def __init__(
        self,
        program: torch.export.ExportedProgram,
        graph: GraphBuilder,
        names: Mapping[str, str],
    ) -> None:
        self.graph = graph
        self._names = names
        self._constants = {
            spec.arg.name: program.constants[spec.target]
            for spec in program.graph_signature.input_specs
            if spec.target is not None and spec.target in program.constants
        }
        self._values: dict[Node, Any] = {}

    def visit(self, node: Node) -> None:
        if node.op == "placeholder":
            if node.name in self._constants:
                constant = self._constants[node.name]
                self._values[node] = self.graph.initializer(node.name, constant)
            elif node.name in self._names:
                self._values[node] = self._names[node.name]
        elif node.target is operator.getitem:
            source, index = node.args
            self._values[node] = self._values[source][index]  # type: ignore[index]
        elif str(node.target).startswith(f"{DOMAIN}."):
            self._values[node] = self._operator(node)
        else:
            try:
                translation = _TRANSLATIONS[str(node.target)]
            except KeyError:
                raise NotImplementedError(
                    f"the network uses {node.target}, which builder/graph/translate.py cannot "
                    "translate; add its ONNX node there"
                ) from None
            self._values[node] = translation(self, node, *node.args, **node.kwargs)

    # -- values ------------------------------------------------------------------------------------

    def name(self, value: Any, dtype: torch.dtype = torch.int64) -> str:
        """The name of a tensor or size, or of a constant of `dtype`."""
        if isinstance(value, Node):
            named: str = self._values[value]
            return named
        return self.graph.constant(value, dtype)

    def cast(self, value: Any, dtype: torch.dtype) -> str:
        """The value in `dtype`."""
        if not isinstance(value, Node):
            return self.graph.constant(value, dtype)
        found = value.meta["val"]
        if not isinstance(found, torch.Tensor) or found.dtype == dtype:
            return self.name(value)
        return self.graph.emit("Cast", [self.name(value)], to=onnx_type(dtype))

    def sizes(self, sizes: Sequence[Any]) -> str:
        """A list of sizes, some of them values of the graph, as int64 [n]."""
        if not any(isinstance(size, Node) for size in sizes):
            return self.graph.constant(list(sizes))
        axis = self.graph.constant([0])
        parts = [
            self.graph.emit("Unsqueeze", [self.name(size), axis])
            if isinstance(size, Node)
            else self.graph.constant([size])
            for size in sizes
        ]
        return self.graph.emit("Concat", parts, axis=0)

    def reshape(self, value: str, node: Node) -> str:
        """`value` in the shape that `node` has; at most one size of it may vary."""
        shape = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
        assert shape.count(-1) <= 1, f"{node.name} has several varying sizes"
        return self.graph.emit("Reshape", [value, self.graph.constant(shape)])

    def _operator(self, node: Node) -> Any:
        target: Any = node.target
        form = graph_operator(target._opname)
        assert form.onnx_schema.domain == DOMAIN
        declared = [argument.name for argument in target._schema.arguments]
        given: dict[str, Any] = {**dict(zip(declared, node.args, strict=False)), **node.kwargs}
        inputs = [
            "" if given.get(o.name) is None else self.name(given[o.name]) for o in form.inputs
        ]
        while not inputs[-1]:
            inputs.pop()
        attributes = {
            one.name: list(given[one.name]) if one.type is list else given[one.name]
            for one in form.attributes
            if given.get(one.name) is not None
        }
        outputs = [f"{node.name}.{one.name}" for one in form.outputs]
        self.graph.emit(
            form.name,
            inputs,
            outputs=outputs,
            domain=DOMAIN,
            **form.onnx_attributes(attributes),
        )
        return outputs if len(outputs) > 1 else outputs[0]


# -- aten operators --------------------------------------------------------------------------------

Translation = Callable[..., Any]
_TRANSLATIONS: dict[str, Translation] = {}


def _translates(*targets: str) -> Callable[[Translation], Translation]:
    def register(function: Translation) -> Translation:
        _TRANSLATIONS.update(dict.fromkeys(targets, function))
        return function

    return register


def _binary(op_type: str) -> Translation:
    """Arithmetic: both operands in the dtype of the result."""

    def translation(walker: _Walker, node: Node, a: Any, b: Any) -> str:
        value = node.meta["val"]
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.int64
        return walker.graph.emit(op_type, [walker.cast(a, dtype), walker.cast(b, dtype)])

    return translation


def _comparison(op_type: str) -> Translation:
    """Comparison: both operands in the dtype of the first."""

    def translation(walker: _Walker, node: Node, a: Any, b: Any) -> str:
        dtype = a.meta["val"].dtype
        return walker.graph.emit(op_type, [walker.name(a), walker.cast(b, dtype)])

    return translation


def _unary(op_type: str) -> Translation:
    return lambda walker, node, a: walker.graph.emit(op_type, [walker.name(a)])


for _target, _op_type in (
    ("aten.add.Tensor", "Add"),
    ("aten.sub.Tensor", "Sub"),
    ("aten.mul.Tensor", "Mul"),
    ("aten.remainder.Scalar", "Mod"),  # both have the divisor's sign
    ("<built-in function add>", "Add"),
    ("<built-in function sub>", "Sub"),
    ("<built-in function mul>", "Mul"),
    ("<built-in function floordiv>", "Div"),  # of sizes, which are not negative
):
    _TRANSLATIONS[_target] = _binary(_op_type)
for _name, _op_type in (
    ("ge", "GreaterOrEqual"),
    ("gt", "Greater"),
    ("lt", "Less"),
    ("eq", "Equal"),
):
    _TRANSLATIONS |= {
        f"aten.{_name}.{kind}": _comparison(_op_type) for kind in ("Scalar", "Tensor")
    }
for _target, _op_type in (
    ("aten.exp.default", "Exp"),
    ("aten.neg.default", "Neg"),
    ("aten.reciprocal.default", "Reciprocal"),
    ("aten.bitwise_not.default", "Not"),  # of bools
):
    _TRANSLATIONS[_target] = _unary(_op_type)


@_translates("aten.__and__.Tensor", "aten.bitwise_and.Tensor")
def _and(walker: _Walker, node: Node, a: Node, b: Node) -> str:
    return walker.graph.emit("And", [walker.name(a), walker.name(b)])


@_translates("aten.floor_divide.default")
def _floor_divide(walker: _Walker, node: Node, a: Node, b: Any) -> str:
    """ONNX divides integers towards zero; without the remainder there is nothing to round."""
    dividend, divisor = walker.name(a), walker.name(b)
    rest = walker.graph.emit("Mod", [dividend, divisor])
    whole = walker.graph.emit("Sub", [dividend, rest])
    return walker.graph.emit("Div", [whole, divisor])


@_translates("aten.clamp.default")
def _clamp(walker: _Walker, node: Node, a: Node, low: Any = None, high: Any = None, *,
           min: Any = None, max: Any = None) -> str:  # fmt: skip
    dtype = a.meta["val"].dtype
    value = walker.name(a)
    for op_type, bound in (
        ("Max", low if min is None else min),
        ("Min", high if max is None else max),
    ):
        if bound is not None:
            value = walker.graph.emit(op_type, [value, walker.cast(bound, dtype)])
    return value


@_translates("aten.where.self", "aten.where.ScalarOther")
def _where(walker: _Walker, node: Node, condition: Node, a: Any, b: Any) -> str:
    dtype = node.meta["val"].dtype
    operands = [walker.name(condition), walker.cast(a, dtype), walker.cast(b, dtype)]
    return walker.graph.emit("Where", operands)


@_translates("aten.to.dtype", "aten._to_copy.default")
def _to(walker: _Walker, node: Node, a: Node, dtype: torch.dtype | None = None, **_: Any) -> str:
    return walker.cast(a, node.meta["val"].dtype)


@_translates("aten.index.Tensor")
def _index(walker: _Walker, node: Node, a: Node, indices: Sequence[Node]) -> str:
    """Rows of a tensor, or elements [i, j] of a matrix, where no j is negative."""
    table = walker.name(a)
    if len(indices) == 1:
        return walker.graph.emit("Gather", [table, walker.name(indices[0])], axis=0)
    assert len(indices) == a.meta["val"].dim() == 2
    row, column = (walker.cast(index, torch.int64) for index in indices)
    columns = walker.graph.emit("Shape", [table], start=1, end=2)
    flat = walker.graph.emit("Reshape", [table, walker.graph.constant([-1])])
    place = walker.graph.emit("Add", [walker.graph.emit("Mul", [row, columns]), column])
    return walker.graph.emit("Gather", [flat, place], axis=0)


@_translates("aten.select.int")
def _select(walker: _Walker, node: Node, a: Node, axis: int, index: int) -> str:
    return walker.graph.emit("Gather", [walker.name(a), walker.graph.constant(index)], axis=axis)


@_translates("aten.slice.Tensor")
def _slice(walker: _Walker, node: Node, a: Node, axis: int = 0, start: int | None = None,
           end: int | None = None, step: int = 1) -> str:  # fmt: skip
    bounds = (start or 0, (1 << 62) if end is None else end, axis, step)
    numbers = [walker.graph.constant([number]) for number in bounds]
    return walker.graph.emit("Slice", [walker.name(a), *numbers])


@_translates("aten.unsqueeze.default")
def _unsqueeze(walker: _Walker, node: Node, a: Node, axis: int) -> str:
    return walker.graph.emit("Unsqueeze", [walker.name(a), walker.graph.constant([axis])])


@_translates("aten.squeeze.dim")
def _squeeze(walker: _Walker, node: Node, a: Node, axis: int) -> str:
    return walker.graph.emit("Squeeze", [walker.name(a), walker.graph.constant([axis])])


@_translates("aten.unflatten.int", "aten.view.default", "aten.flatten.using_ints")
def _reshape(walker: _Walker, node: Node, a: Node, *_: Any) -> str:
    return walker.reshape(walker.name(a), node)


@_translates("aten.expand.default")
def _expand(walker: _Walker, node: Node, a: Node, sizes: Sequence[Any]) -> str:
    kept = [1 if size == -1 else size for size in sizes]
    return walker.graph.emit("Expand", [walker.name(a), walker.sizes(kept)])


@_translates("aten.repeat_interleave.self_int")
def _repeat(walker: _Walker, node: Node, a: Node, count: int, dim: int) -> str:
    """Each row `count` times."""
    assert dim == 0
    rank = a.meta["val"].dim()
    spread = walker.graph.emit("Unsqueeze", [walker.name(a), walker.graph.constant([1])])
    shape = walker.graph.constant([1, count] + [1] * (rank - 1))
    return walker.reshape(walker.graph.emit("Expand", [spread, shape]), node)


@_translates("aten.cat.default")
def _cat(walker: _Walker, node: Node, parts: Sequence[Node], axis: int = 0) -> str:
    return walker.graph.emit("Concat", [walker.name(part) for part in parts], axis=axis)


@_translates("aten.stack.default")
def _stack(walker: _Walker, node: Node, parts: Sequence[Node], axis: int = 0) -> str:
    at = walker.graph.constant([axis])
    spread = [walker.graph.emit("Unsqueeze", [walker.name(part), at]) for part in parts]
    return walker.graph.emit("Concat", spread, axis=axis)


@_translates("aten.split_with_sizes.default", "aten.chunk.default")
def _split(walker: _Walker, node: Node, a: Node, _: Any, axis: int = 0) -> list[str]:
    sizes = [part.shape[axis] for part in node.meta["val"]]
    outputs = [f"{node.name}.{i}" for i in range(len(sizes))]
    inputs = [walker.name(a), walker.graph.constant(sizes)]
    walker.graph.emit("Split", inputs, outputs=outputs, axis=axis)
    return outputs


@_translates("aten.sym_size.int")
def _size(walker: _Walker, node: Node, a: Node, axis: int) -> str:
    shape = walker.graph.emit("Shape", [walker.name(a)], start=axis, end=axis + 1)
    return walker.graph.emit("Squeeze", [shape, walker.graph.constant([0])])


@_translates("aten.arange.default", "aten.arange.start")
def _arange(walker: _Walker, node: Node, *bounds: Any, **_: Any) -> str:
    start, stop = bounds if len(bounds) == 2 else (0, bounds[0])
    return walker.graph.emit("Range", [walker.name(start), walker.name(stop), walker.name(1)])


@_translates("aten.zeros_like.default", "aten.full_like.default")
def _filled(walker: _Walker, node: Node, a: Node, value: float = 0, **_: Any) -> str:
    shape = walker.graph.emit("Shape", [walker.name(a)])
    return walker.graph.emit("Expand", [walker.cast(value, node.meta["val"].dtype), shape])


@_translates("aten.mean.dim")
def _mean(walker: _Walker, node: Node, a: Node, axes: Sequence[int], keepdim: bool = False,
          *, dtype: torch.dtype | None = None) -> str:  # fmt: skip
    operands = [walker.cast(a, node.meta["val"].dtype), walker.graph.constant(list(axes))]
    return walker.graph.emit("ReduceMean", operands, keepdims=int(keepdim))


@_translates("aten.argmax.default")
def _argmax(walker: _Walker, node: Node, a: Node, axis: int) -> str:
    """Of equal values the first one, in both."""
    return walker.graph.emit("ArgMax", [walker.name(a)], axis=axis, keepdims=0)
