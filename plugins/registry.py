"""Operators by name: one schema, one reference, and the fast implementations beside it.

`@operator(SCHEMA)` turns a reference function into the operator that the network calls: CPU
tensors run the reference, CUDA tensors run `plugins/<op>/kernel.py` where it exists. While
torch.export traces a network with plugins/graph.py loaded, the call becomes a node of the graph,
or the nodes that a composite's reference is made of.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from plugins.schema import OperatorSchema

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Operator:
    schema: OperatorSchema
    reference: Callable[..., Any]

    @functools.cached_property
    def kernel(self) -> Callable[..., Any] | None:
        """The device implementation, None where the operator has none."""
        module = self.reference.__module__.rpartition(".")[0] + ".kernel"
        if importlib.util.find_spec(module) is None:
            return None
        implementation: Callable[..., Any] | None = getattr(
            importlib.import_module(module), self.reference.__name__, None
        )
        return implementation

    def implementation(self, device: torch.device) -> Callable[..., Any]:
        """What runs on tensors of `device`: the kernel where there is one, else the reference."""
        kernel = self.kernel if device.type == "cuda" else None
        return kernel or self.reference


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether operators on x are kernels. Of a meta tensor, which is a shape without values, they
    are launches that can be recorded (plugins/device/record.py) and not run. A graph that
    torch.export traces has no launches."""
    return (x.is_cuda or x.is_meta) and not torch.compiler.is_exporting()


OPERATORS: dict[str, Operator] = {}
# What makes a call a node of the graph that torch.export traces; plugins/graph.py puts it here.
tracers: list[Callable[..., Any]] = []


def operator(schema: OperatorSchema) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated reference under `schema.name` and dispatch on its first tensor."""

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        if schema.name in OPERATORS:
            raise ValueError(f"operator {schema.name} is registered twice")
        entry = OPERATORS[schema.name] = Operator(schema, reference)

        @functools.wraps(reference)
        def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
            if tracers and not schema.composite and torch.compiler.is_exporting():
                node: R = tracers[0](schema.name, *args, **kwargs)
                return node
            operands = (*args, *kwargs.values())
            first = next((x for x in operands if isinstance(x, torch.Tensor)), None)
            if first is not None and runs_kernels(first) and entry.kernel is not None:
                result: R = entry.kernel(*args, **kwargs)
                return result
            return reference(*args, **kwargs)

        return dispatch

    return decorate
