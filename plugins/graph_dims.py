"""The dims of an operand as formulas: "T", "R+1", "S*(2+S)", "H/G*d", "min(k,n)",
"ceil(n/block_size)", "len(layout.primes)".

A formula is evaluated over whatever stands for a size: an int, a torch SymInt while a graph is
traced, a dimension expression of a plan's builder. `Arithmetic` says how those are combined.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arithmetic:
    """The operations that formulas use, on one kind of size. `constant` makes a size of an int;
    `exact_div` divides sizes that are known to divide, `ceil_div` rounds up."""

    constant: Callable[[int], Any]
    add: Callable[[Any, Any], Any]
    sub: Callable[[Any, Any], Any]
    mul: Callable[[Any, Any], Any]
    exact_div: Callable[[Any, Any], Any]
    ceil_div: Callable[[Any, Any], Any]
    min: Callable[[Any, Any], Any]


INTEGERS = Arithmetic(
    constant=int,
    add=lambda a, b: a + b,
    sub=lambda a, b: a - b,
    mul=lambda a, b: a * b,
    exact_div=lambda a, b: a // b,
    ceil_div=lambda a, b: -(-a // b),
    min=min,
)


def evaluate(formula: str, sizes: Mapping[str, Any], arithmetic: Arithmetic = INTEGERS) -> Any:
    """The size that `formula` gives.

    `sizes` holds the symbols, as sizes of that arithmetic or as ints, and under a list attribute's
    name the list. Raises KeyError for a symbol that nothing bound, ValueError for no formula.
    """
    return _value(_parsed(formula), sizes, arithmetic)


def bind(dims: Sequence[str], shape: Sequence[Any], sizes: dict[str, Any]) -> None:
    """Note the symbols of one operand of this shape in `sizes`; formulas bind nothing.

    "..." takes what the others leave, as a list under "...".
    """
    if "..." in dims:
        before = dims.index("...")
        after = len(dims) - before - 1
        stop = len(shape) - after
        sizes.setdefault("...", list(shape[before:stop]))
        bind(dims[:before], shape[:before], sizes)
        bind(dims[before + 1 :], shape[stop:], sizes)
        return
    for dim, size in zip(dims, shape, strict=True):
        if dim.isidentifier():
            sizes.setdefault(dim, size)


def shape_of(
    dims: Sequence[str], sizes: Mapping[str, Any], arithmetic: Arithmetic = INTEGERS
) -> list[Any]:
    """The shape of an operand with these dims."""
    shape: list[Any] = []
    for dim in dims:
        if dim == "...":
            shape += sizes["..."]
        else:
            shape.append(evaluate(dim, sizes, arithmetic))
    return shape


@functools.cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def _value(node: ast.expr, sizes: Mapping[str, Any], arithmetic: Arithmetic) -> Any:
    def value(part: ast.expr) -> Any:
        return _value(part, sizes, arithmetic)

    match node:
        case ast.Constant(value=int(number)):
            return arithmetic.constant(number)
        case ast.Name(id=name):
            size = sizes[name]
            return arithmetic.constant(size) if type(size) is int else size
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return arithmetic.add(value(left), value(right))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return arithmetic.sub(value(left), value(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return arithmetic.mul(value(left), value(right))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return arithmetic.exact_div(value(left), value(right))
        case ast.Call(func=ast.Name(id="min"), args=[left, right]):
            return arithmetic.min(value(left), value(right))
        case ast.Call(
            func=ast.Name(id="ceil"), args=[ast.BinOp(left=left, op=ast.Div(), right=right)]
        ):
            return arithmetic.ceil_div(value(left), value(right))
        case ast.Call(
            func=ast.Name(id="len"), args=[ast.Attribute(value=ast.Name(id=name), attr=field)]
        ):
            return arithmetic.constant(len(sizes[f"{name}_{field}"]))
    raise ValueError(f"expected a formula of sizes, got {ast.unparse(node)}")
