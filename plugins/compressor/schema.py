"""Contracts of the ratio-2 compressor."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

POOL_PAIRS = OperatorSchema(
    name="pool_pairs",
    inputs=(TensorSpec("a", ("G", "2", "d")), TensorSpec("b", ("G", "2", "d"))),
    outputs=(TensorSpec("latent", ("G", "d"), "wide"),),
    attributes=(),
    ties="none: nothing is selected",
    deterministic="elementwise: a pair depends on itself only",
    source="technical report, compressed sparse attention, compressor of ratio 2",
)

PREVIOUS_ROWS = OperatorSchema(
    name="previous_rows",
    inputs=(
        TensorSpec("current", ("T", "c")),
        TensorSpec("tail", ("slots", "c"), "rows", aliased=True),
        TensorSpec("request", ("T",), "int64"),
        TensorSpec("is_first", ("T",), "bool"),
        TensorSpec("read_slots", ("R",), "int64"),
        TensorSpec("write_slots", ("T",), "int64"),
    ),
    outputs=(TensorSpec("previous", ("T", "c")),),
    attributes=(),
    ties="none: nothing is selected",
    deterministic="a copy: a row depends on the row before it only; the tail is read before it is "
    "written, and non-negative write slots must be distinct",
    source="technical report, compressed sparse attention, compressor of ratio 2",
)

POOLED_ROWS = OperatorSchema(
    name="pooled_rows",
    inputs=(
        TensorSpec("norm", ("d",)),
        TensorSpec("current", ("T", "2*d")),
        TensorSpec("tail", ("slots", "2*d"), "rows", aliased=True),
        TensorSpec("request", ("T",), "int64"),
        TensorSpec("is_first", ("T",), "bool"),
        TensorSpec("read_slots", ("R",), "int64"),
        TensorSpec("write_slots", ("T",), "int64"),
    ),
    outputs=(TensorSpec("latent", ("T", "d")),),
    attributes=("eps",),
    ties="none: nothing is selected",
    deterministic="a row depends on itself and the row before it; the tail as in previous_rows",
    source="technical report, compressed sparse attention, compressor of ratio 2",
    composite=True,
)
