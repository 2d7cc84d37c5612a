"""Contract of the routed and shared experts."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

MOE = OperatorSchema(
    name="moe",
    inputs=(
        TensorSpec("u", ("T", "D")),
        TensorSpec("ids", ("T", "k"), "int64"),
        TensorSpec("weights", ("T", "k")),
        TensorSpec("routed", ("E", "I", "D"), "experts"),
        TensorSpec("shared", ("N", "I", "D"), "experts"),
    ),
    outputs=(TensorSpec("y", ("T", "D")),),
    attributes=("swiglu_limit",),
    ties="none: the selection is an input",
    deterministic="a row depends on its own input only: fixed row tiles on the CPU, routed experts "
    "added in ascending order, then the shared ones; on a GPU the order of its sums also on "
    "how many rows there are",
    source="technical report, DeepSeekMoE (arXiv 2401.06066) with clamped SwiGLU",
)
