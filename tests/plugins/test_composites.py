"""Operators that a graph takes apart: the nodes in their place, and a schema that fits."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from plugins.compressor.cases import PreviousCase
from plugins.formats.records import index_record
from plugins.formats.rows import Region, ValueRows
from plugins.graph import graph_operator, graph_operators
from plugins.graph_values import GraphRows, Pages
from plugins.linear import LinearWeight
from plugins.markov.cases import CASES as MARKOV_CASES
from plugins.mega_mhc.cases import ATTRIBUTES, MhcCase
from plugins.registry import OPERATORS

# Of each one the nodes of a graph, by hand.
NODES = {
    "hc_advance": ["hc_expand", "hc_collapse", "norm"],
    "index_queries": ["rope", "round_queries"],
    "linear_pair": ["linear", "linear"],
    "markov_choice": [],
    "mega_mhc": ["hc_expand", "hc_mix", "hc_collapse", "norm"],
    "norm_and_write": ["norm", "rope", "kv_write", "norm"],
    "pooled_rows": ["previous_rows", "pool_pairs", "norm"],
    "rotated_write": ["norm", "rope", "kv_write"],
    "wide_linear": ["linear"],
    "wide_linear_pair": ["linear", "linear"],
}
ROWS, WIDTH = 3, 64


def arguments_of(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the reference by name."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    def wide_weight(rows: int) -> LinearWeight:
        return LinearWeight(
            normal(rows, WIDTH).to(torch.promote_types(dtype, torch.float32)), False
        )

    turned = {
        "positions": torch.tensor([0, 7, 1000]),
        "inv_freq": 10_000.0 ** -torch.linspace(0, 1, 8, dtype=torch.float64),
    }
    written = {
        "x": normal(ROWS, WIDTH), "norm": normal(WIDTH), **turned,
        "rows": ValueRows(torch.zeros(5, WIDTH, dtype=dtype)), "slots": torch.tensor([4, -1, 0]),
        "eps": 1e-6,
    }  # fmt: skip
    match name:
        case "index_queries":
            queries, weights = normal(ROWS, 4, WIDTH), normal(ROWS, 4)
            layout = index_record(WIDTH)
            return {"queries": queries, "head_weights": weights, **turned, "layout": layout,
                    "scale": 0.1}  # fmt: skip
        case "wide_linear":
            return {"x": normal(ROWS, WIDTH), "weight": wide_weight(5)}
        case "wide_linear_pair":
            return {"x": normal(ROWS, WIDTH), "first": wide_weight(5), "second": wide_weight(9)}
        case "linear_pair":
            first, second = (LinearWeight(normal(n, WIDTH), False) for n in (5, 9))
            return {"x": normal(ROWS, WIDTH), "first": first, "second": second}
        case "markov_choice":
            return MARKOV_CASES[1].operands(dtype)
        case "mega_mhc" | "hc_advance":
            case = MhcCase("some rows", ROWS, 4, WIDTH)
            given = case.operands(dtype) | ATTRIBUTES
            mix = {"pre": (4,), "post": (4,), "comb": (4, 4)}
            made = {one: normal(ROWS, *shape) for one, shape in mix.items()}
            given |= {**made, "y": case.output(dtype), "norm": normal(WIDTH)}
            parameters = inspect.signature(OPERATORS[name].reference).parameters
            return {one: given[one] for one in parameters}
        case "pooled_rows":
            wide = torch.promote_types(dtype, torch.float32)
            rows = PreviousCase("", (2, 1), (3, 0), WIDTH).operands(wide)
            return {"norm": normal(WIDTH // 2), **rows, "eps": 1e-6}
        case "norm_and_write":
            return {"latent": normal(ROWS, 9), "latent_norm": normal(9), **written}
    assert name == "rotated_write"
    return written


def test_these_are_all_of_them() -> None:
    nodes = {operator.name for operator in graph_operators()}
    assert {name for name, entry in OPERATORS.items() if entry.schema.composite} == set(NODES)
    assert nodes == set(OPERATORS) - set(NODES)


@pytest.mark.parametrize("name", NODES)
def test_a_graph_has_the_pieces(name: str) -> None:
    arguments = arguments_of(name, torch.float32)
    tensors = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    if "inv_freq" in tensors:
        tensors["inv_freq"] = tensors["inv_freq"].view(torch.int64)

    called = getattr(importlib.import_module(OPERATORS[name].reference.__module__), name)

    class Module(torch.nn.Module):
        def forward(self, tensors: dict[str, torch.Tensor], memory: torch.Tensor) -> Any:
            store = GraphRows(Pages(memory), Region(0, 1, WIDTH), None)
            stores = {n: store for n, x in arguments.items() if isinstance(x, ValueRows)}
            given = {**arguments, **tensors, **stores}
            return tree_leaves(called(**given)), store.pages.tensor

    program = torch.export.export(Module(), (tensors, torch.zeros(5, WIDTH)))
    targets = [str(node.target) for node in program.graph.nodes]
    assert [t for t in targets if "dsv41" in t] == [f"dsv41.{one}.default" for one in NODES[name]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NODES)
def test_the_schema_gives_shapes_and_dtypes(name: str, dtype: torch.dtype) -> None:
    operator, arguments = graph_operator(name), arguments_of(name, dtype)
    made = tree_leaves(operator.entry.reference(**arguments))
    tensors, attributes = operator.flatten(arguments)
    values = [attributes.get(one.name) for one in operator.attributes]
    with FakeTensorMode() as mode:
        fakes = [None if x is None else mode.from_tensor(x) for x in tensors]
        described = operator.torch_op(*fakes, *values)
    described = [described] if isinstance(described, torch.Tensor) else described
    stores = [x for x in arguments.values() if isinstance(x, ValueRows)]
    expected = [x for x in made if x is not None] + [store.values for store in stores]
    assert [(x.shape, x.dtype) for x in described] == [(x.shape, x.dtype) for x in expected]
