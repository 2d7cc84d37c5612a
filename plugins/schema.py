"""The description of an operator: shapes, dtypes, ties and aliasing, stated once.

From one schema the registry derives the dispatching function, the torch custom op, the ONNX node
and the TensorRT plugin. See docs/adr/0003-operator-schema.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["float", "wide", "float64", "int64", "bool", "rows", "weight", "experts"]


@dataclass(frozen=True)
class TensorSpec:
    """One operand. `dims` are symbols ("T", "H") or formulas of them ("G*N", see
    plugins/graph_dims.py), of attributes or of their fields; equal symbols, equal sizes.

    kind: "float" is the compute dtype (float64, float32, bfloat16) and, of an output, the dtype of
    the first such input; "wide" is that output in at least float32; "float64" is float64 whatever
    the compute dtype; "rows" is a cache row store; "weight" is a linear weight in any stored
    format, "experts" a stack of three per expert.
    """

    name: str
    dims: tuple[str, ...]
    kind: Kind = "float"
    optional: bool = False
    aliased: bool = False  # written in place


@dataclass(frozen=True)
class OperatorSchema:
    """The contract of one operator.

    ties: which of equal candidates wins, or why none can occur. deterministic: what a row's result
    may depend on. source: where the definition comes from (report section, paper, pull request).
    composite: fewer launches than its pieces on a device; a graph has the pieces that its reference
    is made of, and no node, ONNX schema or TensorRT plugin of this name.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[str, ...]
    ties: str
    deterministic: str
    source: str
    composite: bool = False
